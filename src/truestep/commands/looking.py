"""What the other commands do, from Python: score, verify, parity, plan, export, and a look at rollout files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from truestep.commands.running import configured
from truestep.config.schema import Config
from truestep.plan.cost import StepTime
from truestep.plan.memory import RankMemory
from truestep.plan.rates import named_rates
from truestep.plan.report import Plan
from truestep.ranks.group import leave
from truestep.tools.export import export as export_here
from truestep.tools.parity.gap import Parity
from truestep.tools.parity.gap import parity as parity_here
from truestep.tools.score import Score
from truestep.tools.score import score as score_here
from truestep.tools.verify.judge import Verdict
from truestep.tools.verify.judge import verify as verify_here


def score(config: Config | str | Path, output: str | Path, *, gradients: bool = False) -> Score:
    """Run all of data.path as one step and update nothing.

    Gives the step's metrics (`step`) and each document's log-probs, entropies and ratios (`documents`), and writes them
    to `output`; with `gradients`, also gradients.safetensors and the gradient's norm.
    """
    result = score_here(configured(config), Path(output), gradients=gradients)
    leave()
    return result


@dataclass(frozen=True)
class Verification:
    """The verdicts on a configuration's layouts."""

    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """True where every layout is within bounds of the float64 reference."""
        return all(verdict.passed for verdict in self.verdicts)


def verify(
    config: Config | str | Path, output: str | Path, *, ranks: int = 4, documents: int = 14, full: bool = False
) -> Verification:
    """Run the same steps under many layouts, each against a float64 reference.

    Other processes run the layouts and import the program: in a script, call this below `if __name__ == "__main__":`.
    """
    verdicts = verify_here(configured(config), Path(output), most_ranks=ranks, documents=documents, full=full)
    return Verification(tuple(verdicts))


def parity(config: Config | str | Path, *, documents: int = 64, older: Sequence[str | Path] = ()) -> Parity:
    """Measure how far the sampler's log-probs are from the trainer's. Each possible cause is tried alone."""
    return parity_here(configured(config), documents=documents, older=[Path(path) for path in older])


@dataclass(frozen=True)
class MemoryPlan:
    """The memory and time that a configuration needs."""

    ranks: tuple[RankMemory, ...]
    """The memory of a rank of each stage of the pipeline, in bytes by kind."""
    text: str
    """The plan as `truestep plan` prints it."""
    fits: bool
    """True where each rank's memory is enough, or was not said."""
    time: StepTime | None = None
    """The seconds of a step by part, where a file of kept rates was named."""

    @property
    def peak(self) -> float:
        """The bytes that the rank which needs most needs at the peak of a step."""
        return max(rank.total for rank in self.ranks)


def plan(
    config: Config | str | Path, *, ranks: int = 1, memory: float | None = None, card: str | None = None
) -> MemoryPlan:
    """Plan the memory of each rank, without a GPU and without reading a weight. `card`: a name such as H100, or a file
    of rates that a run on such a card has kept: then the time of a step too. `memory`: GiB of each GPU; without it, the
    card's."""
    cards_memory, rates = (None, None) if card is None else named_rates(card)
    found = Plan.of(configured(config), ranks, cards_memory if memory is None else memory, rates)
    return MemoryPlan(tuple(found.planned), "\n".join(found.lines()), found.fits, found.time)


def export(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str = "bfloat16",
    trust_remote_code: bool = False,
    adapter_alone: bool = False,
    model: str | Path | None = None,
) -> Path:
    """Write a checkpoint, or the last one of a run's directory, as a Hugging Face directory; give the checkpoint. An
    adapter is merged into its model (`model`: where that is now), or with `adapter_alone` written as peft does."""
    return export_here(
        Path(source),
        Path(output),
        dtype,
        trust_remote_code,
        model=None if model is None else Path(model),
        adapter_alone=adapter_alone,
    )
