"""`truestep parity`: rollouts from files, or sampled; the gap; its causes, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from truestep.assemble.policy import make_policy
from truestep.assemble.sources import read_documents, server_maker
from truestep.checkpoint.store import CheckpointStore
from truestep.config.schema import Config
from truestep.config.sections import ServerSampler
from truestep.errors import TruestepError
from truestep.parity.causes import Trial, Tried
from truestep.parity.sample import sample
from truestep.policy.policy import Policy
from truestep.ranks.group import ALONE, world_size
from truestep.run_directory import RunDirectory
from truestep.types import Rollout

# Mean |log-ratio| that rounding alone gives, of two engines that compute the same thing in the same type.
NOISE = {"float32": 1e-4, "bfloat16": 2e-2}
_EXPLAINS = 0.3  # of the gap: less is a coincidence
_NAMED = 0.5  # of a gap as small as rounding's
_NOTHING = 1e-5


class ParityError(TruestepError):
    pass


@dataclass(frozen=True)
class Token:
    """The label whose log-ratio is the largest."""

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
    tried: list[Tried]  # one for each cause, its best switch; what leaves the least gap first
    worst: Token
    noise: float
    positions: np.ndarray  # [T] of each label among its document's labels, from 0

    @property
    def fine(self) -> bool:
        """No more than rounding, and none of it has a name."""
        named = any(self.explained(tried) > _NAMED for tried in self.tried)
        return self.base.gap <= self.noise and not (named and self.base.gap > _NOTHING)

    def explained(self, tried: Tried) -> float:
        """The share of the gap that is gone."""
        return 1 - tried.gap / self.base.gap if self.base.gap else 0.0

    @property
    def verdict(self) -> str:
        if self.fine:
            return (
                f"the log-probs agree: the mean gap of {self.base.gap:.1e} is that of rounding (up to {self.noise:g})"
            )
        best = self.tried[0] if self.tried else None
        if best is None or self.explained(best) < _EXPLAINS:
            return (
                f"a mean gap of {self.base.gap:.1e} that no single cause explains: look at the worst token, and for a "
                "mixture of causes"
            )
        return f"{best.cause} ({best.switch}) explains {self.explained(best):.0%} of the gap: {best.advice}"


def parity(config: Config, *, documents: int = 64, older: Sequence[Path] = ()) -> Parity:
    if world_size() > 1:
        raise ParityError("parity runs on one process: start it without torchrun")
    if isinstance(config.sampler, ServerSampler):
        server_maker(config.sampler)  # what can be wrong without the model
    run = RunDirectory(Path(config.checkpoint.directory)) if config.checkpoint.directory else None
    checkpoints = [] if run is None else CheckpointStore(run.checkpoints, keep=1).complete()
    policy = make_policy(config, ALONE, None if not checkpoints else str(checkpoints[-1]))
    # Besides what is asked for: the run's checkpoints before its last, and what it began with.
    before = [*older, *reversed(checkpoints[:-1]), *([Path(config.model.path)] if checkpoints else [])]
    chosen = _documents(config, policy, documents)
    trial = Trial(config, policy, chosen, before)
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
    known = read_documents(config, policy.vocabulary_size).rollouts
    chosen = [document for document in known if document.logprobs is not None and document.num_labels][:count]
    if not chosen:
        raise ParityError(f"no record of {config.data.path} has both labels and log-probs")
    return chosen


def _worst(documents: Sequence[Rollout], trial: Trial, policy: Policy) -> Token:
    at = int(np.abs(trial.base.left).argmax())
    for document in documents:
        if at < document.num_labels:
            break
        at -= document.num_labels
    position = int(np.flatnonzero(document.loss_mask)[at])
    token = int(document.input_ids[position])
    index = int(np.abs(trial.base.left).argmax())
    text = "" if policy.tokenizer is None else policy.tokenizer.decode([token])
    sampler = float(trial.sampler[index])
    return Token(document.id, position, token, text, sampler, sampler + float(trial.base.left[index]))


def as_json(result: Parity) -> dict[str, Any]:
    return {
        "documents": result.documents,
        "labels": result.labels,
        "mean_gap": result.base.gap,
        "largest_gap": result.base.worst,
        "rounding_alone": result.noise,
        "verdict": result.verdict,
        "worst_token": vars(result.worst),
        "causes": [
            {
                "cause": tried.cause,
                "switch": tried.switch,
                "mean_gap_left": tried.gap,
                "largest_gap_left": tried.worst,
                "explained": result.explained(tried),
                "advice": tried.advice,
            }
            for tried in result.tried
        ],
    }
