"""Measures the gap between the sampler's and the trainer's log-probs on rollouts, and finds its cause."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from truestep.config.schema import Config
from truestep.config.sections import AdapterConfig, ServerSampler
from truestep.errors import TruestepError
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.ranks.group import ALONE, world_size
from truestep.run.assemble.policy import make_policy
from truestep.run.assemble.servers import server_maker
from truestep.run.assemble.sources import read_documents, replayed_by
from truestep.run.checkpoint.store import CheckpointStore
from truestep.run.directory import RunDirectory
from truestep.tools.parity.causes import Trial, Tried
from truestep.tools.parity.sample import sample
from truestep.types import Rollout, sequences_of

# The mean |log-ratio| from rounding alone, between two engines that compute the same model in the same dtype.
NOISE = {"float32": 1e-4, "bfloat16": 2e-2}
_EXPLAINS = 0.3  # a cause must explain at least this share of the gap; less is coincidence
_ALONE = 0.8  # a cause that explains a smaller share is not the only one
_NAMED = 0.5  # a gap below NOISE still counts if a cause explains more than this share of it
_NOTHING = 1e-5  # smaller gaps never count


class ParityError(TruestepError):
    pass


@dataclass(frozen=True)
class Token:
    """The label with the largest log-ratio."""

    document: str
    position: int
    token: int
    text: str
    sampler: float
    trainer: float


@dataclass(frozen=True)
class Parity:
    documents: int
    labels: int
    base: Tried
    tried: list[Tried]  # the best change for each cause, sorted by remaining gap
    worst: Token
    noise: float
    weights: Path  # directory of the trainer's weights: the run's last checkpoint, or model.path
    positions: np.ndarray  # [T] index of each label among its document's labels, from 0

    @property
    def fine(self) -> bool:
        """True if the gap is within rounding and no cause explains it."""
        named = any(self.explained(tried) > _NAMED for tried in self.tried)
        return self.base.gap <= self.noise and not (named and self.base.gap > _NOTHING)

    def explained(self, tried: Tried) -> float:
        """Return the fraction of the gap that a change removes."""
        return 1 - tried.gap / self.base.gap if self.base.gap else 0.0

    @property
    def verdict(self) -> str:
        gap = f"mean gap of {self.base.gap:.1e}"
        if self.fine:
            return f"the log-probs agree: the {gap} is that of rounding (up to {self.noise:g})"
        best = self.tried[0] if self.tried else None
        if best is None or self.explained(best) < _EXPLAINS:
            return f"a {gap} that no single cause explains: look at the worst token, and for a mixture of causes"
        if self.explained(best) < _ALONE:
            return (
                f"no single cause found for a {gap}: {best.cause} ({best.switch}) explains {self.explained(best):.0%} "
                f"of it, and something else the rest. Of this cause: {best.advice}"
            )
        return f"{best.cause} ({best.switch}) explains {self.explained(best):.0%} of the gap: {best.advice}"


def parity(config: Config, *, documents: int = 64, older: Sequence[Path] = ()) -> Parity:
    if world_size() > 1:
        raise ParityError("parity runs on one process: start it without torchrun")
    if isinstance(config.sampler, ServerSampler):
        if config.sampler.urls is None:
            raise ParityError("parity asks servers that run: give sampler.urls in place of sampler.start")
        server_maker(config.sampler)  # raises option errors before the model is loaded
    run = RunDirectory(Path(config.checkpoint.directory)) if config.checkpoint.directory else None
    checkpoints = [] if run is None else CheckpointStore(run.checkpoints, keep=1).complete()
    progress.phase("loading the model")
    policy = make_policy(config, ALONE, None if not checkpoints else str(checkpoints[-1]))
    if checkpoints and config.adapter is not None:
        config = config.model_copy(update={"adapter": AdapterConfig(path=str(checkpoints[-1]))})
    # Stale weights may be those of earlier checkpoints, or the run's initial weights.
    first = [Path(config.model.path)] if checkpoints or config.adapter is not None else []
    stale = [*older, *reversed(checkpoints[:-1]), *first]
    progress.phase("sampling rollouts" if config.sampler is not None else "reading rollouts")
    chosen = _documents(config, policy, documents)
    progress.phase("scoring rollouts")
    trial = Trial(config, policy, chosen, stale)
    best: dict[str, Tried] = {}
    for tried in trial.all():
        if tried.cause not in best or tried.gap < best[tried.cause].gap:
            best[tried.cause] = tried
    positions = np.concatenate([np.arange(document.num_labels) for document in chosen])
    return Parity(
        documents=len(chosen),
        labels=len(trial.sampler),
        base=trial.base,
        tried=sorted(best.values(), key=lambda tried: tried.gap),
        worst=_worst(chosen, trial, policy),
        noise=NOISE[config.model.dtype],
        weights=policy.path,
        positions=positions,
    )


def _documents(config: Config, policy: Policy, count: int) -> list[Rollout]:
    if config.sampler is not None:
        sampled = sample(config, config.sampler, policy, count)
        if not sampled:
            raise ParityError("sampler.urls: the servers aborted every completion: nothing can be compared")
        return sampled
    if config.data.path is None:
        raise ParityError("parity needs rollouts with the sampler's log-probs (data.path), or a sampler to ask")
    found = read_documents(config, policy.vocabulary_size, routes=replayed_by(config, policy))
    documents = sequences_of(found.rollouts)
    chosen = [document for document in documents if document.logprobs is not None and document.num_labels][:count]
    if not chosen:
        raise ParityError(f"no record of {config.data.path} has both labels and log-probs")
    return chosen


def _worst(documents: Sequence[Rollout], trial: Trial, policy: Policy) -> Token:
    index = int(np.abs(trial.base.left).argmax())
    labels = [(document, position) for document in documents for position in np.flatnonzero(document.loss_mask)]
    document, position = labels[index]
    token = int(document.input_ids[position])
    text = "" if policy.tokenizer is None else policy.tokenizer.decode([token])
    sampler = float(trial.sampler[index])
    return Token(document.id, int(position), token, text, sampler, sampler + float(trial.base.left[index]))
