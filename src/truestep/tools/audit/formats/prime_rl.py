"""prime-rl's token exports: token_exports/step_N/rank_R.jsonl, one sequence per line, all lists with one value per
token."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from truestep.tools.audit.formats.arrays import Fit, array, whole
from truestep.tools.audit.samples import Sample


def fits(record: Mapping[str, Any]) -> bool:
    return {"token_ids", "loss_mask", "inference_logprobs"} <= set(record)


def samples(record: Mapping[str, Any], file: str, line: int) -> Iterator[Sample]:
    ids = array(record["token_ids"], "token_ids", np.int64)
    fit = Fit(0 if ids is None else len(ids))

    def column(name: str) -> np.ndarray | None:
        return fit.whole(array(record.get(name), name), name)

    mask = fit.whole(array(record["loss_mask"], "loss_mask", np.bool_), "loss_mask")
    rewards = column("rewards")
    known = rewards[mask & np.isfinite(rewards)] if rewards is not None and mask is not None else np.zeros(0)
    step = whole(record.get("export_step"))
    yield Sample(
        file,
        line,
        f"{record.get('run_id') or ''}{record.get('export_sequence_idx', '')}",
        ids,
        mask,
        column("inference_logprobs"),
        trainer=column("trainer_logprobs"),
        entropy=column("entropy"),
        advantages=column("advantages"),
        reward=float(known[0]) if len(known) else None,
        step=whole(record.get("step")) if step is None else step,
        misfits=tuple(fit.misfits),
    )
