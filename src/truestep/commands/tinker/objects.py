"""What the server knows of by an id: jobs with their results, models, samplers, and clients' sessions."""

import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from truestep.commands.tinker.checkpoints import Adapted
from truestep.commands.tinker.writes import Order


@dataclass(frozen=True)
class Result:
    """The result of a job: JSON, or a protobuf message."""

    json: Mapping[str, Any] | None = None
    message: bytes = b""


Outcome = Result | Exception


@dataclass(eq=False)
class Job:
    """A request to compute, and its future."""

    id: str
    tenant: str
    session: str
    work: Any  # a work item for `jobs`; None once the job has ended
    together: Hashable = None  # jobs with the same value may be computed together; None: alone
    model: str | None = None
    reads: str | None = None  # the path of a checkpoint that it may read
    size: int = 0  # approximate bytes of the request
    cost: int = 0  # most tokens that it may draw
    tokens: int = 0  # tokens that it trains on, or reads as a prompt
    drawn: int = 0  # tokens
    charged: int = 0  # tokens that it may draw and that are taken from the budget
    seq: int = 0  # its place among the requests of its model; 0: it has none
    path: str = ""  # with `body`: the request as it is written to the journal
    body: bytes = b""
    told: Outcome | None = None  # how it ended before the server was started again
    record: "Callable[[Job, Outcome], None] | None" = None  # writes how it ended, once
    future: "Future[Result]" = field(default_factory=Future)
    running: bool = False
    retrieved: bool = False
    carried: bool = False  # the journal has its result, although the client has retrieved it

    def fail(self, error: Exception) -> None:
        """End without a result, if the job has not ended already."""
        self._end(error)

    def end(self, result: Result) -> None:
        """End with a result, if the job has not ended already."""
        self._end(result)

    def keep(self, outcome: Outcome) -> None:
        """Write how the job ends to the journal, if it has one, before anyone is told."""
        if self.record is not None and self.told is None and not self.future.done():
            self.record(self, outcome)
            self.record = None

    def _end(self, outcome: Outcome) -> None:
        self.keep(outcome)
        outcome = outcome if self.told is None else self.told
        with suppress(InvalidStateError):
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        self.work = None


@dataclass(eq=False)
class Model:
    id: str
    tenant: str
    session: str
    base: str
    adapted: Adapted
    user_metadata: dict[str, str] | None = None
    next_seq: int = 1
    early: dict[int, Job] = field(default_factory=dict)  # jobs that arrived before their predecessors, by seq_id
    last_request: float = field(default_factory=time.time)
    version: int = 0  # the number of the request that changed its weights last, or may have
    spoiled: bool = False  # a part of the current training step failed
    lost: str = ""  # why its weights differ from what its client expects
    held: bool = False  # True while its state is written: none of its jobs is computed
    order: Order = field(default_factory=Order)


@dataclass(frozen=True)
class Sampler:
    id: str
    tenant: str
    session: str
    base: str
    path: str | None = None  # path of the checkpoint; None: the base model
    model: str | None = None  # the model whose weights are used, as long as they have this `version`
    version: int = -1
    inflight: bool = False  # use the model's current weights


@dataclass(eq=False)
class ClientSession:
    id: str
    tenant: str
    created: float
    seen: float
    user_metadata: dict[str, Any] | None
    display_name: str | None
    finished: bool = False
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    clones: int = 0
    order: Order = field(default_factory=Order)
