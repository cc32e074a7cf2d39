"""The trainer's log-probs of documents' labels, as configured and with one setting changed.

Dimensions: T labels of all documents, in order; C rows of a chunk; V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from truestep.head.logits import HeadSettings, scaled_logits
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.rollouts.packing import fill_in_order, pack
from truestep.types import Rollout

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
TOP_PS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
TOP_KS = (1, 5, 10, 20, 40, 50, 100)
_ROWS = 256  # rows of logits in memory at a time


@dataclass(frozen=True)
class Scores:
    plain: np.ndarray  # [T] float64
    by_temperature: Mapping[float, np.ndarray]  # at other temperatures instead of the record's
    by_top_p: Mapping[float, np.ndarray]  # renormalised after truncation by this top-p
    by_top_k: Mapping[int, np.ndarray]
    entropy: np.ndarray | None  # [T] at the record's temperature; None unless `wide`


def score(
    policy: Policy, documents: Sequence[Rollout], budget: int, *, wide: bool = False, head: HeadSettings | None = None
) -> Scores:
    """Compute the log-probs of all labels. `wide`: also with other temperatures and after truncation, and the
    entropies."""
    plain: list[np.ndarray] = []
    by_temperature: dict[float, list[np.ndarray]] = defaultdict(list)
    by_top_p: dict[float, list[np.ndarray]] = defaultdict(list)
    by_top_k: dict[int, list[np.ndarray]] = defaultdict(list)
    entropy: list[np.ndarray] = []
    batches = list(fill_in_order([document.num_tokens for document in documents], budget))
    with torch.no_grad(), progress.working("scoring", "micro-batches", len(batches)):
        for members in batches:
            some = [documents[index] for index in members]
            batch = pack(some, of_tokens=policy.token_fields).to(policy.device)
            packed = batch.labels
            with policy.replaying(batch.tokens):
                rows = policy.hidden(batch.tokens).index_select(0, packed.rows)
            for start in range(0, len(rows), _ROWS):
                chunk = slice(start, start + _ROWS)
                z = scaled_logits(rows[chunk], policy.head_weight, packed.temperature[chunk], head or policy.head)
                z, labels = z.to(torch.promote_types(z.dtype, torch.float32)), packed.ids[chunk, None]
                z = z - z.amax(-1, keepdim=True)  # so that float32 has the small differences
                plain.append(own := _label_logprobs(z, labels))
                if wide:
                    recorded = packed.temperature[chunk, None]
                    for value in TEMPERATURES:
                        by_temperature[value].append(_label_logprobs(z * (recorded / value), labels))
                    p = z.softmax(-1)
                    entropy.append(torch.special.entr(p).sum(-1).cpu().numpy())
                    ordered = p.sort(dim=-1, descending=True).values
                    for value, mass in _nucleus_masses(ordered):
                        by_top_p[value].append(own - mass.log().cpu().numpy())
                    for count in TOP_KS:
                        mass = ordered[:, :count].sum(-1)
                        by_top_k[count].append(own - mass.log().cpu().numpy())
            progress.made("micro-batches")
    return Scores(
        np.concatenate([np.zeros(0), *plain]),
        {value: np.concatenate(arrays) for value, arrays in by_temperature.items()},
        {value: np.concatenate(arrays) for value, arrays in by_top_p.items()},
        {value: np.concatenate(arrays) for value, arrays in by_top_k.items()},
        np.concatenate([np.zeros(0), *entropy]) if wide else None,
    )


def _label_logprobs(z: torch.Tensor, labels: torch.Tensor) -> np.ndarray:  # [C, V], [C, 1] -> [C]
    return (z.gather(-1, labels).squeeze(-1) - z.logsumexp(-1)).double().cpu().numpy()


def _nucleus_masses(ordered: torch.Tensor) -> Iterator[tuple[float, torch.Tensor]]:
    before = ordered.cumsum(-1) - ordered
    for value in TOP_PS:
        yield value, torch.where(before < value, ordered, 0.0).sum(-1)  # includes the token that crosses the limit


def _states(policy: Policy, document: Rollout, run: slice, cache: Any) -> Any:
    """Compute the hidden states of part of a document's tokens after those in the cache, with the experts from its
    record."""
    tokens = pack([document], of_tokens=policy.token_fields).to(policy.device).tokens
    with policy.replaying(tokens, run):
        return policy.model.base_model(input_ids=tokens.input_ids[None, run], past_key_values=cache, use_cache=True)


def score_after_stale_prompt(old: Policy, new: Policy, documents: Sequence[Rollout]) -> np.ndarray:  # [T]
    """Score completions after a KV cache of the prompt that the old weights computed. A prefix cache that was not reset
    gives such log-probs."""
    parts = []
    with torch.no_grad(), old.plain_attention(), new.plain_attention():
        for document in documents:
            labels = np.flatnonzero(document.loss_mask)
            if not len(labels):
                continue
            ids = torch.from_numpy(document.input_ids)[None].to(new.device)
            # The new weights compute the last token before the first label, because its hidden state predicts the first
            # label.
            prompt = max(0, int(labels[0]) - 1)
            cache = _states(old, document, slice(0, prompt), None).past_key_values if prompt else None
            output = _states(new, document, slice(prompt, document.num_tokens), cache)
            rows = output.last_hidden_state[0, torch.from_numpy(labels - 1 - prompt).to(new.device)]
            temperature = torch.full((len(rows),), document.temperature, device=new.device)
            z = scaled_logits(rows, new.head_weight, temperature, new.head).double()
            parts.append(_label_logprobs(z, ids[0, torch.from_numpy(labels).to(new.device)][:, None]))
    return np.concatenate([np.zeros(0), *parts])
