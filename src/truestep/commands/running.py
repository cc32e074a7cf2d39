"""Training from Python: `train` and its result."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from truestep.config import held
from truestep.config.custom import keep_path_clean
from truestep.config.load import check_secrets, load_with, make_room
from truestep.config.schema import NEEDS_REWARD, Config, needs_reward
from truestep.config.yaml_tree import ConfigError
from truestep.environments.process import SAME_PROCESS
from truestep.errors import TruestepError
from truestep.files.whole import read_exact_lines
from truestep.metrics.sinks import Sink
from truestep.ranks.group import leave
from truestep.run.callbacks import Callback
from truestep.run.directory import RunDirectory
from truestep.run.train import train as train_here


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run."""

    ended: str
    """How the run ended, as a sentence."""
    finished: bool
    """True if all steps were made or the data ended; False if a callback or a signal stopped the run."""
    step: int
    """The number of the last step."""
    documents_seen: int
    """The number of documents that the policy has been trained on."""
    directory: Path
    """The run's directory."""
    checkpoint: Path | None
    """The last checkpoint, which `export` converts to a Hugging Face directory."""
    best: Path | None = None
    """The best checkpoint, if `checkpoint.keep_best` names a metric."""

    def metrics(self) -> list[dict[str, Any]]:
        """Read the lines of metrics.jsonl, one for each step."""
        return _lines(RunDirectory(self.directory).metrics)

    def evaluations(self) -> list[dict[str, Any]]:
        """Read the lines of evaluation.jsonl."""
        return _lines(RunDirectory(self.directory).evaluations)


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(read_exact_lines(path)) if path.is_file() else []


def configured(config: Config | str | Path, objects: Mapping[str, Any] | None = None) -> Config:
    """Return a configuration; if a path is given, load it. `objects`: values of some of its options, by name."""
    if isinstance(config, Config):
        options = config.model_dump(exclude_unset=True)
        make_room(options, objects or {})
        loaded = Config(**options).changed(objects) if objects else config
        if needs_reward(loaded):
            raise ConfigError(f"Config: {NEEDS_REWARD}")
    elif isinstance(config, str | os.PathLike):
        loaded = load_with(config, objects or {})
    else:
        problem = f"a configuration is a Config or the path of a YAML file, and not of type {type(config).__name__}"
        raise ConfigError(f"{problem}: write Config(**options)" if isinstance(config, dict) else problem)
    check_secrets(loaded, Path("Config") if isinstance(config, Config) else Path(config))
    return loaded


def train(
    config: Config | str | Path,
    *,
    reward: Callable[..., Any] | None = None,
    environment: Any = None,
    loss: Any = None,
    isolated: bool = True,
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink] = (),
    console: Console | None = None,
) -> TrainingResult:
    """Train as the configuration says, from the run's last checkpoint if it has one.

    `reward`, `environment` and `loss` are code of your own, used instead of the code that the configuration names: any
    function, class or object, also one of a notebook. With `isolated=False`, rewards and environments are called in
    this process. `sinks` get the line of every step and evaluation, in addition to the configuration's sinks. `console`
    shows progress, on standard output by default; `logging.console: false` silences it. Under torchrun every rank calls
    this; callbacks and sinks run only on the first rank.
    """
    objects: dict[str, Any] = {"sampler.reward": reward, "sampler.environment.class": environment}
    objects |= {} if loss is None else {"loss.type": "custom", "loss.function": loss}
    objects |= {} if isolated else {"sampler.reward_isolation": SAME_PROCESS}
    with held.forgotten():  # the objects are needed only during this call
        given = configured(config, {name: value for name, value in objects.items() if value is not None})
        if given.checkpoint.directory is None:
            raise TruestepError(
                "checkpoint.directory is required: a Config of Python has no file to name the run after"
            )
        put_back = keep_path_clean()
        try:
            trainer = train_here(given, console or Console(), callbacks=callbacks, sinks=sinks)
            leave()
        finally:
            put_back()
    return TrainingResult(
        ended=trainer.ended,
        finished=trainer.finished,
        step=trainer.step,
        documents_seen=trainer.state.documents_seen,
        directory=trainer.directory.path,
        checkpoint=trainer.checkpoints.latest(),
        best=trainer.checkpoints.best(),
    )
