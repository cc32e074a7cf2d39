"""The whole configuration, and rules that refuse combinations of options which contradict each other."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, model_validator

from truestep.config import presets, sections
from truestep.config.losses import LossConfig, default_loss
from truestep.config.section import Section

Given = Mapping[str, Any] | Section  # a section's options by name


class _MadeInPython(type(Section)):  # type: ignore[misc]
    """A metaclass that checks the options of `Config(model={...})` like those of a file, with the same messages."""

    check: Callable[[dict[str, Any]], "Config"] | None = None  # set by `load`, which makes the messages

    def __call__(cls, /, **options: Any) -> "Config":
        return super().__call__(**options) if cls.check is None else cls.check(options)


class Config(Section, metaclass=_MadeInPython):
    """All options of a run.

    Make one with `load_config(FILE)`, or as `Config(model={"path": ...}, loss={"type": ...}, ...)`: each section is a
    mapping of its options. Options that are unknown, wrong or contradictory raise a ConfigError.
    """

    if TYPE_CHECKING:  # the signature of Config(...): sections may be mappings

        def __init__(
            self,
            *,
            model: Given,
            preset: str | Sequence[str] | None = None,
            adapter: Given | None = None,
            loss: Given = ...,
            data: Given = ...,
            sampler: Given | None = None,
            evaluation: Given | None = None,
            schedule: Given = ...,
            parallel: Given = ...,
            optimizer: Given = ...,
            checkpoint: Given = ...,
            logging: Given = ...,
            seed: int = 0,
            deterministic: bool = False,
        ) -> None: ...

    preset: presets.PresetName | list[str] | None = None
    """Names of published recipes. A recipe sets only options that you do not set. docs/objectives.md lists the
    recipes."""
    model: sections.ModelConfig
    """The policy."""
    adapter: sections.AdapterConfig | None = None
    """Train a LoRA adapter instead of the model's own weights. `null`: train the model's own weights."""
    loss: LossConfig = default_loss()
    """The loss, by `type`."""
    data: sections.DataConfig = sections.DataConfig()
    """The training data: where documents come from, their advantages, and packing."""
    sampler: sections.SamplerConfig | None = None
    """Sampling of rollouts during training. Without this section rollouts come from data.path or data.source."""
    evaluation: sections.EvaluationConfig | None = None
    """Evaluation on held-out prompts or documents."""
    schedule: sections.ScheduleConfig = sections.ScheduleConfig()
    """The size of a step and the length of the run."""
    parallel: sections.ParallelConfig = sections.ParallelConfig()
    """Parallelism: how a step is split over processes."""
    optimizer: sections.OptimizerConfig = sections.AdamWConfig()
    """The optimizer, the learning rate and gradient clipping."""
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    """The run's directory and its checkpoints."""
    logging: sections.LoggingConfig = sections.LoggingConfig()
    """Where metrics are written."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of sampling, of shuffling and of the order of prompts."""
    deterministic: bool = False
    """Use only deterministic operations, so that a resumed run is bitwise equal to an uninterrupted one."""

    def changed(self, options: Mapping[str, Any]) -> "Config":
        """Return a configuration with some options changed, by dotted name: `{"optimizer.learning_rate": 1e-5}`."""
        given = self.model_dump(exclude_unset=True)
        for name, value in options.items():
            section = given
            for part in name.split(".")[:-1]:
                if not isinstance(section.get(part), dict):
                    section[part] = {}
                section = section[part]
            section[name.rpartition(".")[2]] = value
        return Config(**given)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_presets(cls, options: Any) -> Any:
        """Add the options of presets. After `load_config` this changes nothing, since they are there already."""
        if not isinstance(options, dict) or not presets.names_of(options.get("preset")):
            return options
        plain = {
            name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else copy.deepcopy(value)
            for name, value in options.items()
        }
        presets.fill(plain)
        return plain

    @model_validator(mode="after")
    def _options_agree(self) -> "Config":
        contradiction = next((message for rule in _RULES for message in rule(self)), None)
        if contradiction is not None:
            raise ValueError(contradiction)
        return self


EVERYDAY = (
    *("model.path", "model.dtype", "model.compile", "model.activation_checkpointing", "adapter.rank"),
    *("loss.type", "data.path", "data.group_size", "data.tokens_per_microbatch"),
    *("sampler.prompts", "sampler.reward", "sampler.environment.class", "sampler.max_new_tokens"),
    *("evaluation.prompts", "evaluation.every", "schedule.docs_per_step", "schedule.steps"),
    *("optimizer.learning_rate", "optimizer.warmup_steps"),
    *("checkpoint.directory", "checkpoint.every", "checkpoint.keep_best", "seed"),
)
"""The options that most runs set. `--help` and docs/options.md show only these."""


# Terms of the loss that have a gradient even if the advantage is 0.
_BESIDE_THE_ADVANTAGE = ("entropy_bonus", "entropy_target", "z_loss", "kl_reference", "kl_cov")


# Each rule yields a sentence for each contradiction that it finds. The first one is reported.


def _presets(config: "Config") -> Iterator[str]:
    for name in config.preset if isinstance(config.preset, list) else ():
        if name not in presets.PRESETS:
            near = get_close_matches(name, presets.PRESETS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(presets.PRESETS)}"
            yield f"preset: {name!r} is unknown: {hint}"


def _attention(config: "Config") -> Iterator[str]:
    model = config.model
    if model.attention == "flash" and (model.dtype == "float32" or model.device == "cpu"):
        which = "model.dtype: float32" if model.dtype == "float32" else "model.device: cpu"
        yield f"model.attention: flash computes in bfloat16 on a GPU: it cannot be used with {which}"


def _activations(config: "Config") -> Iterator[str]:
    how, moves = config.model.activation_checkpointing, config.model.activation_offload is True
    if moves and not how:
        yield (
            "model.activation_offload is for the inputs of recomputed layers: set model.activation_checkpointing too, "
            "full or selective"
        )
    if moves and how == "elementwise" and config.model.compile:
        yield (
            "model.activation_offload is for the inputs of recomputed layers, and model.activation_checkpointing: "
            "elementwise recomputes no compiled layer: set it to full or selective"
        )


def _experts(config: "Config") -> Iterator[str]:
    experts, default = config.model.experts, sections.ExpertsConfig()
    if experts.router == "frozen" and (experts.balance != "none" or experts.z_loss):
        option = "balance" if experts.balance != "none" else "z_loss"
        yield f"model.experts.{option} changes routers, and model.experts.router: frozen keeps them: remove one of them"
    if experts.strength != default.strength and experts.balance == "none":
        yield "model.experts.strength needs model.experts.balance: loss or bias"
    if experts.balance == "bias" and config.adapter is not None:
        yield "model.experts.balance: bias changes the model, and with an adapter only the adapter is trained and saved"


def _offload(config: "Config") -> Iterator[str]:
    room = getattr(config.optimizer, "offload_room", 0)
    if room and getattr(config.optimizer, "offload", "none") == "none":
        yield "optimizer.offload_room has no effect without offload: set optimizer.offload too, states or all"


def _documents(config: "Config") -> Iterator[str]:
    data = config.data
    if config.sampler is not None and data.path is not None:
        yield "data.path and sampler are both given: documents come from one source; remove one of the two"
    if data.source is None:
        if data.group_timeout != type(data).model_fields["group_timeout"].default:
            yield "data.group_timeout needs data.source: groups from other sources are complete at the end of the data"
        return
    if data.path is not None:
        yield "data.source and data.path are both given: documents come from one source; remove one of the two"
    if config.sampler is not None:
        yield "data.source and sampler are both given: documents come from one source; remove one of the two"
    if data.shuffle:
        yield "data.shuffle is for the files of data.path; those of data.source are used as they arrive"
    if data.epochs != 1:
        yield "data.epochs is for the files of data.path; the documents of data.source come once"
    if data.group_size is None and data.advantages != "none" and not config.loss.supervised:
        yield (
            f"data.advantages: {data.advantages} needs data.group_size with data.source: how many rollouts make a "
            "group complete (or data.advantages: none, where records carry their own)"
        )


def learns_from_groups_alone(config: "Config") -> bool:
    """Return whether advantages are differences within a group and no other term of the loss has a gradient."""
    own = ":" in config.data.advantages or config.data.zero_advantage == "replace" or config.loss.type == "custom"
    terms = ("kl_reference", "entropy_bonus", "entropy_target", "z_loss")
    return not own and not any(getattr(config.loss, term, None) for term in terms)


NEEDS_REWARD = "sampler needs sampler.reward or sampler.environment: one of the two"


def needs_reward(config: "Config") -> bool:
    """Return whether the sampler has no reward and no environment. In Python, one may be passed to `train` later."""
    sampler = config.sampler
    return sampler is not None and sampler.reward is None and sampler.environment is None


_OF_PROCESSES = ("reward_timeout", "reward_memory", "reward_environment", "reward_writable", "reward_network")


def _same_process(config: "Config") -> Iterator[str]:
    sampler, evaluation = config.sampler, config.evaluation
    where = None if sampler is None else sampler.reward_isolation
    for name, section in (("sampler", sampler), ("evaluation", evaluation)):
        if section is None or (section.reward_isolation or where) != "same_process":
            continue
        for option in _OF_PROCESSES:
            if getattr(section, option) != type(section).model_fields[option].default:
                yield f"{name}.{option} is for processes of rewards: there are none with reward_isolation: same_process"
    environment: Any = None if sampler is None else sampler.environment
    if where == "same_process" and environment is not None and environment.type != "python":
        yield (
            "sampler.reward_isolation: same_process is for a reward or an environment of your own: not with "
            f"sampler.environment.type: {environment.type}"
        )


def _episodes(config: "Config") -> Iterator[str]:
    sampler = config.sampler
    if sampler is None:
        return
    if sampler.reward is not None and sampler.environment is not None:
        yield NEEDS_REWARD
    if needs_reward(config):
        return
    if sampler.environment is None:
        if sampler.prompts is None:
            yield "sampler needs sampler.prompts: with a reward, only a file or a dataset has prompts"
        sets = (config.evaluation and config.evaluation.sets) or {}
        if any(given.environment is not None for given in sets.values()):  # their episodes have the limits below
            return
        for name in ("max_turns", "max_episode_tokens", "episode_timeout"):
            if getattr(sampler, name) != type(sampler).model_fields[name].default:
                yield f"sampler.{name} is for sampler.environment: a reward's episodes have one turn"
        return
    most = config.data.tokens_per_microbatch
    if sampler.max_episode_tokens > most:
        yield (
            f"sampler.max_episode_tokens: {sampler.max_episode_tokens} is more than data.tokens_per_microbatch: "
            f"{most}, so an episode might not fit"
        )


def _environment(config: "Config") -> Iterator[str]:
    sampler, evaluation = config.sampler, config.evaluation
    if sampler is None or sampler.environment is None:
        return
    given: Any = sampler.environment
    for kind, name in (("python", "class"), ("command", "run"), ("command", "preload")):
        value = getattr(given, name)
        if kind == given.type and not value and name != "preload":
            yield f"sampler.environment needs {name} with type: {kind}"
        if kind != given.type and value is not None:
            yield f"sampler.environment.{name} is for type: {kind}"
    if given.type == "command":
        if given.options is not None:
            yield "sampler.environment.options are not for type: command: give a program its arguments in run"
        if sampler.prompts is None:
            yield "sampler.environment.type: command needs sampler.prompts: a program makes none"
    if given.type in ("command", "verifiers") and not sampler.reward_network:
        yield "sampler.reward_network: false would keep the program from asking for completions"
    if given.type in ("reasoning_gym", "verifiers"):
        asked = {"sampler": sampler.prompts}
        asked["evaluation"] = None if evaluation is None or evaluation.reward is not None else evaluation.prompts
        for name, prompts in asked.items():
            if prompts is not None:
                yield f"{name}.prompts is not for sampler.environment.type: {given.type}, which makes its own prompts"


def _sources(config: "Config") -> Iterator[str]:
    sampler = config.sampler
    if sampler is None:
        return
    weights, curriculum = sampler.prompt_weights, sampler.curriculum
    named = sorted(name for name in sections.files_of(sampler.prompts) if name)
    if weights is not None and not named:
        yield "sampler.prompt_weights are for several sources: give sampler.prompts as {math: FILE, code: FILE}"
    elif weights is not None and sorted(weights) != named:
        yield (
            f"sampler.prompt_weights names {', '.join(sorted(weights)) or 'no source'}, and sampler.prompts "
            f"{', '.join(named)}: give each source a weight"
        )
    if curriculum is not None and curriculum.hopeless >= curriculum.easy:
        yield (
            f"sampler.curriculum.hopeless: {curriculum.hopeless:g} is not below sampler.curriculum.easy: "
            f"{curriculum.easy:g}: prompts between the two are drawn"
        )


def of_sets(config: "Config") -> dict[str, "Config"]:
    """Return, for the name of each set of held-out prompts, a configuration that evaluates only this set. Without sets,
    return the configuration itself under the name ''."""
    evaluation = config.evaluation
    if evaluation is None or evaluation.sets is None:
        return {"": config}
    alone: dict[str, Config] = {}
    for name, given in evaluation.sets.items():
        own: dict[str, Any] = {option: value for option, value in given if value is not None}
        environment, sampler = own.pop("environment", None), config.sampler
        if environment is not None:
            changed = {"environment": environment, "reward": None, "prompts": given.prompts}
            sampler = (sampler or sections.InProcessSampler()).model_copy(update=changed)
            own["reward"] = given.reward
        only = evaluation.model_copy(update={"sets": None, **own})
        alone[name] = config.model_copy(update={"evaluation": only, "sampler": sampler})
    return alone


def makes_held_out_prompts(config: "Config") -> bool:
    """Return whether the sampler's environment makes the held-out prompts, because the evaluation names none."""
    sampler, evaluation = config.sampler, config.evaluation
    if evaluation is None or evaluation.path is not None or evaluation.prompts is not None:
        return False
    has_environment = sampler is not None and sampler.environment is not None and sampler.prompts is None
    return has_environment and evaluation.reward is None


def _sampled_groups(config: "Config") -> Iterator[str]:
    if config.sampler is None:
        return
    group_size, docs_per_step = config.data.group_size, config.schedule.docs_per_step
    if config.loss.supervised:
        yield f"loss.type: {config.loss.type} is supervised: give data.path instead of a sampler"
    if group_size is None:
        yield "sampler needs data.group_size: how many completions each prompt gets"
    elif group_size == 1 and learns_from_groups_alone(config):
        yield (
            f"data.group_size: 1 leaves nothing to compare a completion with, so data.advantages: "
            f"{config.data.advantages} gives 0 to every one and nothing is learned: sample several, such as "
            "data.group_size: 8"
        )
    if docs_per_step == 0:
        yield "sampler needs schedule.docs_per_step: how many completions make a step"
    if group_size is not None and docs_per_step % group_size:
        yield (
            f"schedule.docs_per_step: {docs_per_step} is not a multiple of data.group_size: {group_size}, so a group "
            f"would be cut in two: set it to {docs_per_step + -docs_per_step % group_size}, for example"
        )
    if config.data.advantages == "none":
        yield "data.advantages: none expects records that carry their advantage; a sampler gives rewards"
    if config.data.shuffle:
        yield "data.shuffle is for files; a sampler's prompts are always taken in a seeded order"
    if config.data.epochs != 1:
        yield "data.epochs is for files; with a sampler, schedule.steps says how long the run is"
    if config.schedule.steps is None:
        yield "sampler needs schedule.steps: its prompts are repeated without end"
    if config.schedule.overshoot == "keep":
        yield "schedule.overshoot: keep is for files; a sampler makes exactly schedule.docs_per_step documents"
    if config.schedule.last_step == "drop":
        yield "schedule.last_step: drop is for files; a sampler's documents never end"
    if config.data.fields:
        yield "data.fields is for the records of data.path and data.source; a sampler's documents have no others"
    if config.data.temperature != 1.0:
        yield "data.temperature is for files; with a sampler, set sampler.temperature"


def _servers(config: "Config") -> Iterator[str]:
    sampler = config.sampler
    if sampler is None or sampler.type != "server":
        return
    urls = [url.rstrip("/") for url in sampler.urls or ()]
    if len(set(urls)) < len(urls):
        yield "sampler.urls names a server twice"
    start = sampler.start
    if (start is None) is (sampler.urls is None):
        yield "sampler needs sampler.urls (running servers) or sampler.start (servers that the run starts): one of them"
    if start is None:
        return
    if sampler.protocol not in ("vllm", "sglang"):
        yield f"sampler.start starts vllm or sglang; start servers of sampler.protocol: {sampler.protocol} yourself"
    if sampler.api_key_env is not None:
        yield "sampler.api_key_env is for sampler.urls; the run makes a key for servers that it starts"
    gpus = start.gpus or []
    if len(set(gpus)) < len(gpus):
        yield "sampler.start.gpus names a GPU twice"
    if len(gpus) % start.tensor or (start.tensor > 1 and not gpus):
        yield f"sampler.start.gpus: {len(gpus)} cannot be divided among servers of sampler.start.tensor: {start.tensor}"


def _exact(config: "Config") -> Iterator[str]:
    sampler = config.sampler
    if sampler is None or sampler.type != "in_process" or not sampler.exact:
        return
    if not sampler.engine:
        yield "sampler.exact: true is computed by the engine: leave out sampler.engine: false"
    if config.parallel.tensor > 1:
        yield (
            f"sampler.exact: true needs products on one rank, and parallel.tensor: {config.parallel.tensor} sums "
            "them over ranks: leave out sampler.exact, or set parallel.tensor: 1"
        )


def _advantages(config: "Config") -> Iterator[str]:
    data = config.data
    scale = {"group_normalized": "group", "batch_normalized": "step"}.get(data.advantages, data.advantage_scale)
    if scale != data.advantage_scale and data.advantage_scale is not None:
        yield (
            f"data.advantages: {data.advantages} has the scale {scale}, and data.advantage_scale is "
            f"{data.advantage_scale}: write data.advantages: group_mean, or leave out the scale"
        )
    made_of_rewards = {
        "advantage_scale": scale if data.advantage_scale is not None else None,
        "overlong_penalty": data.overlong_penalty,
    }
    for name, value in made_of_rewards.items():
        if value is not None and config.loss.supervised:
            yield f"data.{name} is for advantages, which loss.type: {config.loss.type} does not use"
        if value is not None and data.advantages == "none":
            yield f"data.{name} is for advantages from rewards; with data.advantages: none, records have their own"
    if data.advantage_std_floor != 1e-4 and scale in (None, "none"):
        yield "data.advantage_std_floor does nothing without data.advantage_scale: group or step"
    if data.overlong_penalty is not None:
        bounds = data.overlong_penalty.model_dump()
        if bounds["from"] >= bounds["to"]:
            yield "data.overlong_penalty.from is not below data.overlong_penalty.to: the penalty grows between them"


def _step_documents(config: "Config") -> Iterator[str]:
    data, loss, schedule = config.data, config.loss, config.schedule
    if data.zero_advantage != "keep" and loss.supervised:
        yield f"data.zero_advantage is for advantages, which loss.type: {loss.type} does not use"
    if data.zero_advantage == "skip":
        terms = [f"loss.{name}" for name in _BESIDE_THE_ADVANTAGE if getattr(loss, name, None)]
        experts = config.model.experts
        terms += ["model.experts.balance: loss"] if experts.balance == "loss" else []
        terms += ["model.experts.z_loss"] if experts.z_loss else []
        if terms or loss.type == "custom":
            yield (
                f"data.zero_advantage: skip leaves out backward passes without a gradient, but "
                f"{terms[0] if terms else 'loss.type: custom'} may have one even if the advantage is 0"
            )
        if schedule.docs_per_step == 0 or schedule.overshoot == "keep":
            yield (
                "data.zero_advantage: skip needs schedule.docs_per_step > 0 and schedule.overshoot: carry, where "
                "documents are packed once the step's are known"
            )
    if data.zero_advantage == "replace":
        if config.sampler is None:
            yield "data.zero_advantage: replace needs a sampler, which can make other documents"
        if data.group_size == 1 and ":" not in data.advantages:
            yield "data.zero_advantage: replace would replace every group of data.group_size: 1, whose advantage is 0"
    elif data.replace_limit != 64:
        yield "data.replace_limit is for data.zero_advantage: replace"
    if data.truncated == "drop" and config.sampler is not None:
        yield (
            "data.truncated: drop would make a sampler's steps smaller than schedule.docs_per_step, without their long "
            "completions: set data.truncated: mask"
        )


def _steps(config: "Config") -> Iterator[str]:
    schedule, data = config.schedule, config.data
    if schedule.docs_per_step == 0 and schedule.overshoot == "keep":
        yield "schedule.overshoot: keep needs schedule.docs_per_step > 0"
    if schedule.docs_per_step > 0 and schedule.depth_first_micro_batches > 1:
        yield (
            "schedule.depth_first_micro_batches fixes the number of micro-batches in a step, and "
            "schedule.docs_per_step that of documents: set one of the two"
        )
    if data.tokens_per_microbatch % data.pad_to_multiple:
        yield (
            f"data.tokens_per_microbatch: {data.tokens_per_microbatch} is not a multiple of data.pad_to_multiple: "
            f"{data.pad_to_multiple}, so padding could exceed the budget"
        )


def _evaluation(config: "Config") -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation is None or evaluation.sets is not None:  # `_sets` checks sets
        return
    samples = evaluation.prompts is not None or makes_held_out_prompts(config)
    if samples == (evaluation.path is not None):
        yield (
            "evaluation needs evaluation.prompts or evaluation.sets, to sample answers, or evaluation.path, held-out "
            "documents of a supervised run: one of them"
        )
    if evaluation.path is not None and not config.loss.supervised:
        yield f"evaluation.path is for supervised losses, and loss.type: {config.loss.type} is not one"
    if samples and evaluation.reward is None and config.sampler is None:
        yield "evaluation needs evaluation.reward: there is no sampler.reward to take"
    if evaluation.servers:
        if config.sampler is None or config.sampler.type != "server":
            yield "evaluation.servers needs sampler.type: server: there are no servers to ask"
        for name in ("top_p", "top_k", "min_p", "stop"):
            if name in evaluation.model_fields_set:
                yield f"evaluation.{name} is not for evaluation.servers: servers draw from the whole distribution"
    if evaluation.pass_reward is not None and not samples:
        yield "evaluation.pass_reward is for answers that are sampled: it needs evaluation.prompts"
    if evaluation.path is not None and evaluation.reward is not None:
        yield "evaluation.reward is for answers that are sampled: it does nothing with evaluation.path"


def _sets(config: "Config") -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation is None or evaluation.sets is None:
        return
    for name in ("prompts", "path"):
        if getattr(evaluation, name) is not None:
            yield f"evaluation.{name} and evaluation.sets are both given: make it one of the sets, or remove the sets"
    alone_of = of_sets(config)
    for name, given in evaluation.sets.items():
        section, alone = f"evaluation.sets.{name}", alone_of[name]
        if given.reward is not None and given.environment is not None:
            yield f"{section}.reward and {section}.environment are both given: one of the two rates answers"
        if given.prompts is None and not makes_held_out_prompts(alone):
            yield f"{section} needs {section}.prompts: it has no environment that makes them"
        for rule in (_evaluation, _environment) if given.environment is not None else (_evaluation,):
            yield from (_OF_A_SET.sub(rf"{section}.\1\2", message) for message in rule(alone))


# In a message about a configuration that evaluates one set: the option names to replace by those of the set.
_OF_A_SET = re.compile(r"\bsampler\.(environment|prompts)\b|\bevaluation\.(prompts|reward|pass_reward)\b")


def evaluation_metrics(config: "Config") -> list[str]:
    """Return the names of evaluation metrics that checkpoint.keep_best accepts, with the prefix `evaluation/`."""
    evaluation = config.evaluation
    if evaluation is None:
        return []
    if evaluation.path is not None:
        return ["evaluation/loss"]
    names = ["greedy_reward", "sampled_reward"]
    for prefix, alone in of_sets(config).items():
        own = alone.evaluation
        assert own is not None
        means = ["greedy_reward", "sampled_reward"]
        if own.pass_reward is not None:
            means += [f"pass@{2**power}" for power in range(own.samples_per_prompt.bit_length())]
        sources = [source for source in sections.files_of(own.prompts) if source]
        means += [f"{name}/{source}" for name in ("greedy_reward", "sampled_reward") for source in sources]
        names += [f"{prefix}/{name}" if prefix else name for name in means]
    return [f"evaluation/{name}" for name in dict.fromkeys(names)]


# Changes to a configuration that only scores or trains on given records, and samples nothing.
NOTHING_IS_DRAWN = {"sampler": None, "evaluation": None, "checkpoint.keep_best": None}


def _keep_best(config: "Config") -> Iterator[str]:
    metric, known = config.checkpoint.keep_best, evaluation_metrics(config)
    if metric is None or metric in known:
        return
    if not known:
        yield f"checkpoint.keep_best: {metric} is a metric of evaluations: it needs evaluation"
        return
    near = get_close_matches(metric, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    yield f"checkpoint.keep_best: {metric} is no metric of this run's evaluations: {hint}"


def _learning_rate(config: "Config") -> Iterator[str]:
    optimizer, steps = config.optimizer, config.schedule.steps
    if optimizer.schedule != "constant" and steps is None:
        yield f"optimizer.schedule: {optimizer.schedule} needs schedule.steps: where the learning rate ends"
    if steps is not None and optimizer.warmup_steps > steps:
        yield f"optimizer.warmup_steps: {optimizer.warmup_steps} is more than schedule.steps: {steps}"
    if optimizer.minimum_learning_rate > optimizer.learning_rate:
        yield "optimizer.minimum_learning_rate is above optimizer.learning_rate"
    if optimizer.schedule == "constant" and optimizer.minimum_learning_rate > 0:
        yield "optimizer.minimum_learning_rate does nothing with optimizer.schedule: constant"


def _ranks(config: "Config") -> Iterator[str]:
    """Check parallelism. Sampling in process and evaluation need all layers on a rank."""
    parallel, evaluation = config.parallel, config.evaluation
    if parallel.pipeline > 1 and config.sampler is not None and config.sampler.type == "in_process":
        yield (
            f"parallel.pipeline: {parallel.pipeline} leaves no rank with all layers, which sampling needs: set "
            "sampler.type: server, remove sampler (and train on data.path or data.source), or set parallel.pipeline: 1 "
            "(sampling works with parallel.tensor)"
        )
    if parallel.pipeline > 1 and evaluation is not None and evaluation.path is None and not evaluation.servers:
        yield (
            f"parallel.pipeline: {parallel.pipeline} leaves no rank with all layers, which evaluation needs: remove "
            "evaluation, set evaluation.servers: true with servers that sample, or set parallel.pipeline: 1 "
            "(generating works with parallel.tensor)"
        )
    if parallel.stages_per_rank > 1 and parallel.pipeline == 1:
        yield "parallel.stages_per_rank is for pipelines: it needs parallel.pipeline > 1"
    if config.model.compile and parallel.tensor > 1:
        yield (
            f"model.compile: layers that are cut over parallel.tensor: {parallel.tensor} ranks are not compiled; "
            "remove one of the two"
        )


def _expert_ranks(config: "Config") -> Iterator[str]:
    """Find options that expert parallelism does not support."""
    evaluation, divided = config.evaluation, f"parallel.expert: {config.parallel.expert}"
    if config.parallel.expert == 1:
        return
    if config.sampler is not None and config.sampler.type == "in_process":
        yield (
            f"{divided} leaves no rank with all experts, which sampling needs: set sampler.type: server, remove "
            "sampler (and train on data.path or data.source), or set parallel.expert: 1"
        )
    if evaluation is not None and evaluation.path is None and not evaluation.servers:
        yield (
            f"{divided} leaves no rank with all experts, which evaluation needs: remove evaluation, set "
            "evaluation.servers: true with servers that sample, or set parallel.expert: 1"
        )
    if config.optimizer.type == "muon":
        yield f"optimizer.type: muon does not support {divided}: set another optimizer.type, or parallel.expert: 1"


def _reference(config: "Config") -> Iterator[str]:
    options = getattr(config.loss, "kl_reference", None)
    if options is not None and options.path == "records" and config.sampler is not None:
        yield "loss.kl_reference.path: records needs records with reference_logprobs, which a sampler does not write"
    if options is not None and options.offload:
        if options.path == "records":
            yield "loss.kl_reference.offload is for a reference model, and with path: records there is none"
        if options.path is None and config.adapter is not None:
            yield (
                "loss.kl_reference.offload: the reference of an adapter is the model that it is trained on, which has "
                "to stay: leave out offload, or name another model with loss.kl_reference.path"
            )


def _transfer(config: "Config") -> Iterator[str]:
    sampler = config.sampler
    if sampler is None or sampler.type != "server" or sampler.transfer == "disk":
        return
    name = f"sampler.transfer: {sampler.transfer}"
    if sampler.protocol == "sglang":
        yield f"{name} needs sampler.protocol: vllm; sglang takes weights from a disk"
    if sampler.adapter == "served":
        yield f"{name} is for whole models, and sampler.adapter: served gives servers an adapter alone"
    if sampler.protocol == "vllm" and config.model.device == "cpu":
        yield f"{name} sends weights from a GPU, and model.device is cpu"


def _memory(config: "Config") -> Iterator[str]:
    given = config.checkpoint
    if given.in_memory_every is None and given.in_memory_gigabytes is not None:
        yield "checkpoint.in_memory_gigabytes does nothing without checkpoint.in_memory_every: set it too"
    if given.in_memory_every is not None and 0 < given.every <= given.in_memory_every:
        yield (
            f"checkpoint.in_memory_every: {given.in_memory_every} does nothing beside checkpoint.every: {given.every}, "
            "which saves as often: set it lower"
        )


def _adapter(config: "Config") -> Iterator[str]:
    sampler = config.sampler
    if sampler is not None and sampler.type == "server" and sampler.adapter == "served":
        if config.adapter is None:
            yield "sampler.adapter: served needs a LoRA adapter, and there is no section adapter"
        if sampler.pause == "keep":
            yield (
                "sampler.pause: keep lets completions go on with new weights, and with sampler.adapter: served they "
                "end with the adapter that they began with: set sampler.pause: wait or abort"
            )
        if sampler.protocol == "sglang":
            yield "sampler.adapter: served needs sampler.protocol: vllm; with sglang set sampler.adapter: merged"
    if config.adapter is None:
        return
    if config.model.freeze is not None:
        yield (
            "model.freeze does nothing with adapter, which freezes every weight of the model: leave layers without an "
            "adapter by adapter.targets"
        )
    if config.checkpoint.in_memory_every is not None:
        yield (
            "checkpoint.in_memory_every is for whole models, and with adapter a checkpoint is small: set "
            "checkpoint.every lower instead"
        )
    if config.checkpoint.hugging_face_every:
        yield (
            "checkpoint.hugging_face_every is for whole models, and with adapter a checkpoint holds the adapter alone: "
            "leave it out, and use truestep export, which merges the adapter"
        )
    if config.adapter.path is not None:
        for name in ("rank", "alpha", "targets"):
            if name in config.adapter.model_fields_set:
                yield f"adapter.{name} and adapter.path are both given: the adapter of adapter.path has its own {name}"


_RULES = (
    _presets,
    _memory,
    _adapter,
    _attention,
    _activations,
    _offload,
    _experts,
    _reference,
    _transfer,
    _documents,
    _sampled_groups,
    _servers,
    _episodes,
    _same_process,
    _environment,
    _sources,
    _exact,
    _advantages,
    _step_documents,
    _steps,
    _evaluation,
    _sets,
    _keep_best,
    _learning_rate,
    _ranks,
    _expert_ranks,
)
