"""The float64 oracle of a step, on the float64 oracle of a transformer: reads a model's files and nothing of ours."""

from pathlib import Path
from typing import Any

from oracles.transformer import Transformer
from truestep.verify import oracle
from truestep.verify.oracle import *  # noqa: F403
from truestep.verify.oracle import OracleResult, Record


def oracle_step(
    model_directory: str | Path,
    records: list[Record],
    config: dict[str, Any],
    *,
    documents_seen_before_step: int = 0,
) -> OracleResult:
    """All of `records` as one step. `config` is the nested dictionary of the YAML file (SPEC section 6)."""
    model = Transformer(model_directory)
    return oracle.oracle_step(model, records, config, documents_seen_before_step=documents_seen_before_step)


def oracle_logprobs(
    model_directory: str | Path, records: list[Record], config: dict[str, Any] | None = None
) -> list[list[float]]:
    """The model's log-probs of every record's labels, for example for `tiny.set_old_logprobs`."""
    default_temperature = (config or {}).get("data", {}).get("temperature", 1.0)
    return oracle.oracle_logprobs(Transformer(model_directory), records, default_temperature)
