"""Whose turn it is: jobs that wait to be computed, by tenant."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from truestep.commands.tinker.objects import Job, Model

_MOST_DRAWN = 2**20  # most tokens that may be drawn by jobs computed together


class Turns:
    """Jobs that are ready. Tenants take turns, and the jobs of a model keep their order. `State.lock` is held by those
    who use it."""

    def __init__(self, models: Mapping[str, Model]):
        self._models = models
        self._ready: OrderedDict[str, deque[Job]] = OrderedDict()  # by tenant

    def __len__(self) -> int:
        return sum(len(ready) for ready in self._ready.values())

    def add(self, tenant: str, jobs: Iterable[Job]) -> None:
        self._ready.setdefault(tenant, deque()).extend(jobs)

    def remove(self, job: Job) -> None:
        """Remove a job, if it is still there."""
        ready = self._ready.get(job.tenant)
        if ready is not None and job in ready:
            ready.remove(job)

    def take(self, most: int) -> list[Job]:
        """Take the next job, from the tenant whose turn it is, and the jobs that may be computed together with it."""
        for tenant in list(self._ready):
            ready = self._ready.pop(tenant)
            job = self._next(ready)
            if ready:
                self._ready[tenant] = ready  # at the end, after the other tenants
            if job is not None:
                return [job, *(self._alike(job, most - 1) if job.together is not None else [])]
        return []

    def _next(self, ready: deque[Job]) -> Job | None:
        """Take a tenant's first job that may be computed now. Drop those that have ended before it."""
        waiting: set[str] = set()  # models of jobs that are passed over: their later jobs are, too
        for job in list(ready):
            if job.future.done():
                ready.remove(job)
            elif self._is_held(job, waiting):
                waiting.update({job.model} if job.model else ())
            else:
                ready.remove(job)
                return job
        return None

    def _is_held(self, job: Job, waiting: set[str]) -> bool:
        """Tell whether a job's model, or the one whose checkpoint it reads, is being written or has an earlier job that
        waits."""
        read = (job.reads or "").removeprefix("tinker://").partition("/")[0]
        names = [name for name in (job.model, read) if name]
        found = (self._models.get(name) for name in names)
        return any(name in waiting for name in names) or any(model is not None and model.held for model in found)

    def _alike(self, job: Job, most: int) -> list[Job]:
        found: list[Job] = []
        left = _MOST_DRAWN - job.cost
        for ready in self._ready.values():
            for other in list(ready):
                if other.together != job.together or other.future.done():
                    continue
                if len(found) == most or other.cost > left:
                    return found
                left -= other.cost
                found.append(other)
                ready.remove(other)
        return found
