"""truestep's own records (docs/rollouts.md) and the rollouts that a run keeps (rollouts/steps-*.parquet)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from truestep.rollouts.fields import TABLE
from truestep.rollouts.kept.reader import cut
from truestep.rollouts.kept.rows import NAME
from truestep.rollouts.rows import read_rows
from truestep.rollouts.values import BadRecord
from truestep.tools.audit.formats.arrays import Fit, array, number, score, text, whole
from truestep.tools.audit.kept import RECORDS
from truestep.tools.audit.opening import UnreadableError
from truestep.tools.audit.samples import Sample
from truestep.types import ROUTES

_ROUTES = next(field for field in TABLE if field.name == ROUTES)


def fits_record(record: Mapping[str, Any]) -> bool:
    return "input_ids" in record and ("loss_mask" in record or "prompt_length" in record)


def samples_of_record(record: Mapping[str, Any], file: str, line: int) -> Iterator[Sample]:
    ids = array(record["input_ids"], "input_ids", np.int64)
    if ids is None or not len(ids):
        raise UnreadableError(f"{file}:{line}: input_ids is empty")
    fit = Fit(len(ids))
    mask = fit.whole(array(record.get("loss_mask"), "loss_mask", np.bool_), "loss_mask")
    if mask is None and (length := whole(record.get("prompt_length"))) is not None:
        mask = np.arange(len(ids)) >= length
    logprobs = fit.at(array(record.get("logprobs"), "logprobs"), "logprobs", mask)
    document = text(record.get("document_id"))
    several = document is not None and (whole(record.get("sequences")) or 1) > 1
    group, version = text(record.get("group_id")), record.get("model_version")
    versions = array(version if isinstance(version, list) else None, "model_version")
    yield Sample(
        file,
        line,
        text(record.get("id")) or "",
        ids,
        mask,
        logprobs,
        advantages=per_label(record.get("advantage"), mask, fit),
        reward=score(record.get("reward")),
        parts=parts(record.get("rewards")),
        group=None if several else group,
        part_of=(document, group) if several and document is not None and group is not None else None,
        step=whole(record.get("step")),
        version=whole(version) if versions is None else whole(versions[-1]),
        truncated=record.get("truncated") if isinstance(record.get("truncated"), bool) else None,
        temperature=number(record.get("temperature")),
        routes=routes(record.get("routed_experts"), len(ids), fit),
        document=cut(name, NAME) if file.endswith(RECORDS) and (name := document or text(record.get("id"))) else None,
        misfits=tuple(fit.misfits),
    )


def per_label(value: Any, mask: np.ndarray | None, fit: Fit) -> np.ndarray | None:
    """Return advantages for all tokens, from one number or a list."""
    if value is None or isinstance(value, int | float):
        return None if (one := number(value)) is None else np.full(fit.tokens, one)
    return fit.at(array(value, "advantages"), "advantages", mask)


def routes(value: Any, tokens: int, fit: Fit) -> np.ndarray | None:
    """Return the experts of tokens. If the value is not one row per token, return None and note a misfit."""
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    try:
        return None if value is None else read_rows(_ROUTES, value, tokens)
    except BadRecord:
        fit.misfits.append(("routed_experts", len(value), tokens))
        return None


def parts(value: Any) -> dict[str, float]:
    pairs = value.items() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return {str(name): found for name, given in pairs if (found := number(given)) is not None}


def fits_kept(record: Mapping[str, Any]) -> bool:
    return "token_log_ratios" in record and "largest_log_ratio" in record


def samples_of_kept(row: Mapping[str, Any], file: str, line: int) -> Iterator[Sample]:
    if row.get("rejected") is not None:  # a completion that was rejected, and never trained on
        return
    trainer, ratios = array(row["token_logprobs"], "token_logprobs"), array(row["token_log_ratios"], "token_log_ratios")
    kept = 0 if trainer is None else len(trainer)
    fit = Fit(kept)
    ratios = fit.whole(ratios, "token_log_ratios")
    length = whole(row.get("length")) or 0
    advantage = array(row.get("token_advantages"), "token_advantages")
    advantage = fit.whole(advantage, "token_advantages")
    if advantage is None and (one := score(row.get("advantage"))) is not None:
        advantage = np.full(max(1, kept), one)  # a row without tokens has an advantage too
    entropy = number(row.get("entropy"))
    yield Sample(
        file,
        line,
        text(row.get("id")) or "",
        ids=np.full(kept, -1) if kept else None,  # rows have the tokens' texts, not their ids
        mask=np.ones(kept, np.bool_) if kept else None,
        logprobs=None if trainer is None or ratios is None else trainer - ratios,
        trainer=trainer,
        advantages=advantage,
        reward=score(row.get("reward")),
        parts=parts(row.get("rewards")),
        group=text(row.get("group_id")),
        step=whole(row.get("step")),
        version=whole(row.get("model_version")),
        staleness=number(row.get("staleness")),
        truncated=row.get("truncated"),
        prompt=text(row.get("prompt")),
        completion=text(row.get("completion")),
        document=text(row.get("id")),
        mean_entropy=entropy if kept and kept == length else None,
        misfits=tuple(fit.misfits),
    )
