"""Every section of the configuration: each option, its default and its meaning. Imports no torch.

A field enters this file only together with the code that obeys it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from truestep.config.section import Section


class HeadConfig(Section):
    fp32_lm_head: bool = False
    """Never round logits to bfloat16: log-probs within 1e-4 of float64 given the hidden states. Set it as your
    sampler does."""
    logits_chunk_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """At most this many rows of logits exist at a time. Changes memory and speed, never a result."""
    head_gradient: Literal["bfloat16", "split"] = "bfloat16"
    """How the logits' gradient enters the backward products on a GPU: rounded to the compute type, or split into a high
    and a low part of it, for a weight gradient 4 (on a Hopper GPU) to 40 times nearer float64 at 1.7 times the
    price."""


class ModelConfig(Section):
    path: str
    """A Hugging Face causal LM directory (safetensors, config.json, tokenizer)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the compute. Weights and optimizer state stay float32."""
    head: HeadConfig = HeadConfig()
    """The LM head and its log-probabilities."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile the layers (torch.compile): up to twice the speed, after a minute or less at the start. On a CPU it needs
    a C++ compiler."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model directory."""


Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RedisSource(Section):
    type: Literal["stream"]
    """stream: a Redis stream. files: the files that appear in a directory."""
    url: str = "redis://127.0.0.1:6379/0"
    """The server. A password may stand in the environment as REDISCLI_AUTH, so that no file has it."""
    stream: str
    """The key of the stream: an entry's field `record` is a rollout as JSON; an entry `event: end` ends the data."""
    group: str = "truestep"
    """The consumer group. It belongs to one run; another run of the same stream takes another."""
    consumer: str = "trainer"
    """The run's name within its group."""
    events: str | None = None
    """The stream to which weights_ready and training_finished are added; null: STREAM:events."""


class DirectorySource(Section):
    type: Literal["files"]
    """stream: a Redis stream. files: the files that appear in a directory."""
    directory: str
    """Where files NAME.jsonl appear, by an atomic rename; a file END ends the data. Events go to events.jsonl in it."""


def _source_type(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


SourceConfig = Annotated[
    Annotated[RedisSource, Tag("stream")] | Annotated[DirectorySource, Tag("files")], Discriminator(_source_type)
]


class DataConfig(Section):
    path: str | list[str] | None = None
    """Rollout files: JSONL (.jsonl) or Parquet (.parquet), globs allowed, read in sorted order. With {rank} in it, each
    rank reads its own part and no other."""
    source: SourceConfig | None = None
    """Rollouts that a sampler of your own sends while the run goes on."""
    temperature: Temperature = 1.0
    """What a record without its own `temperature` was sampled at."""
    advantages: Literal["group_mean", "group_normalized", "leave_one_out", "none"] = "group_normalized"
    """How rewards become advantages within a group; none: records carry their advantage."""
    group_size: Annotated[int, Field(ge=1)] | None = None
    """Rollouts of one prompt. For files: a group is complete at this size (null: at the end of the data)."""
    tokens_per_microbatch: Annotated[int, Field(ge=1)] = 16384
    """At most this many tokens in one forward pass; a longer document is rejected."""
    pad_to_multiple: Annotated[int, Field(ge=1)] = 1
    """Pad each micro-batch to a multiple of this many tokens. Padding never reaches a result."""
    on_bad_record: Literal["reject", "stop"] = "reject"
    """reject writes a bad record to rejected.jsonl and goes on; stop ends the run."""
    shuffle: bool = False
    """Shuffle the documents of files by `seed`, anew each epoch."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """How many times each document of the files is trained on."""


class SamplerBase(Section):
    prompts: str
    """A JSONL file of {"prompt": text or chat messages, other fields}, or a Hugging Face dataset on disk."""
    reward: str
    """package.module:function, called as reward(prompt, completion, **fields) -> float."""
    temperature: Temperature = 1.0
    """Sampling temperature; the same temperature is trained at."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 512
    """A completion ends at the end-of-text token or here."""


class InProcessSampler(SamplerBase):
    type: Literal["in_process"] = "in_process"
    """The policy itself samples, from the very weights being trained."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off. Log-probs are those of the whole distribution."""
    batch_size: Annotated[int, Field(ge=1)] = 256
    """Completions decoded at a time."""


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServerSampler(SamplerBase):
    type: Literal["server"]
    """Inference servers sample; after each update they are given the new weights."""
    protocol: str = "vllm"
    """vllm, or package.module:Class, a class of yours that implements
    truestep.sampler.server.protocol.InferenceServer: another kind of server."""
    urls: Annotated[list[str], Field(min_length=1)]
    """The servers, such as http://host:8000. Requests go to the one that has least to do."""
    model: str
    """The name that the servers serve the model under (--served-model-name)."""
    api_key_env: str | None = None
    """The environment variable that holds the servers' API key; null: they ask for none."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Documents that the policy may have seen more of than the oldest token's weights when a step trains on it. 0:
    sampling and training take turns. A multiple of schedule.docs_per_step: sampling goes on meanwhile, so many
    documents ahead. What comes too late all the same goes to rejected.jsonl and its prompt is sampled again."""
    pause: Literal["wait", "keep", "abort"] = "wait"
    """What new weights do to completions under way. wait: they end with the old ones first. keep: they go on with the
    new ones, and each token has the version that made it. abort: they are thrown away and made again."""
    concurrency: Annotated[int, Field(ge=1)] = 256
    """Groups under way at a time, over all servers; one request asks for a whole group."""
    request_timeout: Seconds = 600.0
    """Seconds for one answer, whole."""
    weights_directory: str | None = None
    """Where new weights are written for the servers to read: a disk that they see under the same path, used by this run
    alone. null: weights, in the run's directory."""
    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How far, in nats, a server's log-probs of a probe may be from the trainer's after new weights; further ends the
    run before anything is trained on. null: 0.001 with model.dtype: float32, else 0.1."""
    reward_workers: Annotated[int, Field(ge=1)] = 4
    """Processes that rate completions."""
    reward_timeout: Seconds = 60.0
    """Seconds for one completion's reward. One that takes longer is ended, and its completion is rejected."""


def _sampler_type(value: Any) -> Any:
    return value.get("type", "in_process") if isinstance(value, dict) else getattr(value, "type", None)


SamplerConfig = Annotated[
    Annotated[InProcessSampler, Tag("in_process")] | Annotated[ServerSampler, Tag("server")],
    Discriminator(_sampler_type),
]


class EvaluationConfig(Section):
    prompts: str
    """Held-out prompts, in the form of sampler.prompts."""
    every: Annotated[int, Field(ge=1)] = 10
    """Evaluate before the first step, every this many steps and after the last."""
    reward: str | None = None
    """package.module:function; null: sampler.reward."""
    max_prompts: Annotated[int, Field(ge=1)] | None = None
    """Use the first so many prompts; null: all."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Sampled completions a prompt, beside the greedy one."""
    temperature: Temperature = 1.0
    """Of the sampled completions."""
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """null: sampler.max_new_tokens, or 512 without a sampler."""
    batch_size: Annotated[int, Field(ge=1)] = 256
    """Completions decoded at a time."""


class ScheduleConfig(Section):
    docs_per_step: Annotated[int, Field(ge=0)] = 0
    """Documents in a step. 0: a fixed number of micro-batches, depth_first x breadth_first."""
    overshoot: Literal["carry", "keep"] = "carry"
    """carry: a step is exactly docs_per_step documents. keep: the micro-batch that crosses the target is trained on
    whole."""
    depth_first_micro_batches: Annotated[int, Field(ge=1)] = 1
    """With docs_per_step: 0, micro-batches of each rank in a step (times breadth_first_micro_batches)."""
    breadth_first_micro_batches: Annotated[int, Field(ge=1)] = 1
    """The number of micro-batches of each rank in a step is a multiple of this, and so many share one gathering of the
    sharded weights."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the whole run; null: until the data ends."""
    last_step: Literal["train", "drop"] = "train"
    """At the end of the data: train on what is left, with its true counts, or drop it and say so."""
    stall_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Seconds after which a rank that gets no data, or that the others wait for, ends the run by name."""
    updates_per_batch: Annotated[int, Field(ge=1)] = 1
    """Optimizer updates on the same documents before new ones are taken."""


class ParallelConfig(Section):
    data_shard: Literal[-1] | Annotated[int, Field(ge=1)] = -1
    """Ranks that weights, gradients and optimizer state are sharded over (FSDP2), times parallel.context; -1: all that
    the other options leave."""
    data_replicate: Annotated[int, Field(ge=1)] = 1
    """Replicas of the sharded model (HSDP). With data_shard: 1 every rank holds all weights."""
    reshard_after_forward: bool = True
    """Give a layer's gathered weights back after its forward pass and gather them again for the backward pass: less
    memory, half as much again of communication."""
    reduce_each_micro_batch: bool = False
    """Reduce gradients after every micro-batch and not only after a step's last: gradients then take a rank's share of
    the memory, for as many times the communication as a step has micro-batches."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Ranks that each layer's heads and neurons, the embedding and the head are split over, by the plan that comes with
    the model; between them, tokens are."""
    context: Annotated[int, Field(ge=1)] = 1
    """Ranks that a micro-batch's tokens are split over; a divisor of the model's query heads."""
    pipeline: Annotated[int, Field(ge=1)] = 1
    """Ranks that the layers are split over: each has some of them and passes activations on to the next."""
    stages_per_rank: Annotated[int, Field(ge=1)] = 1
    """Runs of layers that each rank of a pipeline has, around the ranks one after another: they idle less while a step
    begins and ends, for that many times the activations to pass on, and more of them to keep."""


class OptimizerBase(Section):
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """The peak, reached after warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After warm-up; cosine and linear fall from the peak to minimum_learning_rate, just behind schedule.steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly over these steps: learning_rate / warmup_steps at the first."""
    minimum_learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Where cosine and linear end."""
    gradient_clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    """The gradient's norm is clipped at this; null: never."""


class AdamWConfig(OptimizerBase):
    type: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay; norms and biases are never decayed."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the squared gradient's running mean."""
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    """Added to the denominator of the update."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """On matrices only."""


class CustomOptimizer(OptimizerBase):
    type: Literal["custom"]
    """An optimizer of your own."""
    function: str
    """package.module:function, called as function(groups, **options) -> torch.optim.Optimizer. `groups` has the float32
    weights by name, in `matrices` and `vectors`."""
    options: dict[str, Any] | None = None
    """The function's keyword-only parameters, checked against its signature."""


def _optimizer_type(value: Any) -> Any:
    return value.get("type", "adamw") if isinstance(value, dict) else getattr(value, "type", None)


OptimizerConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[CustomOptimizer, Tag("custom")], Discriminator(_optimizer_type)
]


class CheckpointConfig(Section):
    directory: str | None = None
    """The run's directory: checkpoints, metrics, ledger, report. null: runs/NAME-OF-THE-CONFIG-FILE."""
    every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints; 0: only at the end."""
    keep: Annotated[int, Field(ge=1)] = 3
    """How many complete checkpoints stay."""


class WandbConfig(Section):
    project: str
    """The project that the run is logged to."""
    name: str | None = None
    """The run's name; null lets wandb choose."""
    mode: Literal["online", "offline"] = "online"
    """offline writes to the run's directory only."""


class LoggingConfig(Section):
    console: bool = True
    """A live line of the numbers that matter."""
    jsonl: bool = True
    """metrics.jsonl in the run's directory, a line a step."""
    wandb: WandbConfig | None = None
    """Weights & Biases (extra: wandb)."""
    tensorboard: str | None = None
    """A directory for TensorBoard's event files (extra: tensorboard)."""
    custom_metrics: list[str] | None = None
    """Metrics of your own, each as package.module:function: from the labels of a micro-batch and facts of the step to
    metrics by name, whose types say how they are reduced."""
