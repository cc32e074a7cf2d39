"""What is to be computed, by kind: the work of a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from truestep.commands.tinker.objects import Model, Sampler
from truestep.commands.tinker.requests import Asked, Batch

GRADIENT, UPDATE = "gradient", "update"  # the parts of a step


@dataclass(frozen=True)
class Refused:
    """An invalid request, which fails when its turn comes."""

    model: Model
    error: Exception
    part: str | None = None  # its part in a training step


@dataclass(frozen=True)
class Create:
    model: Model
    checkpoint: str | None = None  # tinker path of a checkpoint to start from
    optimizer: bool = False
    kept: Path | None = None  # the model's last state, from which it goes on after a restart


@dataclass(frozen=True)
class Told:
    """A request that was computed before a restart, and has changed no weights."""

    model: Model


@dataclass(frozen=True)
class ForwardBackwardJob:
    model: Model
    batch: Batch

    @property
    def tokens(self) -> int:
        return sum(document.num_tokens for document in self.batch.documents)

    @property
    def part(self) -> str | None:
        return None if self.batch.request.forward_only else GRADIENT


@dataclass(frozen=True)
class OptimStep:
    model: Model
    seq: int
    learning_rate: float
    options: Mapping[str, float | None]
    part: ClassVar[str] = UPDATE


@dataclass(frozen=True)
class Save:
    model: Model
    seq: int
    kind: str
    name: str
    expires_in: float | None
    user_metadata: dict[str, str] | None
    overwrite: bool = False
    sampler: str | None = None  # the id of the sampling session to create
    inflight: bool = False


@dataclass(frozen=True)
class Load:
    model: Model
    seq: int
    checkpoint: str
    optimizer: bool


@dataclass(frozen=True)
class Sample:
    sampler: Sampler
    asked: Asked
    seed: int


def seed_of(sampling_session: str, seq_id: int, given: int | None) -> int:
    """Return the seed of a request: the given one, or one derived from its ids."""
    if given is not None:
        return given % 2**63
    return int.from_bytes(sha256(f"{sampling_session} {seq_id}".encode()).digest()[:8], "big") >> 1
