"""The possible causes of a gap between the sampler's and the trainer's log-probs. Each is tried by changing it alone.

A cause is judged by the gap that remains after the change: the mean of |log π - log π_sampler| over all labels.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from truestep.config.schema import Config
from truestep.config.sections import AdapterConfig
from truestep.model.adapter_files import is_adapter
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.ranks.group import ALONE
from truestep.run.assemble.policy import make_policy
from truestep.tools.parity.scores import score, score_after_stale_prompt
from truestep.types import ROUTES, Rollout
from truestep.weights.errors import ModelError

# share of the gap that may remain after shifting experts by a token, which loses those of the first or last token
_FEW = 0.2


@dataclass(frozen=True)
class Tried:
    """A possible cause, the change that was tried, and the remaining log-ratios."""

    cause: str
    switch: str
    advice: str
    left: np.ndarray  # [T] log-ratios with the change; NaN: undefined

    @property
    def gap(self) -> float:
        """The mean absolute log-ratio that remains."""
        return float(self._sizes.mean()) if len(self._sizes) else float("inf")

    @property
    def worst(self) -> float:
        return float(self._sizes.max()) if len(self._sizes) else float("inf")

    @property
    def _sizes(self) -> np.ndarray:
        return np.abs(self.left[np.isfinite(self.left)])


class Trial:
    """Tries all causes on documents with the sampler's log-probs. `older`: directories of older weights."""

    def __init__(self, config: Config, policy: Policy, documents: Sequence[Rollout], older: Sequence[Path]):
        self._config, self._policy, self.documents, self._older = config, policy, documents, older
        self._budget = config.data.tokens_per_microbatch
        self._by_document = [  # every document here has log-probs
            document.logprobs[document.loss_mask].astype(np.float64)
            for document in documents
            if document.logprobs is not None
        ]
        self.sampler = np.concatenate(self._by_document)
        self._wide = score(policy, documents, self._budget, wide=True)
        self.plain = self._wide.plain
        self.base = Tried("as it is", "nothing", "", self.plain - self.sampler)
        self.entropy = self._wide.entropy

    def leave_out(self, labels: np.ndarray) -> None:
        """Leave labels [T] out of all gaps."""
        self.sampler[labels] = np.nan
        parts = np.cumsum([len(values) for values in self._by_document])[:-1]
        self._by_document = np.split(self.sampler, parts)
        self.base = replace(self.base, left=np.where(labels, np.nan, self.base.left))

    def all(self, wanted: Callable[[str], bool] = lambda kind: True) -> Iterator[Tried]:
        """Try the causes of each kind that is wanted, which is asked when its turn comes."""
        kinds = {
            "temperature": self.temperatures,
            "truncation": self._truncation,
            "token ids": self._tokens,
            "routing": self._routing,
            "head": self._head,
            "type": self._dtype,
            "weights": self._weights,
            "positions": self._rope,
        }
        with progress.working("tried", "causes", len(kinds)):
            for name, tries in kinds.items():
                if wanted(name):
                    progress.phase(f"trying what explains the gap ({name})")
                    yield from tries()
                progress.made("causes")

    def _tried(self, cause: str, switch: str, advice: str, logprobs: np.ndarray) -> Tried:
        return Tried(cause, switch, advice, logprobs - self.sampler)

    def temperatures(self) -> Iterator[Tried]:
        for value, logprobs in self._wide.by_temperature.items():
            if all(abs(document.temperature - value) < 1e-6 for document in self.documents):
                continue
            advice = (
                f"the sampler's log-probs are those of temperature {value:g}: record that temperature, or have the "
                "sampler report log-probs after its temperature (vLLM: --logprobs-mode processed_logprobs)"
            )
            yield self._tried("temperature", f"temperature {value:g}", advice, logprobs)

    def _truncation(self) -> Iterator[Tried]:
        for value, logprobs in self._wide.by_top_p.items():
            advice = (
                f"the sampler reports log-probs after truncation by top-p {value:g}: set top_p to 1, or report those "
                "of the whole distribution"
            )
            yield self._tried("top-p", f"renormalised after top-p {value:g}", advice, logprobs)
        for count, logprobs in self._wide.by_top_k.items():
            advice = f"the sampler reports log-probs after truncation by top-k {count}: set top_k off, or report all"
            yield self._tried("top-k", f"renormalised after top-k {count}", advice, logprobs)

    def _tokens(self) -> Iterator[Tried]:
        for by in (1, -1):
            moved = np.concatenate([_shifted(logprobs, by) for logprobs in self._by_document])
            side = "late" if by > 0 else "early"
            advice = (
                f"the records' log-probs stand one label too {side}: write each beside the token that it is the "
                "log-prob of"
            )
            yield Tried("token ids shifted", f"log-probs moved by {-by:+d}", advice, self._wide.plain - moved)
        if self._policy.tokenizer is not None:
            others = [self._retokenised(document) for document in self.documents]
            if any(other is not None for other in others):
                documents = [other or document for other, document in zip(others, self.documents, strict=True)]
                advice = (
                    "the log-probs are of the text tokenised anew, not of the ids in the records: record the ids that "
                    "the sampler drew, and never tokenise a completion again"
                )
                logprobs = score(self._policy, documents, self._budget).plain
                yield self._tried("token ids re-tokenised", "completions tokenised anew", advice, logprobs)

    def _retokenised(self, document: Rollout) -> Rollout | None:
        """Decode the completion and tokenise its text again. Return None if the tokens are the same, or if their number
        changes."""
        labels = np.flatnonzero(document.loss_mask)
        if not len(labels):
            return None
        ids, prompt, tokenizer = document.input_ids.tolist(), int(labels[0]), self._policy.tokenizer
        text = tokenizer.decode(ids[prompt:], skip_special_tokens=False)
        again = [*ids[:prompt], *tokenizer.encode(text, add_special_tokens=False)]
        if len(again) != len(ids) or again == ids:
            return None
        return replace(document, input_ids=np.array(again, dtype=np.int64))

    def _routing(self) -> Iterator[Tried]:
        """Score the documents with other experts than before: the records', shifted ones, or the routers' own."""
        if not any(ROUTES in document.token_fields for document in self.documents):
            return
        if not self._policy.token_fields:
            experts = self._config.model.experts.model_copy(update={"replay": "auto"})
            config = self._config.model_copy(
                update={"model": self._config.model.model_copy(update={"experts": experts})}
            )
            if (policy := _load(config, self._policy.path)) and policy.token_fields:
                advice = "the sampler routed tokens to other experts: set model.experts.replay: auto"
                logprobs = score(policy, self.documents, self._budget).plain
                yield self._tried("routing", "the records' experts replayed", advice, logprobs)
            return
        for by in (1, -1):
            moved = [_with_routes_moved(document, by) for document in self.documents]
            advice = (
                f"the records name experts one token too {'early' if by > 0 else 'late'}: row t of routed_experts has "
                "those of the token at position t, as it was fed"
            )
            tried = self._tried("routing", f"experts moved by {by:+d}", advice, self._scored(moved))
            yield tried
            # do not try the routers' own choice: with the same weights it would fit too
            if tried.gap < _FEW * self.base.gap:
                return
        advice = (
            "the sampler did not use the experts that the records name: they are of other tokens, layers or weights. "
            "model.experts.replay: off does not read them"
        )
        without = [replace(document, token_fields={}) for document in self.documents]
        yield self._tried("routing", "the policy's own experts", advice, self._scored(without))

    def _scored(self, documents: Sequence[Rollout]) -> np.ndarray:
        return score(self._policy, documents, self._budget).plain

    def _head(self) -> Iterator[Tried]:
        if self._config.model.dtype == "float32":
            return
        fp32 = self._policy.head.fp32
        advice = (
            f"the sampler's LM head {'rounds logits to bfloat16' if fp32 else 'keeps logits in float32'} and the "
            f"trainer's does not: set model.head.fp32_lm_head: {str(not fp32).lower()}, or change the sampler"
        )
        switched = score(self._policy, self.documents, self._budget, head=replace(self._policy.head, fp32=not fp32))
        yield self._tried("head rounding", f"fp32_lm_head: {str(not fp32).lower()}", advice, switched.plain)

    def _dtype(self) -> Iterator[Tried]:
        other = "bfloat16" if self._config.model.dtype == "float32" else "float32"
        if policy := _load(self._config, self._policy.path, dtype=other):
            advice = f"the sampler computes in {other}: run both in one type (model.dtype, or vLLM's --dtype)"
            logprobs = score(policy, self.documents, self._budget).plain
            yield self._tried("compute dtype", f"dtype: {other}", advice, logprobs)

    def _weights(self) -> Iterator[Tried]:
        for path in self._older:
            if policy := _load_weights(self._config, path):
                advice = f"the sampler still has the weights of {path}: sync them before it goes on"
                logprobs = score(policy, self.documents, self._budget).plain
                yield self._tried("stale weights", f"weights of {path.name}", advice, logprobs)
                advice = (
                    "the sampler's prefix cache holds prompts as older weights saw them: reset it after each sync "
                    "(vLLM: POST /reset_prefix_cache)"
                )
                logprobs = score_after_stale_prompt(policy, self._policy, self.documents)
                yield self._tried("stale prefix cache", f"prompts cached by {path.name}", advice, logprobs)

    def _rope(self) -> Iterator[Tried]:
        for switch, change in _rope_variants(self._policy.path):
            with _changed_copy(self._policy.path, change) as directory:
                if policy := _load(self._config, directory):
                    advice = (
                        f"the sampler's rotary embedding is another ({switch}): serve the config.json that is trained, "
                        "without an override of rope settings"
                    )
                    logprobs = score(policy, self.documents, self._budget).plain
                    yield self._tried("rope settings", switch, advice, logprobs)


def _shifted(logprobs: np.ndarray, by: int) -> np.ndarray:
    """Shift a document's log-probs by one label, earlier (`by` 1) or later (-1), and fill the gap with NaN."""
    moved = np.roll(logprobs, -by)
    moved[slice(-1, None) if by > 0 else slice(1)] = np.nan
    return moved


def _with_routes_moved(document: Rollout, by: int) -> Rollout:
    """Move a document's experts by one token, later (`by` 1) or earlier (-1)."""
    routes = document.token_fields.get(ROUTES)
    if routes is None:
        return document
    moved = np.concatenate([routes[:1], routes[: document.num_tokens - 1]]) if by > 0 else routes[1:]
    return replace(document, token_fields={**document.token_fields, ROUTES: moved})


def _load(config: Config, path: Path, dtype: str | None = None) -> Policy | None:
    """Load a model from another directory or in another dtype, with the adapter if there is one. Return None if it
    cannot be loaded."""
    changes = {"path": str(path)} | ({} if dtype is None else {"dtype": dtype})
    try:
        return make_policy(config.model_copy(update={"model": config.model.model_copy(update=changes)}), ALONE)
    except ModelError:
        return None


def _load_weights(config: Config, path: Path) -> Policy | None:
    """Load other weights: a whole model, or another adapter for the same model. Return None if they cannot be
    loaded."""
    if not is_adapter(path):
        return _load(config.model_copy(update={"adapter": None}), path)
    adapter = AdapterConfig(path=str(path))
    return _load(config.model_copy(update={"adapter": adapter}), Path(config.model.path))


def _rope_variants(model: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield RoPE settings that servers are known to override or ignore: a description, and the changes to
    config.json."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", (config.get("rope_scaling") or {}).get("rope_type", "default"))
    plain = {"rope_type": "default", "rope_theta": theta}
    if kind != "default":
        yield f"rope_type: default for {kind}", {"rope_parameters": plain, "rope_scaling": None}
    for other in (10000.0, 500000.0, 1000000.0):
        if other != theta:
            changed = {**(rope or plain), "rope_theta": other}
            yield f"rope_theta: {other:g} for {theta:g}", {"rope_parameters": changed, "rope_theta": other}
    for factor in (2.0, 4.0):
        scaled = {"rope_type": "linear", "factor": factor, "rope_theta": theta}
        yield f"positions divided by {factor:g}", {"rope_parameters": scaled, "rope_scaling": None}


@contextlib.contextmanager
def _changed_copy(model: Path, change: dict[str, Any]) -> Iterator[Path]:
    """Yield a temporary directory with links to the model's files and a changed config.json."""
    with tempfile.TemporaryDirectory(prefix="truestep-parity-") as folder:
        copy = Path(folder) / "model"
        copy.mkdir()
        for file in model.iterdir():
            if file.is_file() and file.name != "config.json":
                os.symlink(file.resolve(), copy / file.name)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config |= {name: value for name, value in change.items() if name in config or value is not None}
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield copy
