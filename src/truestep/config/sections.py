"""The sections of the configuration: each option, its default and its meaning. Imports no torch.

A field enters this file only together with the code that obeys it.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, create_model

from truestep.config.section import Count, ImportPath, NotNegative, Positive, Section, by_type


class HeadConfig(Section):
    fp32_lm_head: bool = False
    """Never round logits to bfloat16: log-probs are then within 1e-4 of float64, given the hidden states. Set it as
    your sampler does."""
    logits_chunk_size: Count | Literal["auto"] = "auto"
    """At most this many rows of logits exist at a time. It changes memory and speed, never a result. auto: as many as
    half of the free memory holds; with `deterministic`, as many as the vocabulary's size alone decides."""
    head_gradient: Literal["bfloat16", "split"] = "bfloat16"
    """How the gradient of the logits enters the backward products on a GPU. bfloat16: it is rounded to the compute
    type. split: it is split into a high and a low part, so that the weight's gradient is 4 (on a Hopper GPU) to 40
    times nearer float64, at 1.7 times the price."""


class ModelConfig(Section):
    path: str
    """A Hugging Face causal LM directory (safetensors, config.json, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The type that the model computes in. Weights and the optimizer's state stay float32."""
    head: HeadConfig = HeadConfig()
    """The LM head and its log-probabilities."""
    freeze: list[Annotated[str, Field(min_length=1)]] | None = None
    """Patterns of the names of weights that are not trained, such as model.embed_tokens.* or model.layers.[0-7].*. They
    have no gradient, no state of the optimizer and no float32 copy: they are kept in `dtype`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that the model runs on. auto takes a GPU if there is one."""
    attention: Literal["auto", "flash", "torch"] = "auto"
    """What attends over packed documents. flash: FlashAttention 4, an optional package (truestep[flash]) for bfloat16
    on Hopper and Blackwell GPUs; it is compared with float32 on the machine first. torch: torch's own. auto: flash
    where it can be used."""
    activation_checkpointing: Annotated[
        Literal[False, "full", "selective", "elementwise", "auto"],
        BeforeValidator(lambda value: "full" if value is True else value),
    ] = False
    """Recompute each layer in the backward pass: less memory, the same numbers. full (or true): all of it, about a
    third more time. selective: what attention gives and the products beside it are kept, and the rest is made again,
    about a sixth more time. elementwise: norms, rotations and activations are made again, and no product; with
    `compile` it costs 1 to 2%, saves a third of the memory of activations, and rounds at other places. auto: the
    fastest that fits the GPU, by the plan; false on a CPU."""
    activation_offload: bool | Literal["auto"] = False
    """Keep what recomputed layers keep in host memory, copied there and back beside the computation. It needs
    activation_checkpointing. auto: where the plan does not fit otherwise."""
    compile: bool = False
    """Compile the layers (torch.compile): up to twice the speed, after a minute or less at the start. On a CPU it
    needs a C++ compiler."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model directory."""


class AdapterConfig(Section):
    type: Literal["lora"] = "lora"
    """lora: each layer W that is adapted computes W x + (alpha / rank) B (A x). W is frozen in `model.dtype`; the small
    matrices A and B alone are trained."""
    rank: Count = 32
    """The rank of an adapter: A has as many rows, and B as many columns."""
    alpha: Positive = 32.0
    """An adapter's part is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[Annotated[str, Field(min_length=1)]] = "all-linear"
    """The linear layers that are adapted: all of them but the head, or names such as q_proj, or patterns of whole names
    such as model.layers.[0-7].mlp.*."""
    path: str | None = None
    """The directory of an adapter to begin with, as peft saves it; rank, alpha and targets are then its own."""


class RedisSource(Section):
    type: Literal["stream"]
    """stream: a Redis stream. files: the files that appear in a directory. custom: a source of your own."""
    url: str = "redis://127.0.0.1:6379/0"
    """The server. A password may be in the environment variable REDISCLI_AUTH, so that no file has it."""
    stream: str
    """The key of the stream. An entry's field `record` is a rollout as JSON; an entry `event: end` ends the data."""
    group: str = "truestep"
    """The consumer group. It belongs to one run; another run of the same stream takes another group."""
    consumer: str = "trainer"
    """The run's name within its group."""
    events: str | None = None
    """The stream to which weights_ready and training_finished are added. null: STREAM:events."""


class DirectorySource(Section):
    type: Literal["files"]
    """stream: a Redis stream. files: the files that appear in a directory. custom: a source of your own."""
    directory: str
    """The directory in which files NAME.jsonl appear, each renamed into place when it is whole. A file END ends the
    data. Events go to events.jsonl in it."""


class CustomSource(Section):
    type: Literal["custom"]
    """stream: a Redis stream. files: the files that appear in a directory. custom: a source of your own."""
    function: str
    """package.module:function, called as function(start, **options): it gives an iterator over records, each a mapping
    with the fields of a rollout, from number `start` on. A run that goes on asks for the records from where it was."""
    options: dict[str, Any] | None = None
    """The function's keyword-only parameters, checked against its signature."""


SourceConfig = Annotated[
    Annotated[RedisSource, Tag("stream")]
    | Annotated[DirectorySource, Tag("files")]
    | Annotated[CustomSource, Tag("custom")],
    by_type(),
]


# Made by a call: `from` is an option's name, and a word that a Python class cannot have as an attribute.
OverlongPenaltyConfig = create_model(
    "OverlongPenaltyConfig",
    __base__=Section,
    **{
        "from": (Annotated[int, Field(ge=0)], Field(description="Up to so many labels nothing is taken away.")),
        "to": (Count, Field(description="From so many labels on the whole weight is taken away.")),
        "weight": (Positive, Field(1.0, description="The most that is taken away.")),
    },  # type: ignore[call-overload]
)


class FieldConfig(Section):
    level: Literal["label", "document"]
    """label: a value of each label, which a record gives as it gives `advantage`. document: one value."""
    dtype: Literal["float32", "int64", "bool"] = "float32"
    """The type of its values."""
    default: bool | int | float | None = None
    """What a record without the field gets. null: such a record is rejected."""


FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class DataConfig(Section):
    path: str | list[str] | None = None
    """Rollout files: JSONL (.jsonl) or Parquet (.parquet). A glob's files are read in sorted order. With {rank} in it,
    each data rank reads its own part and no other."""
    source: SourceConfig | None = None
    """Rollouts that a sampler of your own sends while the run goes on."""
    cache_directory: str | None = None
    """The directory that large rollout files are converted into, once, for all ranks and runs of the machine; it takes
    about half of their size. null: truestep/data in $XDG_CACHE_HOME or ~/.cache. Files of less than 16 MiB together
    are read into memory."""
    temperature: Positive = 1.0
    """The temperature that a record was sampled at if it has no `temperature` of its own."""
    advantages: (
        Literal["group_mean", "leave_one_out", "length_weighted", "group_normalized", "batch_normalized", "none"]
        | ImportPath
    ) = "group_normalized"
    """How rewards become advantages within a group: less a baseline. length_weighted: less the mean over the group's
    labels. group_normalized and batch_normalized are group_mean with advantage_scale: group and step. none: each record
    carries its own advantage. package.module:function: a function of yours, from a group's records to one advantage
    for each."""
    advantage_scale: Literal["none", "group", "step"] | None = None
    """What advantages from rewards are divided by. group: the standard deviation of the group's rewards. step: that of
    the differences of all the step's documents. null: as `advantages` names it, else none."""
    advantage_std_floor: NotNegative = 1e-4
    """This is added to the standard deviation that advantages are divided by."""
    overlong_penalty: OverlongPenaltyConfig | None = None  # type: ignore[valid-type]
    """A reward is less, before advantages are made of it, where the completion is long: by nothing up to `from` labels,
    by `weight` at `to` labels and beyond, and linearly between."""
    zero_advantage: Literal["keep", "skip", "replace"] = "keep"
    """What becomes of documents whose advantages are all 0. keep: they are computed as all others. skip: they have no
    backward pass; no result changes. replace: a sampler puts groups without a difference aside, and samples others
    until the step has its documents."""
    replace_limit: Count = 64
    """With zero_advantage: replace, at most so many groups are put aside for one step. Others stay in it."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """What becomes of documents that ended at a length limit, once their rewards have had their part in the baseline.
    mask: they have no labels, and count as documents. drop: no step takes them."""
    group_size: Count | None = None
    """The number of rollouts of one prompt. A group of rollouts from files is complete at this size; null: at the end
    of the data."""
    group_timeout: Positive | None = 3600.0
    """The seconds that a group of sent rollouts may stay open, by a clock that runs while the stream is read and stands
    still while the trainer has enough to do. After that its documents are rejected: a part of a group has no baseline.
    null: a group waits for as long as the run lasts."""
    tokens_per_microbatch: Count = 16384
    """At most this many tokens go through the model at once. A longer document is rejected."""
    pad_to_multiple: Count = 1
    """Each micro-batch is padded to a multiple of this many tokens. Padding never reaches a result."""
    on_bad_record: Literal["reject", "stop"] = "reject"
    """reject: a bad record goes to rejected.jsonl and the run goes on. stop: the first bad record ends the run."""
    fields: dict[FieldName, FieldConfig] | None = None
    """Fields of your own in the records, by name, for your own loss, metrics and advantages. Each is {level: label or
    document, dtype: float32, int64 or bool, default: a number}; without a default, a record must have it."""
    shuffle: bool = False
    """Shuffle the documents of files by `seed`, anew in each epoch."""
    epochs: Count = 1
    """How many times each document of the files is trained on."""


class SamplerBase(Section):
    prompts: str
    """A JSONL file of {"prompt": text or chat messages, other fields}, or a Hugging Face dataset on disk."""
    reward: str
    """package.module:function, called as reward(prompt, completion, **fields) -> float."""
    temperature: Positive = 1.0
    """The temperature of sampling. The policy is trained at the same temperature."""
    max_new_tokens: Count = 512
    """A completion ends at the end-of-text token, or after this many tokens."""

    reward_workers: Count | None = None
    """The number of processes that compute rewards. null: as many as the cores that this rank may use, shared with the
    other ranks of its machine."""
    reward_timeout: Positive = 60.0
    """The seconds that one reward may take. A reward that takes longer is ended, and its completion is rejected."""
    reward_memory: Positive | None = None
    """The memory, in GiB, that a process which computes rewards may take, with all that it starts. null: half of the
    machine's memory, divided by these processes, and at least 1."""
    reward_environment: list[str] | None = None
    """The names of environment variables that rewards need. They get these, and the usual ones that hold no secret
    (PATH, HOME, LANG and the like). null: these alone."""
    reward_isolation: Literal["auto", "require", "off"] = "auto"
    """Isolation of the processes that call rewards: they see no other process, and all files read-only but for a /tmp
    in memory of their own (SECURITY.md). auto: where the system permits it; the run says at its start whether it does.
    require: the run ends where it does not. off: rewards may do what you may."""
    reward_writable: list[str] | None = None
    """Directories that isolated rewards may write to. Whatever they write there stays, and nothing limits its size: no
    directory that code is imported from belongs here. null: none."""
    reward_network: bool = True
    """Let rewards use the network, for example to ask a judge. false, with isolation: they have none, and so cannot
    reach what listens on this machine either (Redis, servers, the ranks' store)."""


class InProcessSampler(SamplerBase):
    type: Literal["in_process"] = "in_process"
    """The policy itself samples, with the very weights that are trained."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 switches it off. Log-probs are those of the whole distribution."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many of the likeliest tokens; 0 switches it off. Log-probs are those of the whole distribution."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw only tokens that are at least this many times as likely as the likeliest; 0 switches it off. Log-probs are
    those of the whole distribution."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that end a completion, which keeps the tokens that make them."""
    engine: bool = True
    """Sample with the engine (a paged cache, continuous batching, kernels and graphs on a GPU). false: with
    transformers' own attention and cache, batch after batch, which is slower."""
    exact: bool = False
    """Compute log-probs so that they do not depend on what shares a batch, in sampling and in training: the ratio of an
    update on fresh documents is exactly 1. A step takes longer: training makes one more forward pass."""
    batch_size: Count | None = None
    """At most this many completions are decoded at a time. null: as many as the free memory holds, at most 1,024 on a
    GPU and 256 on a CPU."""


class ServerSampler(SamplerBase):
    type: Literal["server"]
    """Inference servers sample. After each update they are given the new weights."""
    protocol: str = "vllm"
    """The kind of server: vllm, sglang, or package.module:Class, a class of yours that implements
    truestep.sampler.server.protocol.InferenceServer."""
    urls: Annotated[list[str], Field(min_length=1)]
    """The servers, such as http://host:8000. A request goes to the server that has least to do."""
    model: str
    """The name that the servers serve the model under (--served-model-name)."""
    api_key_env: str | None = None
    """The environment variable that holds the servers' API key. null: they ask for none."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How old a token's weights may be when it is trained on, in documents trained on since. 0: sampling and training
    take turns. A multiple of schedule.docs_per_step: the servers sample that many documents ahead while the trainer
    trains. A document that comes too late goes to rejected.jsonl, and its prompt is sampled again."""
    pause: Literal["wait", "keep", "abort"] = "wait"
    """What becomes of unfinished completions when new weights come. wait: they end with the old weights first. keep:
    they go on with the new weights, and each token has the version that made it. abort: they are thrown away and made
    again."""
    updates: Literal["at_once", "rolling"] = "at_once"
    """How several servers get new weights. at_once: all at the same time. rolling: one after another, so that the
    others go on sampling with the weights that they have."""
    concurrency: Count = 256
    """At most this many groups are sampled at a time, over all servers. One request asks for a whole group."""
    request_timeout: Positive = 600.0
    """The seconds that one whole answer may take."""
    adapter: Literal["merged", "served"] = "merged"
    """How servers get an adapter. merged: merged into the model, whose weights they load. served: alone, beside the
    model that they were started with, so that several runs share a server (vLLM with --enable-lora)."""
    transfer: Literal["auto", "memory", "nccl", "disk"] = "auto"
    """How new weights get to the servers. memory: through memory of this machine, to vLLM servers started with
    --weight-transfer-config '{"backend": "truestep"}'. nccl: from the trainer's first GPU to those of vLLM servers
    started with --weight-transfer-config '{"backend": "nccl"}', on this machine or another. disk: through
    weights_directory. auto: memory for each server that can take them so, else disk."""
    memory_directory: str = "/dev/shm"
    """A file system in memory, in which new weights lie until the next ones. For transfer: memory the servers of this
    machine see it under the same path."""
    weights_directory: str | None = None
    """The directory that new weights are written to for the servers to read: on a disk that they see under the same
    path. Several runs may share it. null: weights, in the run's directory."""
    tolerance: Positive | None = None
    """How far, in nats, a server's log-probs of a probe may be from the trainer's after new weights. If they are
    further away, the run ends before anything is trained on. The log-probs of completions are held to the same measure.
    null: 0.001 with model.dtype: float32, else 0.1."""
    check_share: Annotated[float, Field(ge=0, le=1)] = 0.002
    """With max_staleness above 0: the share of completions that the trainer scores when they arrive, while the weights
    that drew them still stand. More finds a server with wrong log-probs sooner; each costs a forward pass of it."""

    @property
    def memory_alone(self) -> bool:
        """Tell whether new weights go through memory and no other way."""
        return self.transfer in ("memory", "nccl")


SamplerConfig = Annotated[
    Annotated[InProcessSampler, Tag("in_process")] | Annotated[ServerSampler, Tag("server")], by_type("in_process")
]


class EvaluationConfig(Section):
    prompts: str | None = None
    """Held-out prompts, in the form of sampler.prompts, for which the policy samples answers."""
    path: str | list[str] | None = None
    """With a supervised loss: held-out documents, in the form of data.path. Their loss is the mean over all of their
    labels."""
    every: Count = 10
    """Evaluate before the first step, every this many steps and after the last."""
    reward: str | None = None
    """The reward, as package.module:function. null: sampler.reward."""
    reward_workers: Count | None = None
    """As sampler.reward_workers. null: those of the sampler, or as many as the cores that this rank may use."""
    reward_timeout: Positive | None = None
    """As sampler.reward_timeout. null: the sampler's, or 60 without a sampler."""
    reward_memory: Positive | None = None
    """As sampler.reward_memory. null: the sampler's, or its default."""
    reward_environment: list[str] | None = None
    """As sampler.reward_environment. null: the sampler's, or none."""
    reward_isolation: Literal["auto", "require", "off"] | None = None
    """As sampler.reward_isolation. null: the sampler's, or auto."""
    reward_writable: list[str] | None = None
    """As sampler.reward_writable. null: the sampler's, or none."""
    reward_network: bool | None = None
    """As sampler.reward_network. null: the sampler's, or true."""
    max_prompts: Count | None = None
    """Use only this many prompts, the first ones. null: all."""
    samples_per_prompt: Count = 1
    """The number of sampled completions of each prompt, beside the greedy one."""
    pass_reward: float | None = None
    """An answer with this reward or more passes: pass@1, pass@2, pass@4 and so on are logged, up to samples_per_prompt.
    null: none are."""
    temperature: Positive = 1.0
    """The temperature of the sampled completions."""
    max_new_tokens: Count | None = None
    """A completion ends after this many tokens. null: sampler.max_new_tokens, or 512 without a sampler."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling of the sampled completions; 1 switches it off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """The sampled completions are drawn from this many of the likeliest tokens; 0 switches it off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The sampled completions have only tokens that are at least this many times as likely as the likeliest; 0 switches
    it off."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that end a completion."""
    engine: bool = True
    """Sample with the engine (a paged cache, continuous batching, kernels and graphs on a GPU). false: with
    transformers' own attention and cache, batch after batch, which is slower."""
    batch_size: Count | None = None
    """At most this many completions are decoded at a time. null: as many as the free memory holds, at most 1,024 on a
    GPU and 256 on a CPU."""
    servers: bool = False
    """The inference servers of the sampler answer, with the weights of the step. false: the policy answers itself."""


class ScheduleConfig(Section):
    docs_per_step: Annotated[int, Field(ge=0)] = 0
    """The number of documents in a step. 0: a step is a fixed number of micro-batches, depth_first_micro_batches x
    breadth_first_micro_batches on each rank."""
    overshoot: Literal["carry", "keep"] = "carry"
    """carry: a step is exactly docs_per_step documents. keep: the micro-batch that crosses the target is trained on
    whole."""
    depth_first_micro_batches: Count = 1
    """With docs_per_step: 0, the micro-batches of each rank in a step (times breadth_first_micro_batches)."""
    breadth_first_micro_batches: Count = 1
    """The number of micro-batches of each rank in a step is a multiple of this, and this many share one gathering of
    the sharded weights."""
    steps: Count | None = None
    """The number of optimizer steps of the whole run. null: until the data ends."""
    last_step: Literal["train", "drop"] = "train"
    """What becomes of the documents left at the end of the data. train: they make a last step, with its own counts.
    drop: they are left out, and the run says how many."""
    stall_timeout: Positive = 600.0
    """After this many seconds without progress the run ends and names what stands still: a rank, a server, a source or
    a disk. Progress is documents, tokens, micro-batches, layers, bytes read or written, and computing. A run that is
    slow goes on."""
    updates_per_batch: Count = 1
    """The number of optimizer updates on the same documents before new ones are taken."""


class ParallelConfig(Section):
    data_shard: Literal[-1] | Count = -1
    """The number of ranks that weights, gradients and optimizer state are sharded over (FSDP2), times
    parallel.context. -1: all that the other options leave."""
    data_replicate: Count = 1
    """The number of replicas of the sharded model (HSDP). With data_shard: 1 every rank holds all weights."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again for the backward pass: less memory,
    half as much again of communication."""
    reduce_each_micro_batch: bool | Literal["auto"] = "auto"
    """Reduce gradients after every micro-batch, and not only after a step's last one. Gradients then take a rank's
    share of the memory; communication grows by the number of micro-batches in a step. auto: as the plan finds faster
    among what fits the GPU; false on a CPU."""
    tensor: Count = 1
    """The number of ranks that each layer's heads and neurons, the embedding and the head are split over, by the plan
    that comes with the model. Between them, these ranks split the tokens."""
    context: Count = 1
    """The number of ranks that a micro-batch's tokens are split over. It must divide the model's query heads."""
    pipeline: Count = 1
    """The number of ranks that the layers are split over. Each has some of the layers and passes activations on to the
    next."""
    stages_per_rank: Count = 1
    """The number of stages (layers one after another) on each rank of a pipeline. With more stages, ranks idle less
    while a step begins and ends, but pass on that many times the activations and keep more of them."""


class OptimizerBase(Section):
    learning_rate: Annotated[float, Field(ge=0, le=1e30)] = 1e-6
    """The highest learning rate, reached after warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after warm-up. cosine and linear fall from the highest to minimum_learning_rate, which they
    would reach one step after schedule.steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly over these steps: it is learning_rate / warmup_steps at the first."""
    minimum_learning_rate: NotNegative = 0.0
    """The learning rate that cosine and linear end at."""
    gradient_clip: Positive | None = 1.0
    """A gradient with a larger norm than this is scaled down to it. null: never."""


class BuiltInOptimizer(OptimizerBase):
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """The decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """The decay of the squared gradient's running mean."""
    epsilon: Positive = 1e-8
    """This is added to the denominator of the update."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """The weight decay of matrices. Nothing else is decayed."""
    offload: Literal["none", "states", "all"] = "none"
    """What lies in host memory between updates. states: the optimizer's state. all: the float32 weights too, of which
    the device keeps a copy in model.dtype. For an update it is copied to the device, a few weights at a time, and back.
    Numbers do not change."""
    offload_room: NotNegative = 0.0
    """With offload, GiB of the device beyond a step's own peak, which what moves may use while the model computes. More
    of them make a step wait less for copies. The peak grows by as much at the most."""


class AdamWConfig(BuiltInOptimizer):
    type: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay. Norms and biases are never decayed."""


class AdamW8BitConfig(BuiltInOptimizer):
    type: Literal["adamw_8bit"]
    """AdamW that keeps the two moments of matrices in 8 bits, with a float32 scale for each block of at most 256."""


class MuonConfig(BuiltInOptimizer):
    type: Literal["muon"]
    """Momentum that is orthogonalised, for the matrices between the embedding and the head. The embedding, the head,
    norms and biases are updated by AdamW, with beta1, beta2 and epsilon."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """The decay of the running mean of a matrix's gradient."""
    nesterov: bool = True
    """Look ahead: mix the running mean with the gradient once more before it is orthogonalised."""
    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """The number of Newton-Schulz iterations."""
    ns_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of their matrix products. bfloat16 is several times faster on a GPU, and less exact."""
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How a matrix's shape scales its update. match_rms_adamw: by 0.2 x sqrt(the larger side), to the size of AdamW's
    updates, so that one learning rate is right for both. original: by sqrt(rows / columns), where rows are more."""


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
    """The run's directory: checkpoints, metrics, ledger, report. null: runs/NAME-OF-THE-CONFIG-FILE."""
    every: Annotated[int, Field(ge=0)] = 20
    """The number of steps between checkpoints. 0: only one, at the end."""
    keep: Count = 3
    """The number of complete checkpoints that are kept."""
    hugging_face_every: Annotated[int, Field(ge=0)] | None = None
    """Every n-th checkpoint is a Hugging Face directory too, with float32 weights. 0: none; `truestep export` makes one
    of any checkpoint. null: 1 with a stream or files as data.source, whose senders load checkpoints; 0 otherwise."""
    grace: Annotated[float, Field(gt=0)] | None = None
    """The seconds within which a run that a signal stops is saved. After them it keeps its last complete checkpoint and
    says so. null: as long as it takes."""
    lock: bool = True
    """Lock the run's directory, so that no second process writes it. false: for a file system that has no locks."""


class WandbConfig(Section):
    project: str
    """The project that the run is logged to."""
    name: str | None = None
    """The run's name. null: wandb chooses."""
    mode: Literal["online", "offline"] = "online"
    """offline writes to the run's directory only."""
    samples_every: Annotated[int, Field(ge=0)] = 10
    """After the first step and every this many steps, the rollouts that are kept are logged as a table. 0: never."""


class MlflowConfig(Section):
    experiment: str = "truestep"
    """The experiment that the run belongs to. It is made where it is not there."""
    name: str | None = None
    """The run's name. null: that of the run's directory."""
    tracking_uri: str | None = None
    """The server, such as https://host:5000, or a directory. null: that of MLFLOW_TRACKING_URI, else mlruns in the
    run's directory. A database needs the whole mlflow package."""
    samples_every: Annotated[int, Field(ge=0)] = 10
    """After the first step and every this many steps, the rollouts that are kept are logged as a table. 0: never."""


class TrackioConfig(Section):
    project: str
    """The project that the run is logged to. `trackio show --project NAME` shows it."""
    name: str | None = None
    """The run's name, with some letters behind it that make it unique. null: that of the run's directory."""
    space: str | None = None
    """The Space on the Hugging Face hub that the run is logged to, as owner/name. null: this machine (TRACKIO_DIR)."""
    samples_every: Annotated[int, Field(ge=0)] = 10
    """After the first step and every this many steps, the rollouts that are kept are logged as a table. 0: never."""


class RolloutsConfig(Section):
    documents: Count = 16
    """At most this many documents of each step, in whole groups from all over the step; and as many completions that
    were rejected."""
    with_tokens: Annotated[int, Field(ge=0)] = 4
    """So many of them also have the text, the log-prob and the log-ratio of each token."""
    longest_text: Count = 20_000
    """A prompt or a completion that has more characters than this is cut off."""
    gigabytes: Positive = 1.0
    """Where the files grow beyond this, every second one is removed: fewer steps stay, from all over the run."""


class LoggingConfig(Section):
    console: bool = True
    """Show a live line of the most important metrics."""
    jsonl: bool = True
    """Write metrics.jsonl in the run's directory, a line for each step."""
    wandb: WandbConfig | None = None
    """Weights & Biases (extra: wandb)."""
    tensorboard: str | None = None
    """A directory for TensorBoard's event files (extra: tensorboard). Rollouts that are kept are there as text, after
    the first step and every tenth."""
    mlflow: MlflowConfig | None = None
    """MLflow (extra: mlflow)."""
    trackio: TrackioConfig | None = None
    """trackio (extra: trackio)."""
    rollouts: RolloutsConfig | None = RolloutsConfig()
    """Rollouts are kept in the run's directory, to be read in the report. null: none are."""
    custom_metrics: list[str] | None = None
    """Metrics of your own, each as package.module:function. The function gets the labels of a micro-batch and facts of
    the step, and gives metrics by name; the type of each says how it is reduced."""
    custom_sinks: list[str] | None = None
    """Places of your own that metrics are written to, each as package.module:Class, made as Class(directory, options,
    done): the run's directory, its options without secrets, and how many steps it had made. Its methods are
    step(line), evaluation(line) and close()."""
