"""The float64 oracle of a step, on the float64 oracle of a transformer: reads a model's files and nothing of ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from oracles.transformer import Transformer
from truestep.tools.verify.oracle import step as oracle
from truestep.tools.verify.oracle.losses import *  # noqa: F403
from truestep.tools.verify.oracle.metrics import *  # noqa: F403
from truestep.tools.verify.oracle.records import *  # noqa: F403
from truestep.tools.verify.oracle.records import Record
from truestep.tools.verify.oracle.step import *  # noqa: F403
from truestep.tools.verify.oracle.step import OracleResult
from truestep.tools.verify.oracle.values import *  # noqa: F403


def oracle_step(
    model_directory: str | Path,
    records: list[Record],
    config: dict[str, Any],
    *,
    documents_seen_before_step: int = 0,
) -> OracleResult:
    """All of `records` as one step. `config` has the sections of the YAML file (docs/contract.md, section 10)."""
    model = Transformer(model_directory)
    return oracle.oracle_step(model, records, config, documents_seen_before_step=documents_seen_before_step)


def oracle_steps(
    model_directory: str | Path, records: list[Record], configs: Sequence[dict[str, Any]]
) -> list[OracleResult]:
    """`oracle_step` under each configuration; what the model says of a document is computed once for all of them."""
    model = _Once(Transformer(model_directory))
    return [oracle.oracle_step(model, records, config) for config in configs]


class _Once:
    def __init__(self, model: Transformer):
        self.parameters = model.parameters
        self._model = model
        self._known: dict[tuple[tuple[int, ...], float], Tensor] = {}

    def logits(self, input_ids: list[int], temperature: float = 1.0, routes: None = None) -> Tensor:
        asked = (tuple(input_ids), temperature)
        if asked not in self._known:
            self._known[asked] = self._model.logits(input_ids, temperature)
        return self._known[asked]


def oracle_logprobs(
    model_directory: str | Path, records: list[Record], config: dict[str, Any] | None = None
) -> list[list[float]]:
    """The model's log-probs of every record's labels, for example for `tiny.set_old_logprobs`."""
    default_temperature = (config or {}).get("data", {}).get("temperature", 1.0)
    return oracle.oracle_logprobs(Transformer(model_directory), records, default_temperature)
