"""Log-probs of documents' labels as the trainer gives them, and as it would with one thing switched.

Dimensions: T labels of all documents, in order; C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from truestep.head.logits import HeadSettings, scaled_logits
from truestep.policy.policy import Policy
from truestep.rollouts.packing import fill_in_order, pack
from truestep.types import Rollout

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
TOP_PS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
_ROWS = 256  # of logits at a time


@dataclass(frozen=True)
class Scores:
    plain: np.ndarray  # [T] float64
    by_temperature: Mapping[float, np.ndarray]  # sampled at this one, whatever the record says
    by_top_p: Mapping[float, np.ndarray]  # of the distribution that nucleus sampling leaves


def score(
    policy: Policy, documents: Sequence[Rollout], budget: int, *, wide: bool = False, head: HeadSettings | None = None
) -> Scores:
    """`wide`: also at other temperatures and after nucleus sampling."""
    settings = head or policy.head
    temperatures = TEMPERATURES if wide else ()
    top_ps = TOP_PS if wide else ()
    parts: dict[tuple[str, float], list[np.ndarray]] = {}
    with torch.no_grad():
        for members in fill_in_order([document.num_tokens for document in documents], budget):
            batch = pack([documents[index] for index in members]).to(policy.device)
            packed = batch.labels
            rows = policy.hidden(batch.tokens).index_select(0, packed.rows)
            for start in range(0, len(rows), _ROWS):
                chunk = slice(start, start + _ROWS)
                z = scaled_logits(rows[chunk], policy.head_weight, packed.temperature[chunk], settings).double()
                labels, given = packed.ids[chunk, None], packed.temperature[chunk].double()
                parts.setdefault(("plain", 0.0), []).append(_of_label(z, labels))
                for value in temperatures:
                    parts.setdefault(("temperature", value), []).append(_of_label(z * (given / value)[:, None], labels))
                if top_ps:
                    _nucleus(z, labels, top_ps, parts)
    joined = {key: np.concatenate(arrays) for key, arrays in parts.items()}
    return Scores(
        joined.get(("plain", 0.0), np.zeros(0)),
        {value: joined["temperature", value] for value in temperatures if ("temperature", value) in joined},
        {value: joined["top_p", value] for value in top_ps if ("top_p", value) in joined},
    )


def _of_label(z: torch.Tensor, labels: torch.Tensor) -> np.ndarray:  # [C, V], [C, 1] -> [C]
    return (z.gather(-1, labels).squeeze(-1) - z.logsumexp(-1)).cpu().numpy()


def _nucleus(
    z: torch.Tensor, labels: torch.Tensor, top_ps: Sequence[float], parts: dict[tuple[str, float], list[np.ndarray]]
) -> None:
    p = z.softmax(-1)
    ordered = p.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    plain = p.gather(-1, labels).squeeze(-1).log()
    for value in top_ps:
        surviving = torch.where(before < value, ordered, 0.0).sum(-1)  # the token that crosses it included
        parts.setdefault(("top_p", value), []).append((plain - surviving.log()).cpu().numpy())


def score_after_stale_prompt(old: Policy, new: Policy, documents: Sequence[Rollout]) -> np.ndarray:  # [T]
    """The prompt's keys and values are those of the old weights, as a prefix cache that was not reset holds them."""
    parts = []
    with torch.no_grad(), old.plain_attention(), new.plain_attention():
        for document in documents:
            labels = np.flatnonzero(document.loss_mask)
            if not len(labels):
                continue
            ids = torch.from_numpy(document.input_ids)[None].to(new.device)
            # The last token before the first label is computed anew: it is what the first label is drawn from.
            prompt = max(0, int(labels[0]) - 1)
            cache = None
            if prompt:
                cache = old.model.base_model(input_ids=ids[:, :prompt], use_cache=True).past_key_values
            output = new.model.base_model(input_ids=ids[:, prompt:], past_key_values=cache, use_cache=True)
            rows = output.last_hidden_state[0, torch.from_numpy(labels - 1 - prompt).to(new.device)]
            temperature = torch.full((len(rows),), document.temperature, device=new.device)
            z = scaled_logits(rows, new.head_weight, temperature, new.head).double()
            parts.append(_of_label(z, ids[0, torch.from_numpy(labels).to(new.device)][:, None]))
    return np.concatenate(parts) if parts else np.zeros(0)


def shifted(document: Rollout, by: int) -> np.ndarray | None:
    """The sampler's log-probs of this document's labels, if they had been written `by` places off; NaN where none."""
    if document.logprobs is None:
        return None
    values = document.logprobs[document.loss_mask].astype(np.float64)
    moved = np.full_like(values, np.nan)
    if by > 0:
        moved[:-by] = values[by:]
    else:
        moved[-by:] = values[:by]
    return moved


def retokenised(document: Rollout, ids: Sequence[int]) -> Rollout | None:
    """The same text by other tokens, where there are as many; None where not, or where they are the same."""
    if len(ids) != document.num_tokens or list(ids) == document.input_ids.tolist():
        return None
    return replace(document, input_ids=np.array(ids, dtype=np.int64))
