"""Scores some of a dump's tokens with a model, and finds the cause of a gap as `parity` does."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from truestep.config.schema import Config
from truestep.files.bounded import read_settings
from truestep.generate.read import stop_ids
from truestep.model.adapter_files import is_adapter
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.ranks.group import ALONE
from truestep.run.assemble.policy import make_policy
from truestep.tools.audit.finding import Evidence, sure
from truestep.tools.audit.opening import UnreadableError
from truestep.tools.audit.samples import Dump, Sample, at_ends
from truestep.tools.parity.causes import Trial, Tried
from truestep.tools.parity.gap import NOISE
from truestep.tools.parity.scores import TEMPERATURES, score
from truestep.types import ROUTES, Rollout

# most tokens to score; most labels for which every cause is tried; most tokens of one sample
TOKENS, WIDE, LONGEST = 20_000, 1_500, 4_096
_BUDGET = 4_096  # tokens of a micro-batch
# share of a gap that a cause must explain; smallest gap to report and smallest gap of high confidence, in nats
EXPLAINS, SOME, LARGE = 0.5, 1e-3, 0.1
_FINDINGS = {  # keys are `parity`'s names of causes
    "temperature": "logprob-temperature",
    "top-p": "logprob-truncated",
    "top-k": "logprob-truncated",
    "token ids shifted": "logprob-shifted",
    "token ids re-tokenised": "retokenised",
    "routing": "routes-shifted",
    "head rounding": "numerics",
    "compute dtype": "numerics",
    "rope settings": "numerics",
    "stale weights": "logprob-weights",
    "stale prefix cache": "logprob-weights",
}
_ALWAYS = ("temperature", "truncation", "token ids", "routing", "weights")  # kinds of causes, as `parity` calls them


class Scorer:
    """Scores a dump with a model."""

    def __init__(self, path: Path) -> None:
        model: dict[str, Any] = {"path": str(path), "dtype": "float32", "head": {"fp32_lm_head": True}}
        extra: dict[str, Any] = {}
        self._older: list[Path] = []
        if is_adapter(path):
            base = json.loads(read_settings(path / "adapter_config.json")).get("base_model_name_or_path")
            if not isinstance(base, str) or not Path(base).is_dir():
                raise UnreadableError(f"--model {path}: the model of this adapter is not at {base!r}")
            model["path"], extra["adapter"], self._older = base, {"path": str(path)}, [Path(base)]
        self._config = Config(model=model, data={"path": "dump.jsonl"}, **extra)
        progress.phase("loading the model")
        self.policy: Policy = make_policy(self._config, ALONE)

    def known(self, dump: Dump) -> Dump:
        """Return the dump with the model's end tokens and vocabulary size."""
        return replace(dump, end_tokens=stop_ids(self.policy), vocabulary_size=self.policy.vocabulary_size)

    def score(self, dump: Dump) -> tuple[Dump, list[Evidence], int]:
        """Score some of the tokens. Return the dump with the model's log-probs, the causes that explain a gap, and the
        number of scored labels."""
        chosen = choose(dump, self.policy.vocabulary_size)
        if not chosen:
            return dump, [], 0
        documents = [self._document(dump.samples[index]) for index in chosen]
        most, few = 0, 0
        for few, document in enumerate(documents, start=1):  # noqa: B007 - the count is used
            most += document.num_labels
            if most >= WIDE:
                break
        progress.phase("scoring tokens, and trying what explains a gap")
        trial = self._trial(documents[:few])
        if (value := self._fitted(trial, [dump.samples[index] for index in chosen[:few]])) is not None:
            documents = [replace(document, temperature=value) for document in documents]
            trial = self._trial(documents[:few])
        progress.phase("scoring tokens")
        rest = score(self.policy, documents[few:], _BUDGET).plain
        values = np.concatenate([trial.plain, rest])
        samples = list(dump.samples)
        entropy, start = trial.entropy, 0
        for number, (index, document) in enumerate(zip(chosen, documents, strict=True)):
            stop = start + document.num_labels
            with_entropy = entropy[start:stop] if number < few and entropy is not None else None
            samples[index] = _with(dump.samples[index], document, values[start:stop], with_entropy)
            start = stop
        return replace(dump, samples=samples), list(self._causes(trial, chosen)), start

    def _trial(self, documents: Sequence[Rollout]) -> Trial:
        """Make a trial without the last labels whose log-probs are exactly 0: these may be forced ends, which say
        nothing about the others."""
        trial = Trial(self._config, self.policy, documents, self._older)
        trial.leave_out(at_ends(trial.sampler == 0, np.array([document.num_labels for document in documents])))
        return trial

    def _document(self, one: Sample) -> Rollout:
        assert one.ids is not None and one.mask is not None and one.logprobs is not None
        ids, mask = one.ids[:LONGEST], one.mask[:LONGEST].copy()
        logprobs = one.logprobs[:LONGEST]
        mask &= np.isfinite(logprobs)
        mask[0] = False
        routes = {} if one.routes is None or not self.policy.token_fields else {ROUTES: one.routes[:LONGEST]}
        return Rollout(
            one.id, ids, mask, np.where(mask, logprobs, 0).astype(np.float32), temperature=one.temperature or 1.0,
            token_fields=routes,
        )  # fmt: skip

    def _fitted(self, trial: Trial, samples: Sequence[Sample]) -> float | None:
        """Return the temperature at which the model's log-probs fit, if it is not 1 and the dump does not name one."""
        if any(one.temperature is not None for one in samples):
            return None
        tried = {one.gap: one.switch for one in trial.temperatures()}
        best = min(tried, default=np.inf)
        if best > min(NOISE["bfloat16"], 0.2 * trial.base.gap):
            return None
        return next(value for value in TEMPERATURES if tried[best] == f"temperature {value:g}")

    def _causes(self, trial: Trial, chosen: Sequence[int]) -> Iterator[Evidence]:
        base, noise = trial.base, NOISE["bfloat16"]
        best: Tried | None = None
        if not np.isfinite(base.left).any():
            return
        worst = int(np.nanargmax(np.abs(base.left)))

        def wanted(kind: str) -> bool:
            """Causes that need another load of the model are tried if the gap needs an explanation."""
            enough = best is not None and (base.gap <= noise or _explained(best, base) > 0.9)
            return kind in _ALWAYS or not enough

        for tried in trial.all(wanted):
            if tried.cause == "stale weights" and np.nanmax(np.abs(tried.left - base.left)) < 1e-6:
                yield Evidence(
                    chosen[0], "the adapter changes no log-prob of its model", len(chosen), name="weights-never-changed"
                )
            best = tried if best is None or tried.gap < best.gap else best
        if best is None or base.gap <= SOME:
            return
        index, position = _label(trial, worst)
        sampler, ours = trial.sampler[worst], trial.sampler[worst] + base.left[worst]
        text = (
            f"a mean gap of {base.gap:.2g} over {np.isfinite(base.left).sum():,} labels; here the sampler has "
            f"{sampler:.4f}, the model {ours:.4f}"
        )
        share = _explained(best, base)
        if share > EXPLAINS:
            confidence = sure(share > 0.8 and _FINDINGS[best.cause] != "numerics")
            text = f"{best.cause} ({best.switch}) explains {share:.0%} of {text}"
            yield Evidence(chosen[index], text, len(chosen), position, confidence, _FINDINGS[best.cause])
        elif base.gap > 1.5 * noise:
            confidence = sure(base.gap > LARGE)
            yield Evidence(chosen[index], f"{text}; no other cause explains it", len(chosen), position, confidence,
                           "logprob-weights")  # fmt: skip


def _explained(tried: Tried, base: Tried) -> float:
    return 1 - tried.gap / base.gap if base.gap else 0.0


def _label(trial: Trial, number: int) -> tuple[int, int]:
    """Return the index of a label's document, and the label's position in it."""
    for index, document in enumerate(trial.documents):
        if number < document.num_labels:
            return index, int(np.flatnonzero(document.loss_mask)[number])
        number -= document.num_labels
    raise IndexError(number)


def choose(dump: Dump, vocabulary_size: int) -> list[int]:
    """Choose random samples with labels and log-probs, of about `TOKENS` tokens together."""
    chosen, left = [], TOKENS
    for index in np.random.default_rng(0).permutation(len(dump.samples)):
        one = dump.samples[index]
        if one.ids is None or one.mask is None or one.logprobs is None or not one.mask[1:LONGEST].any():
            continue
        if one.ids.min() < 0 or one.ids.max() >= vocabulary_size or not np.isfinite(one.logprobs[one.mask]).any():
            continue
        chosen.append(int(index))
        left -= min(len(one.ids), LONGEST)
        if left <= 0:
            break
    return chosen


def _with(one: Sample, document: Rollout, values: np.ndarray, entropy: np.ndarray | None) -> Sample:
    """Return a sample with the model's log-probs as those of the trainer, and the model's entropy alone."""
    assert one.ids is not None
    places = np.flatnonzero(document.loss_mask)
    trainer, entropies = np.full(len(one.ids), np.nan), np.full(len(one.ids), np.nan)
    trainer[places] = values
    if entropy is not None:
        entropies[places] = entropy
    return replace(one, trainer=trainer, entropy=entropies, mean_entropy=None)
