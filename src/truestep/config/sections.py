"""The sections of the configuration: each option, its default and its meaning. Imports no torch.

Add a field only together with the code that uses it.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationError, create_model

from truestep.config.section import (
    OR_OFF,
    SOURCE_NAME,
    Count,
    ImportPath,
    NotNegative,
    Positive,
    Section,
    SourceName,
    by_type,
)


class HeadConfig(Section):
    fp32_lm_head: bool = False
    """Keep logits in float32 instead of rounding them to bfloat16: given the hidden states, log-probs are then within
    1e-4 of float64. Use the same setting as in your sampler, so that both compute the same log-probs."""
    logits_chunk_size: Count | Literal["auto"] = "auto"
    """The largest number of rows of logits in memory at a time. It affects memory and speed, not results: lower it if
    the head runs out of memory. `auto`: chosen so that logits take at most half of the free memory; with
    `deterministic`, chosen only by the size of the vocabulary."""
    head_gradient: Literal["bfloat16", "split"] = "bfloat16"
    """Precision of the logits' gradient in the head's backward products on a GPU. `bfloat16`: rounded to bfloat16.
    `split`: the sum of two bfloat16 numbers, which brings the gradient of the head's weight 4 (on a Hopper GPU) to 40
    times nearer to float64, at 1.7 times the cost."""


class ExpertsConfig(Section):
    replay: Annotated[Literal["auto", "off", "require"], OR_OFF] = "auto"
    """Which experts compute a token. `auto`: the experts in its record (`routed_experts`); a token without recorded
    experts uses the router's own choice. `require`: every record must have `routed_experts`, and servers must return
    them. `off`: the router's own choice for every token. In each case, the policy's router computes the weights of the
    token's experts, with their gradient."""
    router: Literal["trained", "frozen"] = "trained"
    """Whether the routers are trained. `frozen`: their weights do not change."""
    balance: Literal["none", "loss", "bias"] = "none"
    """How experts are kept evenly loaded. `loss`: a term of the loss, which is smallest if all experts of a layer are
    chosen equally often. The choices in the whole step are counted before the step: in the records if all have
    `routed_experts`, else by another forward pass. `bias`: after each update, the model's own routing bias rises for
    experts that were chosen less often in the step than the layer's mean, and falls for experts that were chosen more
    often. The model must have such a bias (DeepSeek-V3, GLM-4.5, LFM2-MoE)."""
    strength: Positive = 0.001
    """With `balance: loss`, the weight of the term. With `balance: bias`, the change of a bias in one step."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """The weight of a term that keeps the routers' logits small: the square of their logsumexp, averaged over layers
    and tokens."""


class ModelConfig(Section):
    path: str
    """A Hugging Face causal LM directory (safetensors, config.json, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The dtype that the model computes in. Trained weights and the optimizer's state are float32 in any case."""
    head: HeadConfig = HeadConfig()
    """The LM head and its log-probabilities."""
    freeze: list[Annotated[str, Field(min_length=1)]] | None = None
    """Name patterns of weights to freeze, such as model.embed_tokens.* or model.layers.[0-7].*. Frozen weights have no
    gradient, no optimizer state and no float32 copy: they are kept in `dtype`."""
    experts: ExpertsConfig = ExpertsConfig()
    """Training of a mixture of experts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that the model runs on. `auto`: a GPU if there is one, else the CPU."""
    attention: Literal["auto", "flash", "torch"] = "auto"
    """The attention kernel for packed documents. `flash`: FlashAttention 4, an optional package (truestep[flash]) for
    bfloat16 on Hopper and Blackwell GPUs. Before it is used, its results are compared with float32 on this machine.
    `torch`: torch's own kernel. `auto`: `flash` if it can be used, else `torch`."""
    activation_checkpointing: Annotated[
        Literal[False, "full", "selective", "elementwise", "auto"],
        BeforeValidator(lambda value: "full" if value is True else value),
    ] = False
    """Recompute activations in the backward pass: less memory, the same numbers. `full` (or `true`): whole layers, for
    about a third more time. `selective`: everything except attention and the matrix products whose input and output
    have about the same width, for about a sixth more time. `elementwise`: only norms, RoPE and activation functions;
    with `compile` it costs 1 to 2% of time, saves a third of the memory of activations, and changes rounding. `auto`:
    the fastest that fits the GPU according to the memory plan; `false` on a CPU."""
    activation_offload: bool | Literal["auto"] = False
    """Keep the saved inputs of recomputed layers in host memory; the copies overlap with computation. It needs
    `activation_checkpointing`. `auto`: only if the run would not fit the GPU otherwise, according to the memory
    plan."""
    compile: bool = False
    """Compile the layers (torch.compile): up to twice the speed, for up to a minute at the start. On a CPU it needs a
    C++ compiler."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model directory."""


class AdapterConfig(Section):
    type: Literal["lora"] = "lora"
    """`lora`: each adapted layer W computes W x + (alpha / rank) B (A x). W is frozen in `model.dtype`; only the small
    matrices A and B are trained."""
    rank: Count = 32
    """The LoRA rank: the rows of A and the columns of B. A larger rank can learn more and takes more memory."""
    alpha: Positive = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | list[Annotated[str, Field(min_length=1)]] = "all-linear"
    """The linear layers to adapt. all-linear: all but the head. Otherwise names such as q_proj, or patterns of full
    names such as model.layers.[0-7].mlp.*."""
    path: str | None = None
    """A directory with an adapter to start from, as peft saves it. Rank, alpha and targets are then read from it."""


class RedisSource(Section):
    type: Literal["stream"]
    """`stream`: a Redis stream. `files`: the files that appear in a directory. `custom`: a source of your own."""
    url: str = "redis://127.0.0.1:6379/0"
    """The Redis server. To keep a password out of the file, set the environment variable REDISCLI_AUTH."""
    stream: str
    """The key of the stream. An entry's field `record` is a rollout as JSON; an entry `event: end` ends the data."""
    group: str = "truestep"
    """The Redis consumer group. Each run needs its own."""
    consumer: str = "trainer"
    """The run's name within its group."""
    events: str | None = None
    """The stream to which weights_ready and training_finished are added. `null`: STREAM:events."""


class DirectorySource(Section):
    type: Literal["files"]
    """`stream`: a Redis stream. `files`: the files that appear in a directory. `custom`: a source of your own."""
    directory: str
    """The directory to watch. Senders write each file under another name and rename it to NAME.jsonl when it is
    complete. A file named END ends the data. Events are written to events.jsonl in it."""


class CustomSource(Section):
    type: Literal["custom"]
    """`stream`: a Redis stream. `files`: the files that appear in a directory. `custom`: a source of your own."""
    function: str
    """package.module:function, called as function(start, **options). It returns an iterator over records (mappings with
    the fields of a rollout), beginning with record number `start`. When a run resumes, `start` is the number of the
    first record that it has not read yet."""
    options: dict[str, Any] | None = None
    """The function's keyword-only parameters, checked against its signature."""


SourceConfig = Annotated[
    Annotated[RedisSource, Tag("stream")]
    | Annotated[DirectorySource, Tag("files")]
    | Annotated[CustomSource, Tag("custom")],
    by_type(),
]


# Made with create_model: the option's name `from` is a Python keyword, so no class attribute can have it.
OverlongPenaltyConfig = create_model(
    "OverlongPenaltyConfig",
    __base__=Section,
    **{
        "from": (
            Annotated[int, Field(ge=0)],
            Field(description="The longest completion, in labels, without a penalty."),
        ),
        "to": (Count, Field(description="The length, in labels, from which the penalty is `weight`.")),
        "weight": (Positive, Field(1.0, description="The largest penalty.")),
    },  # type: ignore[call-overload]
)


class FieldConfig(Section):
    level: Literal["label", "document"]
    """`label`: a value for each label, given in a record like `advantage`. `document`: one value."""
    dtype: Literal["float32", "int64", "bool"] = "float32"
    """The dtype of the values."""
    default: bool | int | float | None = None
    """The value for records without the field. `null`: such records are rejected."""


FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class DataConfig(Section):
    path: str | list[str] | None = None
    """Rollout files: JSONL (.jsonl) or Parquet (.parquet). The files of a glob are read in sorted order. With {rank}
    in the path, each data rank reads only its own files."""
    source: SourceConfig | None = None
    """Rollouts that your own sampler sends during the run."""
    cache_directory: str | None = None
    """The directory for copies of the documents of large rollout files. The copies are made once for all ranks and runs
    of the machine, and are about half as large as the files. `null`: truestep/data in $XDG_CACHE_HOME or ~/.cache.
    Files that are smaller than 16 MiB together are read into memory instead."""
    temperature: Positive = 1.0
    """The sampling temperature of records that have no `temperature` of their own."""
    advantages: (
        Literal["group_mean", "leave_one_out", "length_weighted", "group_normalized", "batch_normalized", "none"]
        | ImportPath
    ) = "group_normalized"
    """How rewards become advantages: which baseline is subtracted from each reward. `group_mean`: the mean of the
    group. `leave_one_out`: the mean of the other members of the group. `length_weighted`: the group's mean, weighted by
    numbers of labels. `group_normalized`: `group_mean` with `advantage_scale: group`. `batch_normalized`: `group_mean`
    with `advantage_scale: step`. `none`: records have their own advantages. package.module:function: your own function,
    which gets the records of a group and returns one advantage for each."""
    advantage_scale: Literal["none", "group", "step"] | None = None
    """What advantages are divided by. `group`: the standard deviation of the group's rewards. `step`: the standard
    deviation over all documents of the step, after the baseline is subtracted. `null`: as `advantages` implies, else
    `none`."""
    advantage_std_floor: NotNegative = 1e-4
    """Added to the standard deviation that advantages are divided by, so that nearly equal rewards do not become large
    advantages."""
    overlong_penalty: OverlongPenaltyConfig | None = None  # type: ignore[valid-type]
    """Subtracts a length penalty from the reward, before advantages are computed: 0 up to `from` labels, then linear
    up to `weight` at `to` labels."""
    zero_advantage: Literal["keep", "skip", "replace"] = "keep"
    """What to do with documents whose advantages are all 0. `keep`: train on them like others. `skip`: no backward pass
    for them; no result changes. `replace`: discard groups whose rewards are all equal and sample other prompts until
    the step is full (dynamic sampling)."""
    replace_limit: Count = 64
    """With `zero_advantage: replace`, the largest number of groups to discard in a step. Further groups with equal
    rewards are kept."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """What to do with documents that ended at a length limit, after their rewards were counted in the baseline. `keep`:
    train on them like others. `mask`: they have no labels, but count as documents. `drop`: leave them out of steps."""
    group_size: Count | None = None
    """The number of rollouts for each prompt. A group of rollouts from files is complete at this size; `null`: at the
    end of the data."""
    group_timeout: Positive | None = 3600.0
    """With `data.source`: seconds after which the documents of an incomplete group are rejected. Time during which the
    trainer has enough documents is not counted. `null`: groups wait as long as the run lasts."""
    tokens_per_microbatch: Count = 16384
    """The largest number of tokens in one micro-batch. Longer documents are rejected. Raise it for speed; lower it if
    memory runs out."""
    share_prefixes: Annotated[Literal["auto", "always", "off"], OR_OFF] = "auto"
    """Compute a prefix that several documents share only once, forward and backward: the prompt of a group, or the
    earlier turns of a conversation. No result changes. `auto`: share where it saves time. `always`: share wherever
    documents of a micro-batch begin with the same token. `off`: compute each document alone."""
    pad_to_multiple: Count = 1
    """Pad each micro-batch to a multiple of this many tokens. Padding does not affect results."""
    on_bad_record: Literal["reject", "stop"] = "reject"
    """What to do with invalid records. `reject`: write them to rejected.jsonl and go on. `stop`: end the run at the
    first."""
    fields: dict[FieldName, FieldConfig] | None = None
    """Fields of your own in the records, by name, for your own loss, metrics and advantages. Each is {level: label or
    document, dtype: float32, int64 or bool, default: a number}; without a default, a record must have it."""
    shuffle: bool = False
    """Shuffle the documents of files, by `seed`, in each epoch."""
    epochs: Count = 1
    """How many times each document of the files is trained on."""


# Made with create_model: the option's name `class` is a Python keyword, so no class attribute can have it.
EnvironmentConfig = create_model(
    "EnvironmentConfig",
    __base__=Section,
    **{
        "type": (
            Literal["python", "command", "reasoning_gym", "openenv", "verifiers"],
            Field(
                "python",
                description="`python`: a class of your own. `command`: a program that asks for completions through "
                "OpenAI's API (docs/agents.md). `reasoning_gym`: tasks of the package reasoning-gym. `openenv`: an "
                "OpenEnv server. `verifiers`: environments of the package verifiers.",
            ),
        ),
        "class": (
            str | None,
            Field(None, description="With `python`: package.module:Class, with truestep.Environment's methods."),
        ),
        "run": (
            str | Annotated[list[str], Field(min_length=1)] | None,
            Field(
                None,
                description="With `command`: the program and its arguments, one text or a list. {name} is replaced by "
                "a field of the prompt's record. The program gets the whole record as a line of JSON on standard "
                "input, and the address and key of the policy's API in OPENAI_BASE_URL and OPENAI_API_KEY.",
            ),
        ),
        "preload": (
            list[str] | None,
            Field(
                None,
                description="With `command` and run: python FILE or python -m MODULE: modules to import in one "
                "process. An episode's program is then a fork of it, in place of a new interpreter. `null`: none.",
            ),
        ),
        "options": (
            dict[str, Any] | None,
            Field(None, description="The environment's options, by name. `null`: none."),
        ),
    },  # type: ignore[call-overload]
)


class DatasetPrompts(Section):
    dataset: str
    """A directory that save_to_disk wrote, a file or a directory of files (Parquet, JSON lines, CSV), or a name on the
    Hugging Face hub."""
    subset: str | None = None
    """The configuration of a dataset that has several."""
    split: str | None = None
    """The split, such as train, or train[:1000]. `null`: the only one."""
    revision: str | None = None
    """For a dataset on the hub: its commit, tag or branch. `null`: the newest commit."""
    columns: dict[str, str] | None = None
    """The fields of a prompt, and the column from which each is taken. `null`: all columns under their own names."""
    template: str | list[dict[str, str]] | None = None
    """The prompt as text, or as chat messages with role and content. {COLUMN} is replaced by the value of a column; {{
    and }} are braces. `null`: the field `prompt`."""


def _read_prompts(given: str | dict[str, Any]) -> str | dict[str, Any]:
    """Check one or several sources of prompts, and return them unchanged."""
    files_of(given)
    return given


def _source(given: Any, where: str) -> str | DatasetPrompts:
    if isinstance(given, str):
        return given
    try:
        return DatasetPrompts.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        known = ", ".join(DatasetPrompts.model_fields)
        what = "unknown" if first["type"] == "extra_forbidden" else first["msg"][:1].lower() + first["msg"][1:]
        raise ValueError(f"prompts{where}{f'.{place}' if place else ''}: {what}: a dataset has {known}") from None


Prompts = Annotated[str | dict[str, Any], AfterValidator(_read_prompts)]


class CurriculumConfig(Section):
    easy: float = 1.0
    """A prompt is too easy, and rests, if the mean reward of its group is at least this."""
    hopeless: float = 0.0
    """A prompt is hopeless, and rests, if the mean reward of its group is at most this."""
    rest: Count = 4
    """The number of passes over its source that a prompt rests. Then it is tried again."""


class SamplerBase(Section):
    prompts: Prompts | None = None
    """A JSONL file of {"prompt": text or chat messages, other fields}, a Hugging Face dataset on disk, or a dataset as
    {dataset, subset, split, revision, columns, template} (docs/rollouts.md). Several of these, each under a name, are a
    mixture of sources. `null`: the environment makes its own prompts."""
    prompt_weights: dict[SourceName, Positive] | None = None
    """With several sources of prompts: the weight of each source, by name, such as {math: 3, code: 1}. A source's share
    of the groups is proportional to its weight. `null`: to its number of prompts."""
    curriculum: CurriculumConfig | None = None
    """For some passes, leave out prompts that are too easy or hopeless for the policy (docs/sampling.md). `null`: every
    pass has all prompts."""
    reward: str | None = None
    """package.module:function, called as reward(prompt, completion, **fields) -> float. `null`: `environment` gives the
    rewards."""
    environment: EnvironmentConfig | None = None  # type: ignore[valid-type]
    """An environment, which answers the policy over several turns and rewards the episode (docs/environments.md). The
    limits reward_timeout (for each of its answers), reward_memory and the like also apply to its processes."""
    max_turns: Count = 8
    """With an environment: the largest number of the policy's turns in an episode. An episode that reaches this limit,
    max_episode_tokens or episode_timeout becomes a truncated document. Its reward is the one that the environment gives
    at that point, or 0."""
    max_episode_tokens: Count = 16384
    """With an environment: the largest number of tokens in the policy's context, completion included. It must not
    exceed data.tokens_per_microbatch."""
    episode_timeout: Positive = 600.0
    """With an environment: the longest time of an episode, in seconds."""
    temperature: Positive = 1.0
    """The sampling temperature. The policy is trained at the same temperature."""
    max_new_tokens: Count = 512
    """The largest number of tokens in a completion. A completion ends earlier at the end-of-text token."""

    reward_workers: Count | None = None
    """The number of reward processes, or of threads with `reward_isolation: same_process`. `null`: one process for each
    core of this rank (the ranks of a machine share its cores), or one thread."""
    reward_timeout: Positive = 60.0
    """Seconds for one reward. A reward that takes longer is killed, and its completion is rejected."""
    reward_memory: Positive | None = None
    """The memory limit (GiB) of a reward process, including everything that it starts. `null`: half of the machine's
    memory, divided by the number of reward processes, and at least 1."""
    reward_environment: list[str] | None = None
    """Names of environment variables to pass to rewards, in addition to the usual ones without secrets (PATH, HOME,
    LANG and the like). `null`: only the usual ones."""
    reward_isolation: Annotated[Literal["auto", "require", "off", "same_process"], OR_OFF] = "auto"
    """Linux namespaces for reward processes: they see no other processes, and cannot write to files outside a private
    /tmp in memory (SECURITY.md). `auto`: isolate if the system permits it; the run prints whether it does. `require`:
    end the run if the system does not permit it. `off`: no isolation. `same_process`: rewards and environments are
    called in the trainer's own process, one at a time unless reward_workers asks for more threads. There is no limit of
    time or memory, and the objects of your program keep their state between calls."""
    reward_writable: list[str] | None = None
    """Directories that isolated rewards may write to. The files stay after the run, and their size is not limited. Do
    not list directories that code is imported from. `null`: none."""
    reward_network: bool = True
    """Whether rewards may use the network, for example to ask a judge. `false`, with isolation: no network at all, not
    even services of this machine (Redis, servers, the ranks' store)."""


class InProcessSampler(SamplerBase):
    type: Literal["in_process"] = "in_process"
    """The trainer samples in process, with the weights that it trains."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; `1`: off. Log-probs are still those of the full distribution."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k likeliest tokens; `0`: off. Log-probs are still those of the full distribution."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample only tokens with at least this fraction of the likeliest token's probability; `0`: off. Log-probs are
    still those of the full distribution."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that end a completion. Such a text stays part of the completion."""
    engine: bool = True
    """Sample with the engine (paged KV cache, continuous batching, kernels and CUDA graphs on a GPU). `false`:
    transformers' attention and cache, one batch after another; slower."""
    exact: bool = False
    """Compute log-probs in sampling and training with batch-invariant kernels, so that the importance ratio is exactly
    1 in the first update on fresh documents. It costs one more forward pass in each step, and slower matrix
    products."""
    batch_size: Count | None = None
    """The largest number of completions decoded at a time. `null`: as many as fit in free memory, at most 1,024 on a
    GPU and 256 on a CPU."""


class ServerStart(Section):
    environment: str
    """The path of a virtual environment with the engine that sampler.protocol names, or of its Python. Trainer and
    engine need not share packages."""
    gpus: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """The numbers of this machine's GPUs that servers use. No rank of the trainer may use one of these. `null`: one
    server, on the devices that its engine finds."""
    tensor: Count = 1
    """The number of GPUs of each server. The number of servers is the number of `gpus` divided by this."""
    options: list[str] | None = None
    """Further command-line arguments of the engine, such as [--gpu-memory-utilization, '0.9']."""
    timeout: Positive = 1800.0
    """Seconds after its start within which a server must answer."""


class ServerSampler(SamplerBase):
    type: Literal["server"]
    """Inference servers sample. They get new weights after each update."""
    protocol: str = "vllm"
    """The kind of server: vllm, sglang, or package.module:Class, your own implementation of
    truestep.generate.servers.protocol.InferenceServer."""
    urls: Annotated[list[str], Field(min_length=1)] | None = None
    """The servers, such as http://host:8000. A request goes to the least busy server. `null`: the servers of
    sampler.start."""
    start: ServerStart | None = None
    """Servers that the run itself starts, in place of sampler.urls, on the machine of its first rank. The run restarts
    a server that exits, and stops all servers at its own end. Their output is in the run's directory, in servers/0.log
    and so on."""
    model: str = "policy"
    """The name under which the servers serve the model (--served-model-name)."""
    api_key_env: str | None = None
    """The environment variable that holds the servers' API key. `null`: no key."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """The largest staleness of a token: the number of documents that the policy may have been trained on between the
    token's sampling and its training. `0`: sampling and training alternate. n x schedule.docs_per_step: servers sample
    up to n steps ahead while the trainer trains. Documents are trained on in the order in which their sampling
    began."""
    pause: Literal["wait", "keep", "abort"] = "wait"
    """What happens to running completions when servers get new weights. `wait`: they finish with the old weights first.
    `keep`: they continue with the new weights, and each token records its version. `abort`: they are discarded and
    sampled again."""
    updates: Literal["at_once", "rolling"] = "at_once"
    """How several servers get new weights. `at_once`: all at the same time. `rolling`: one after another; the others
    keep sampling meanwhile."""
    concurrency: Count = 256
    """The largest number of groups in flight over all servers; one request asks for a whole group. A partly finished
    group counts as the fraction that is not finished. Raise it if servers have capacity left."""
    request_timeout: Positive = 600.0
    """Seconds within which a server must answer a request completely."""
    adapter: Literal["merged", "served"] = "merged"
    """How servers get a LoRA adapter. `merged`: they load the model's weights with the adapter merged into them.
    `served`: they load the adapter alone, on top of the model that they were started with, so that several runs can
    share a server (vLLM with --enable-lora)."""
    transfer: Literal["disk", "nccl"] = "disk"
    """How new weights get to the servers. `disk`: through weights_directory. `nccl`: from the trainer's first GPU to
    the GPUs of vLLM servers started with --weight-transfer-config '{"backend": "nccl"}', on this machine or another."""
    weights_directory: str | None = None
    """The directory for new weights, which trainer and servers must see under the same path: on a shared disk, or in
    memory below /dev/shm if servers run on this machine. Several runs may share it. `null`: `weights` in the run's
    directory."""
    tolerance: Positive | None = None
    """The largest mean difference, in nats, between a server's and the trainer's log-probs of a few test texts,
    measured after each update of the weights. If the difference is larger, the run ends before it trains on rollouts of
    these weights. The log-probs of completions must keep the same bound. `null`: 0.001 with `model.dtype: float32`,
    else 0.1."""
    check_share: Annotated[float, Field(ge=0, le=1)] = 0.002
    """With max_staleness above 0: the share of completions that the trainer scores on arrival, with the weights that
    sampled them. A larger share finds wrong log-probs sooner; each scored completion costs a forward pass."""


def files_of(prompts: str | dict[str, Any] | None) -> dict[str, str | DatasetPrompts]:
    """Return the files and datasets of an option `prompts`, by the names of their sources. A single source without a
    name gets the name ''."""
    if prompts is None:
        return {}
    if isinstance(prompts, str) or _is_dataset(prompts):
        return {"": _source(prompts, "")}
    if not prompts or (wrong := next((name for name in prompts if not SOURCE_NAME.fullmatch(name)), None)) is not None:
        named = f"{wrong!r} is no name of a source" if prompts else "they name no source"
        raise ValueError(f"prompts: {named}: a name has letters, digits, _, . and -")
    return {name: _source(given, f".{name}") for name, given in prompts.items()}


def _is_dataset(prompts: dict[str, Any]) -> bool:
    """Return whether a mapping describes one dataset, and not a mixture with a source named `dataset`."""
    others = [value for name, value in prompts.items() if name not in DatasetPrompts.model_fields]
    return "dataset" in prompts and not (others and all(map(_is_source, others)))


def _is_source(value: Any) -> bool:
    return "dataset" in value if isinstance(value, dict) else any(sign in str(value) for sign in "./")


def place_of(source: str | DatasetPrompts) -> str:
    """Return the file, or the name of the dataset, of a source of prompts."""
    return source if isinstance(source, str) else source.dataset


SamplerConfig = Annotated[
    Annotated[InProcessSampler, Tag("in_process")] | Annotated[ServerSampler, Tag("server")], by_type("in_process")
]


class EvaluationSet(Section):
    prompts: Prompts | None = None
    """As evaluation.prompts. `null`: the set's environment makes the prompts."""
    reward: str | None = None
    """As evaluation.reward. `null`: the set's environment rates the answers, else evaluation.reward."""
    environment: EnvironmentConfig | None = None  # type: ignore[valid-type]
    """As sampler.environment. `null`: the answers are rated by the set's reward, else by evaluation.reward, else by the
    sampler's reward or environment."""
    max_prompts: Count | None = None
    """Replaces evaluation.max_prompts for this set. `null`: evaluation.max_prompts."""
    samples_per_prompt: Count | None = None
    """Replaces evaluation.samples_per_prompt for this set. `null`: evaluation.samples_per_prompt."""
    pass_reward: float | None = None
    """Replaces evaluation.pass_reward for this set. `null`: evaluation.pass_reward."""
    temperature: Positive | None = None
    """Replaces evaluation.temperature for this set. `null`: evaluation.temperature."""
    max_new_tokens: Count | None = None
    """Replaces evaluation.max_new_tokens for this set. `null`: evaluation.max_new_tokens."""


def _without_nulls(sets: Any) -> Any:
    """Leave out sets that are null. The command line can remove a set of the file by setting it to null."""
    return {name: given for name, given in sets.items() if given is not None} if isinstance(sets, dict) else sets


class EvaluationConfig(Section):
    prompts: Prompts | None = None
    """Held-out prompts that the policy answers, in the format of sampler.prompts. With several sources, rewards are
    also logged for each source. `null`: `path` or `sets` is given, or the sampler's environment makes the prompts."""
    sets: Annotated[dict[SourceName, EvaluationSet], Field(min_length=1), BeforeValidator(_without_nulls)] | None = None
    """Several sets of held-out prompts by name, in place of `prompts`. Each is {prompts, reward or environment,
    max_prompts, samples_per_prompt, pass_reward, temperature, max_new_tokens}. An option that a set leaves out is taken
    from this section; without a reward or an environment there, the sampler's is taken."""
    path: str | list[str] | None = None
    """With a supervised loss: held-out documents, in the format of data.path. The logged loss is the mean over all of
    their labels."""
    every: Count = 10
    """Evaluate before the first step, every n steps, and after the last step."""
    reward: str | None = None
    """The reward, as package.module:function. `null`: sampler.reward."""
    reward_workers: Count | None = None
    """As sampler.reward_workers. `null`: the sampler's, or one for each core that this rank may use."""
    reward_timeout: Positive | None = None
    """As sampler.reward_timeout. `null`: the sampler's, or 60 without a sampler."""
    reward_memory: Positive | None = None
    """As sampler.reward_memory. `null`: the sampler's, or its default."""
    reward_environment: list[str] | None = None
    """As sampler.reward_environment. `null`: the sampler's, or none."""
    reward_isolation: Annotated[Literal["auto", "require", "off", "same_process"] | None, OR_OFF] = None
    """As sampler.reward_isolation. `null`: the sampler's, or auto."""
    reward_writable: list[str] | None = None
    """As sampler.reward_writable. `null`: the sampler's, or none."""
    reward_network: bool | None = None
    """As sampler.reward_network. `null`: the sampler's, or true."""
    max_prompts: Count | None = None
    """Use only the first n prompts of each file. `null`: all."""
    samples_per_prompt: Count = 1
    """The number of sampled completions for each prompt, in addition to the greedy one."""
    pass_reward: float | None = None
    """An answer passes if its reward is at least this. pass@1, pass@2, pass@4 and so on, up to samples_per_prompt, are
    then logged. `null`: no pass@k."""
    temperature: Positive = 1.0
    """The temperature of the sampled completions."""
    max_new_tokens: Count | None = None
    """The largest number of tokens in a completion. `null`: sampler.max_new_tokens, or 512 without a sampler."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling of the sampled completions; `1`: off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k likeliest tokens; `0`: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample only tokens with at least this fraction of the likeliest token's probability; `0`: off."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that end a completion."""
    engine: bool = True
    """As sampler.engine."""
    batch_size: Count | None = None
    """As sampler.batch_size."""
    servers: bool = False
    """Whether the sampler's inference servers sample the answers, with the step's weights. `false`: the trainer samples
    them in process."""


class ScheduleConfig(Section):
    docs_per_step: Annotated[int, Field(ge=0)] = 0
    """The number of documents in a step. `0`: a step is a fixed number of micro-batches on each rank:
    depth_first_micro_batches x breadth_first_micro_batches."""
    overshoot: Literal["carry", "keep"] = "carry"
    """What to do with documents beyond docs_per_step. `carry`: a step has exactly docs_per_step documents; further ones
    wait for the next step. `keep`: a step ends with the micro-batch that reaches docs_per_step, and trains on all
    documents of this micro-batch."""
    depth_first_micro_batches: Count = 1
    """With `docs_per_step: 0`, the number of micro-batches of each rank in a step, divided by
    breadth_first_micro_batches."""
    breadth_first_micro_batches: Count = 1
    """The number of consecutive micro-batches that share one all-gather of the sharded weights: a larger number means
    less communication. The number of micro-batches in a step is a multiple of it."""
    steps: Count | None = None
    """The number of optimizer steps of the whole run. `null`: until the data ends."""
    last_step: Literal["train", "drop"] = "train"
    """What to do with the documents that are left at the end of the data. `train`: make a last, smaller step. `drop`:
    leave them out; the run prints how many."""
    stall_timeout: Positive = 600.0
    """Seconds without progress after which the run ends and names what is stuck: a rank, a server, a source or a disk.
    Tokens, micro-batches, layers, bytes and processor time all count as progress, so a slow run is not ended."""
    updates_per_batch: Count = 1
    """The number of optimizer updates on the same documents."""
    preemption_file: str | None = None
    """A file that announces the end of a rank's machine. When it appears, the run finishes the current step, saves and
    ends, as after SIGTERM. Under an elastic launcher, only this rank leaves, and the others go on. Each rank looks for
    the file on its own machine, so the path should not be on a shared disk. `null`: no such file."""


class ParallelConfig(Section):
    data_shard: Literal[-1] | Count = -1
    """Shard weights, gradients and optimizer state over this many ranks, times parallel.context (FSDP2). More ranks
    take less memory each. `-1`: all ranks that the other options of this section leave."""
    data_replicate: Count = 1
    """The number of replicas of the sharded model (HSDP). With `data_shard: 1`, every rank holds all weights."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again in the backward pass: less memory,
    1.5 times the communication."""
    reduce_each_micro_batch: bool | Literal["auto"] = "auto"
    """Reduce gradients after every micro-batch instead of once a step: each rank then keeps the gradients of its own
    shard only, but communicates as many times as a step has micro-batches. `auto`: the faster of the two that fits the
    GPU according to the memory plan; `false` on a CPU."""
    tensor: Count = 1
    """Tensor parallelism: split each layer's heads and MLP, the embedding and the head over this many ranks by the
    model's own plan, and also the tokens between layers (sequence parallelism). It suits GPUs with fast links."""
    context: Count = 1
    """Context parallelism: split the tokens of each micro-batch over this many ranks, for documents whose activations
    do not fit one GPU. It must divide the number of the model's query heads."""
    expert: Count = 1
    """Expert parallelism: divide the experts of each layer over this many ranks. It adds no ranks: it uses those of
    data_shard, context and tensor. Tokens are sent to the ranks of their experts. It must divide the number of experts,
    and be a multiple of `tensor`."""
    pipeline: Count = 1
    """Pipeline parallelism: split the layers over this many ranks. It needs the least communication, so it suits slow
    links."""
    stages_per_rank: Count = 1
    """Pipeline stages on each rank (interleaved 1F1B above 1). More stages idle less at the start and end of a step,
    but send and keep more activations."""


class OptimizerBase(Section):
    learning_rate: Annotated[float, Field(ge=0, le=1e30)] = 1e-6
    """The peak learning rate, reached after warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after warm-up. `cosine` and `linear`: it decreases from the peak to minimum_learning_rate,
    which it would reach one step after schedule.steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The number of steps of linear warm-up: the first step has learning_rate / warmup_steps."""
    minimum_learning_rate: NotNegative = 0.0
    """The learning rate at the end of the schedules `cosine` and `linear`."""
    gradient_clip: Positive | None = 1.0
    """The largest norm of the gradient: gradients with a larger norm are scaled down to it. `null`: no clipping."""


class BuiltInOptimizer(OptimizerBase):
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """The decay of the first moment (the running mean of the gradient)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """The decay of the second moment (the running mean of the squared gradient)."""
    epsilon: Positive = 1e-8
    """Added to the denominator of the update."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight decay of matrices. Norms and biases have none."""
    offload: Literal["none", "states", "all"] = "none"
    """What is kept in host memory between updates, if GPU memory is too small. `states`: the optimizer's state. `all`:
    also the float32 weights; the GPU keeps a copy in model.dtype. An update copies a few weights at a time to the GPU
    and back. Results do not change."""
    offload_room: NotNegative = 0.0
    """Extra GPU memory (GiB) for prefetching offloaded state. With more, more of the copies overlap with computation.
    The peak of a step grows by at most this."""


class AdamWConfig(BuiltInOptimizer):
    type: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay. Norms and biases have no weight decay."""


class AdamW8BitConfig(BuiltInOptimizer):
    type: Literal["adamw_8bit"]
    """AdamW with the two moments of matrices in 8 bits and a float32 scale for each block of at most 256 numbers: the
    state takes a quarter of the memory."""


class MuonConfig(BuiltInOptimizer):
    type: Literal["muon"]
    """Muon (orthogonalised momentum) for the matrices between the embedding and the head. The embedding, the head,
    norms and biases are updated by AdamW, with beta1, beta2 and epsilon."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """The decay of the momentum."""
    nesterov: bool = True
    """Nesterov momentum: add the gradient to the momentum once more before orthogonalising."""
    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """The number of Newton-Schulz iterations."""
    ns_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the Newton-Schulz products. bfloat16 is several times faster on a GPU, and less precise."""
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """The factor on a matrix's update, by its shape. `match_rms_adamw`: 0.2 x sqrt(the larger side), which makes
    updates as large as AdamW's, so that the same learning rate suits both. `original`: sqrt(rows / columns), at least
    1."""


class CustomOptimizer(OptimizerBase):
    type: Literal["custom"]
    """An optimizer of your own."""
    function: str
    """package.module:function, called as function(groups, **options) -> torch.optim.Optimizer. `groups` has the
    float32 weights by name, in `matrices` and `vectors`."""
    options: dict[str, Any] | None = None
    """The function's keyword-only parameters, checked against its signature."""


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[AdamW8BitConfig, Tag("adamw_8bit")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[CustomOptimizer, Tag("custom")],
    by_type("adamw"),
]


class CheckpointConfig(Section):
    directory: str | None = None
    """The run's directory: checkpoints, metrics, ledger, report. `null`: runs/NAME-OF-THE-CONFIG-FILE."""
    every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints. `0`: one checkpoint, at the end."""
    keep: Count = 3
    """How many checkpoints to keep: the newest complete ones."""
    keep_best: str | None = None
    """A metric of evaluations, such as evaluation/sampled_reward, or evaluation/NAME/sampled_reward of a set. The
    checkpoint with the best value is kept in addition to the newest ones. If an evaluation is better than those of all
    checkpoints, a checkpoint is saved after it. The largest value is the best, but for evaluation/loss the smallest.
    `null`: none."""
    hugging_face_every: Annotated[int, Field(ge=0)] | None = None
    """Also write every n-th checkpoint as a Hugging Face directory with float32 weights. `0`: none; `truestep export`
    converts any checkpoint later. `null`: 1 if data.source is a stream or a directory, whose senders load the
    checkpoints; else 0."""
    in_memory_every: Count | None = None
    """Steps between copies of the state in host memory, each on two machines, which a run whose ranks come and go
    (`truestep elastic-command`) goes on from after a loss. `null`: none."""
    in_memory_gigabytes: Positive | None = None
    """The most GB of a machine's memory for such copies. `null`: half of its memory."""
    grace: Annotated[float, Field(gt=0)] | None = None
    """Seconds for saving a checkpoint after a signal to stop. If they are not enough, the run keeps its last complete
    checkpoint and says so. `null`: no limit."""
    lock: bool = True
    """Lock the run's directory against a second process. `false`: for file systems without locks."""


class WandbConfig(Section):
    project: str
    """The project that the run is logged to."""
    name: str | None = None
    """The run's name. `null`: wandb chooses."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: write to the run's directory only."""
    samples_every: Annotated[int, Field(ge=0)] = 10
    """Log the kept rollouts as a table after the first step and every n steps. `0`: never."""


class TrackioConfig(Section):
    project: str
    """The project that the run is logged to. `trackio show --project NAME` shows it."""
    name: str | None = None
    """The run's name; some letters are added to make it unique. `null`: the name of the run's directory."""
    space: str | None = None
    """The Space on the Hugging Face hub that the run is logged to, as owner/name. `null`: this machine
    (TRACKIO_DIR)."""
    samples_every: Annotated[int, Field(ge=0)] = 10
    """Log the kept rollouts as a table after the first step and every n steps. `0`: never."""


class RolloutsConfig(Section):
    documents: Count | Literal["all"] = 16
    """The largest number of documents to keep of each step (whole groups, spread over the step), and of rejected
    completions. `all`: 16, and in addition the complete records of all documents that were trained on, so that
    `truestep replay` can repeat a step."""
    with_tokens: Annotated[int, Field(ge=0)] = 4
    """How many of these documents are kept with text, log-prob and log-ratio of each token."""
    longest_text: Count = 20_000
    """Cut off prompts and completions after this many characters."""
    gigabytes: Positive = 1.0
    """The largest size of the kept files in GB. Above it, every second file is removed, so that the remaining steps are
    spread over the whole run. The complete records of `documents: all` have another limit of the same size; above it,
    the oldest are removed."""


class LoggingConfig(Section):
    console: bool = True
    """Show the most important metrics on the console while the run goes on."""
    jsonl: bool = True
    """Write metrics.jsonl in the run's directory, one line for each step."""
    wandb: WandbConfig | None = None
    """Weights & Biases (extra: wandb)."""
    tensorboard: str | None = None
    """A directory for TensorBoard's event files (extra: tensorboard). Kept rollouts are written as text after the
    first step and every tenth."""
    trackio: TrackioConfig | None = None
    """trackio (extra: trackio)."""
    rollouts: RolloutsConfig | None = RolloutsConfig()
    """Rollouts kept in the run's directory, to read in the report. `null`: none."""
    custom_metrics: list[str] | None = None
    """Your own metrics, each as package.module:function. The function gets the labels of a micro-batch and facts of
    the step, and returns metrics by name; the type of a metric says how it is reduced."""
    custom_sinks: list[str] | None = None
    """Your own metric loggers, each as package.module:Class. It is made as Class(directory, options, done), with the
    run's directory, its options without secrets, and the number of earlier steps. Its methods are step(line),
    evaluation(line) and close()."""
