"""slime's and miles' `--save-debug-train-data`: {rollout_id, rank, rollout_data}, with data as lists over samples.

Lists of masks, log-probs and advantages have one value per response token. `rewards` are already normalised.
`raw_reward` is used instead if it covers exactly this rank's samples.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from truestep.tools.audit.formats.arrays import Fit, array, score, text, whole
from truestep.tools.audit.formats.ours import routes
from truestep.tools.audit.opening import UnreadableError
from truestep.tools.audit.samples import Sample


def fits(record: Mapping[str, Any]) -> bool:
    data = record.get("rollout_data")
    return isinstance(data, Mapping) and {"tokens", "response_lengths"} <= set(data)


def samples(record: Mapping[str, Any], file: str, line: int) -> Iterator[Sample]:
    data, step = record["rollout_data"], whole(record.get("rollout_id"))
    count = len(data["tokens"])

    def of(name: str, index: int) -> Any:
        values = data.get(name)
        return values[index] if isinstance(values, list | tuple) and len(values) == count else None

    raw = isinstance(data.get("raw_reward"), list) and len(data["raw_reward"]) == count
    for index in range(count):
        ids = array(data["tokens"][index], "tokens", np.int64)
        response = whole(of("response_lengths", index))
        if ids is None or response is None or not 0 <= response <= len(ids):
            raise UnreadableError(f"{file}: sample {index}: response_lengths does not fit its tokens")
        fit = Fit(len(ids))
        total = whole(of("total_lengths", index))
        if total is not None and total != len(ids):
            fit.misfits.append(("tokens", len(ids), total))
        mask = fit.tail(array(of("loss_masks", index), "loss_masks", np.bool_), "loss_masks", response, False)
        if mask is None and data.get("loss_masks") is None:
            mask = np.arange(len(ids)) >= len(ids) - response
        versions = of("weight_versions", index)
        version = whole(versions[-1] if isinstance(versions, list) and versions else versions)
        cut = of("truncated", index)

        def tail(name: str) -> np.ndarray | None:
            return fit.tail(array(of(name, index), name), name, response)  # noqa: B023 - called immediately

        yield Sample(
            file,
            index + 1,
            text(of("sample_indices", index)) or str(index),
            ids,
            mask,
            tail("rollout_log_probs"),
            trainer=tail("log_probs"),
            advantages=tail("advantages"),
            reward=score(of("raw_reward" if raw else "rewards", index)),
            step=step,
            version=version,
            staleness=None if version is None or step is None else step - version,
            truncated=None if cut is None else bool(cut),
            routes=routes(of("rollout_routed_experts", index), len(ids), fit),
            misfits=tuple(fit.misfits),
        )
