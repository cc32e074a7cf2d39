"""The file weights.jsonl: digests and norms of the weights after each step, by which runs are compared. Step 0 has the
weights that the run began with.

A line has the step, and under `weights` all weights packed as base64 of little-endian numbers, in the order of the list
that `names` says (weight_names-NAMES.json): 8 bytes of each digest, 4 of each weight's norm, and 4 of each gradient's
norm. `made_by` says where the step was made.
"""

import base64
import json
import logging
import platform
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep import __version__
from truestep.config.schema import Config
from truestep.files.whole import lines_by_step, write_json
from truestep.metrics.observers import Observer
from truestep.model.policy import Policy
from truestep.run.directory import RunDirectory
from truestep.weights.digests import Answer, Measured, Trace

log = logging.getLogger(__name__)


def _names_file(directory: RunDirectory, key: str) -> Path:
    return directory.path / f"weight_names-{key}.json"


def _key(names: Sequence[str]) -> str:
    return f"{zlib.crc32(json.dumps(list(names)).encode()):08x}"


class WeightLines(Observer):
    """Writes a step's line after the next step, when its numbers are on the host."""

    def __init__(self, directory: RunDirectory, trace: Trace, made_by: Mapping[str, Any], begins: bool = False):
        """`begins`: True if the weights are the run's first ones, which get a line too."""
        self._directory, self._trace, self._made_by, self._begins = directory, trace, made_by, begins
        self._waiting: tuple[int, Answer] | None = None

    def started(self) -> None:
        if self._directory.writes:
            write_json(_names_file(self._directory, _key(self._trace.names)), self._trace.names)
        if self._begins:
            self._trace.ask()
            self.updated(0, 0)

    def updated(self, step: int, documents_seen: int) -> None:
        self._write()
        assert self._trace.latest is not None
        self._waiting = step, self._trace.latest

    def saving(self) -> Sequence[Callable[[], None]]:
        self._write()
        return ()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._directory.writes:
            step, answer = waiting
            packed = {"names": _key(answer.names), "weights": _packed(answer.read())}
            self._directory.record_weights({"step": step, **packed, "made_by": self._made_by})


def _packed(measured: Measured) -> str:
    digests = np.array(list(measured.digests.values()), "<u8")
    norms = [np.array(list(values.values()), "<f4") for values in (measured.weight_norms, measured.gradient_norms)]
    return base64.b64encode(b"".join(array.tobytes() for array in (digests, *norms))).decode("ascii")


def made_by(config: Config, policy: Policy) -> dict[str, Any]:
    """Return the layout, machine and versions, on which a step's exact bits depend besides documents and options."""
    ranks = policy.weights.ranks
    layout = {name: size for name, size in ranks.layout.every.items() if size > 1}
    gpu = policy.device.type == "cuda"
    device = torch.cuda.get_device_name(policy.device) if gpu else f"{platform.machine()}, cpu"
    return {
        "ranks": ranks.size,
        **({"layout": layout} if layout else {}),
        "device": device,
        **({} if gpu else {"threads": torch.get_num_threads()}),
        "torch": torch.__version__,
        "truestep": __version__,
        "digests_of": "copies" if policy.weights.masters_on_host else "weights",
        "deterministic": config.deterministic,
    }


@dataclass(frozen=True)
class WeightLine:
    """The weights after a step, as a run has noted them."""

    step: int
    measured: Measured
    made_by: Mapping[str, Any]


def read_weight_lines(directory: RunDirectory) -> dict[int, WeightLine]:
    """Read the lines of weights.jsonl by step; none if the run has none. Damaged lines are left out with a warning."""
    names: dict[str, list[str]] = {}
    found, damaged = {}, []
    for step, line in lines_by_step(directory.weights).items():
        key = str(line.get("names"))
        if key not in names:
            names[key] = _read_names(directory, key)
        if names[key]:
            try:
                found[step] = _read(line, names[key])
            except (ValueError, TypeError, KeyError):  # binascii.Error is a ValueError
                damaged.append(step)
    if damaged:
        log.warning("%s: the lines of steps %s are damaged; left out", directory.weights, damaged)
    return found


def _read_names(directory: RunDirectory, key: str) -> list[str]:
    """Return the names of weights whose checksum is `key`; none if their file is gone, or damaged."""
    file = _names_file(directory, key)
    if not (key.isalnum() and file.is_file()):
        return []
    try:
        names = json.loads(file.read_bytes())
    except ValueError:
        names = None
    if not isinstance(names, list) or _key(names) != key:
        log.warning("%s is damaged; digests and norms of weights are left out", file)
        return []
    return names


def _read(line: Mapping[str, Any], names: Sequence[str]) -> WeightLine:
    content, count = base64.b64decode(line["weights"]), len(names)
    digests = np.frombuffer(content, "<u8", count).tolist()
    norms = np.frombuffer(content, "<f4", 2 * count, 8 * count).tolist()
    values = (digests, norms[:count], norms[count:])
    measured = Measured(*(dict(zip(names, some, strict=True)) for some in values))
    return WeightLine(line["step"], measured, dict(line["made_by"]))
