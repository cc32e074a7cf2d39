"""The commands other than `train` as Python functions, from score and verify to bisect, serve and export."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from truestep.commands.running import configured
from truestep.config.convert import convert as convert_here
from truestep.config.schema import Config
from truestep.plan.cost import StepTime
from truestep.plan.memory import RankMemory
from truestep.plan.rates import named_rates
from truestep.plan.report import PlanReport
from truestep.ranks.group import leave
from truestep.tools.audit.run import Audit
from truestep.tools.audit.run import audit as audit_here
from truestep.tools.export import export as export_here
from truestep.tools.parity.gap import Parity
from truestep.tools.parity.gap import parity as parity_here
from truestep.tools.replay.bisect import Bisection
from truestep.tools.replay.bisect import bisect as bisect_here
from truestep.tools.replay.compare import Comparison
from truestep.tools.replay.compare import compare as compare_here
from truestep.tools.replay.replay import Replay
from truestep.tools.replay.replay import replay as replay_here
from truestep.tools.score import Score
from truestep.tools.score import score as score_here
from truestep.tools.serve import serve as serve_here
from truestep.tools.verify.judge import LayoutResult
from truestep.tools.verify.judge import verify as verify_here


def score(config: Config | str | Path, output: str | Path, *, gradients: bool = False) -> Score:
    """Run all of data.path as one step without an update.

    Returns the step's metrics (`step`) and the log-probs, entropies and ratios of each document (`documents`), and
    writes them to the directory `output`; with `gradients`, also gradients.safetensors and the gradient's norm.
    """
    result = score_here(configured(config), Path(output), gradients=gradients)
    leave()
    return result


@dataclass(frozen=True)
class Verification:
    """The results of `verify`, one for each layout."""

    verdicts: tuple[LayoutResult, ...]

    @property
    def passed(self) -> bool:
        """True if every layout is within bounds of the float64 reference."""
        return all(result.passed for result in self.verdicts)


def verify(
    config: Config | str | Path, output: str | Path, *, ranks: int = 4, documents: int = 14, full: bool = False
) -> Verification:
    """Run the same steps under many layouts of up to `ranks` processes, and compare each with a float64 reference."""
    results = verify_here(configured(config), Path(output), most_ranks=ranks, documents=documents, full=full)
    return Verification(tuple(results))


def parity(config: Config | str | Path, *, documents: int = 64, older: Sequence[str | Path] = ()) -> Parity:
    """Compare the sampler's log-probs with the trainer's, and test each possible cause of a difference separately.

    `older`: directories with earlier versions of the weights, to recognise stale ones."""
    return parity_here(configured(config), documents=documents, older=[Path(path) for path in older])


def audit(files: str | Path | Sequence[str | Path], *, model: str | Path | None = None, source: str = "auto") -> Audit:
    """Find wrong tokens in dumps of rollouts of this or another trainer, and say what is wrong with each.

    `files`: dumps, or directories of dumps. `source`: the trainer that wrote them. `model`: the model that sampled the
    rollouts, to score 20,000 of their tokens.
    """
    listed = [files] if isinstance(files, str | Path) else files
    return audit_here([Path(file) for file in listed], model=None if model is None else Path(model), source=source)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory and time that a configuration needs."""

    ranks: tuple[RankMemory, ...]
    """The memory of one rank of each pipeline stage, in bytes by kind."""
    text: str
    """The plan as `truestep plan` prints it."""
    fits: bool
    """True if each rank's memory suffices, or the GPU's memory was not given."""
    time: StepTime | None = None
    """The seconds of a step by part; None unless `card` was a file of measured rates."""

    @property
    def peak(self) -> float:
        """The largest peak of a step among the ranks, in bytes."""
        return max(rank.total for rank in self.ranks)


def serve(
    config: Config | str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key_env: str | None = None,
    documents: str | Path | None = None,
    weights: str | Path | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the policy to OpenAI's clients until the process is interrupted. `ready` is called with the base URL.

    `key_env`: the environment variable with the secret that API keys begin with; a `host` other than loopback needs it.
    `documents`: the file to which documents are appended when their rewards are posted. `weights`: a checkpoint, in
    place of model.path.
    """
    serve_here(
        configured(config),
        host=host,
        port=port,
        key_env=key_env,
        documents=documents,
        weights=weights,
        ready=ready,
    )


def plan(
    config: Config | str | Path, *, ranks: int = 1, memory: float | None = None, card: str | None = None
) -> MemoryPlan:
    """Plan the memory of each rank, without a GPU and without reading weights. `card`: a GPU's name such as H100, or a
    file of rates that a run measured on such a GPU, which also gives the time of a step. `memory`: GiB of each GPU;
    None: the card's."""
    cards_memory, rates = (None, None) if card is None else named_rates(card)
    found = PlanReport.of(configured(config), ranks, cards_memory if memory is None else memory, rates)
    return MemoryPlan(tuple(found.planned), "\n".join(found.lines()), found.fits, found.time)


def export(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str = "bfloat16",
    trust_remote_code: bool = False,
    adapter_alone: bool = False,
    model: str | Path | None = None,
    best: bool = False,
) -> Path:
    """Write a checkpoint, or the last one of a run's directory, as a Hugging Face directory; return the checkpoint's
    path. With `best` it is the run's best one, by its `checkpoint.keep_best`. An adapter is merged into its model (at
    `model`, if that has moved), or with `adapter_alone` saved as by peft."""
    return export_here(
        Path(source),
        Path(output),
        dtype,
        trust_remote_code,
        model=None if model is None else Path(model),
        adapter_alone=adapter_alone,
        best=best,
    )


def replay(run: str | Path, step: int, output: str | Path | None = None, *, options: Sequence[str] = ()) -> Replay:
    """Repeat a step of a run from the data that the run kept, and compare it with the original.

    `output`: a new directory for the replay's own files. `options`: changed options, as on the command line:
    `["--loss.type", "gspo"]`.
    """
    result = replay_here(Path(run), step, None if output is None else Path(output), list(options))
    leave()
    return result


def bisect(
    run: str | Path,
    metric: str,
    step: int | None = None,
    output: str | Path | None = None,
    *,
    options: Sequence[str] = (),
) -> Bisection:
    """Find the documents and labels that made a metric of a run jump, by replays of the step without parts of them.

    `step`: the step to examine; None: the one with the largest jump. `output` and `options`: as for `replay`.
    """
    result = bisect_here(Path(run), metric, step, None if output is None else Path(output), list(options))
    leave()
    return result


def compare(first: str | Path, second: str | Path) -> Comparison:
    """Find the first step in which two runs differ, and its cause."""
    return compare_here(Path(first), Path(second))


def convert(file: str | Path) -> str:
    """Convert another trainer's configuration to ours, as YAML. Options without an equivalent become comments."""
    return convert_here(Path(file))[0]
