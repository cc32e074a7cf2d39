"""The account of a tenant: its requests and their results, what it has used, and how much it may use."""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from truestep.commands.tinker.errors import ApiError
from truestep.commands.tinker.objects import Job, Model
from truestep.commands.tinker.usage import Budget, Counts, Quota
from truestep.commands.tinker.writes import Order

MOST_WAITING = 4096  # most unfinished requests per tenant
_MOST_WAITING_BYTES = 2**29  # most bytes of such requests
_MOST_KEPT = 8192  # most results kept per tenant
_MOST_KEPT_BYTES = 2**29
_MOST_REMEMBERED = 2**16  # most remembered ids of requests whose results were dropped


@dataclass(eq=False)
class Account:
    """The requests and results of a tenant. `State.lock` is held by those who change it."""

    quota: Quota
    budget: Budget
    jobs: dict[str, Job] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    waiting: int = 0
    waiting_bytes: int = 0
    done: deque[Job] = field(default_factory=deque)  # in the order in which they ended
    kept: int = 0  # bytes of their results
    forgotten: OrderedDict[str, None] = field(default_factory=OrderedDict)
    writing: int = 0  # bytes of requests that are being written
    order: Order = field(default_factory=Order)
    weights: threading.Lock = field(default_factory=threading.Lock)  # held while weights of a model are written

    def check_limits(self, job: Job, model: Model | None, early: int) -> None:
        """Raise if the tenant has too many requests, or has used its tokens. The client sends the request again.

        `early`: requests that arrived before their predecessors. They end when those have come. So they are not counted
        where that is all that the tenant's others wait for, and the next request of a model is then accepted whatever
        there is."""
        going = self.waiting - early
        many = going >= (self.quota.requests or MOST_WAITING) or self.waiting >= MOST_WAITING
        large = self.waiting_bytes + job.size > _MOST_WAITING_BYTES
        if (many or large) and going:
            self.counts.refused += 1
            raise ApiError(f"{self.waiting} requests of yours are waiting, with {self.waiting_bytes} bytes", 429, 1.0)
        if (many or large) and early and (model is None or job.seq != model.next_seq):
            said = f"{early} requests of yours, with {self.waiting_bytes} bytes, wait for earlier ones of their models"
            raise ApiError(f"{said}, and this one too, which is more than are kept: send less at once", 413)
        wait = self.budget.wait() if job.tokens else 0.0
        if wait:
            self.counts.refused += 1
            quota = f"your {self.quota.tokens_per_minute} tokens of this minute are used"
            raise ApiError(f"{quota}: send the request again in {wait:.0f} s", 429, wait)

    def begin_writing(self, size: int) -> None:
        """Count the bytes of a request that is written now, or raise if there are too many."""
        if self.writing and self.writing + size > _MOST_WAITING_BYTES:
            self.counts.refused += 1
            raise ApiError(f"{self.writing} bytes of your requests are being written", 429, 1.0)
        self.writing += size

    def count_waiting(self, job: Job, sign: int, again: bool) -> None:
        """Count a request as waiting, and take its tokens from the budget; with `sign` -1 take both back."""
        self.waiting += sign
        self.waiting_bytes += sign * job.size
        if not again:
            job.charged = job.cost
            self.budget.use(sign * (job.tokens + job.charged))

    def ended(self, job: Job) -> None:
        """Keep a job's result, and give back the tokens that it did not draw. If there are too many results, drop the
        oldest ones that were retrieved. If there are far too many, also drop results that were not retrieved."""
        self.budget.use(job.drawn - job.charged)
        self.counts.failed += job.future.exception() is not None
        self.waiting -= 1
        self.waiting_bytes -= job.size
        self.done.append(job)
        self.kept += _size(job)
        while len(self.done) > _MOST_KEPT or self.kept > _MOST_KEPT_BYTES:
            if not self.done[0].retrieved and len(self.done) < 4 * _MOST_KEPT and self.kept < 4 * _MOST_KEPT_BYTES:
                break
            oldest = self.done.popleft()
            self.kept -= _size(oldest)
            if self.jobs.pop(oldest.id, None) is not None:
                self.forgotten[oldest.id] = None
        while len(self.forgotten) > _MOST_REMEMBERED:
            self.forgotten.popitem(last=False)


def _size(job: Job) -> int:
    if job.future.exception() is not None:
        return 256
    return len(job.future.result().message) + 256
