"""The sessions, models, samplers and futures of tenants.

Requests come from the server's thread; the compute thread takes jobs. Every lookup names the tenant, so other tenants'
objects are reported as unknown. With a journal, all of them but samples are kept on disk. Nothing is written while
`State.lock` is held: what writes is called in the order of its model, session or tenant (`State.write`).
"""

import logging
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from truestep.commands.tinker.checkpoints import Adapted
from truestep.commands.tinker.errors import ApiError, JobError, unknown
from truestep.commands.tinker.journal import Journal
from truestep.commands.tinker.usage import Budget, Counts, Quota
from truestep.commands.tinker.writes import Order, Writes

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_WAITING = 4096  # most unfinished requests per tenant
_MOST_WAITING_BYTES = 2**29  # most bytes of such requests
MOST_GROWN = 2**32  # most bytes of a model's requests and results since its last state
_MOST_DRAWN = 2**20  # most tokens that may be drawn by jobs computed together
_MOST_MODELS = 256  # most models per tenant
_MOST_KEPT = 8192  # most results kept per tenant
_MOST_KEPT_BYTES = 2**29
_MOST_REMEMBERED = 2**16  # most remembered ids of requests whose results were dropped
_MOST_FINISHED = 1024  # most finished sessions that are remembered, per tenant
_MOST_SESSIONS = 1024  # most open sessions per tenant
_MOST_SAMPLERS = 4096  # most samplers of a session
_MOST_CLONES = 2**16  # most clients that join a session
_SILENT_SECONDS = 600.0  # a session without a request for so long has ended


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


@dataclass(eq=False)
class Own:
    """The requests and results of a tenant."""

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

    def ended(self, job: Job) -> None:
        """Keep a job's result. If there are too many results, drop the oldest ones that were retrieved. If there are
        far too many, also drop results that were not retrieved."""
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


class State:
    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self.lock = threading.RLock()
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self._own: dict[str, Own] = {}  # requests and results by tenant
        self._ready: OrderedDict[str, deque[Job]] = OrderedDict()  # waiting jobs by tenant; tenants take turns
        self.ended: deque[ClientSession] = deque()  # sessions whose memory must be freed
        self.wake: Callable[[], None] = lambda: None  # wakes the compute thread
        self.journal: Journal | None = None
        self.base = ""  # the path of the base model, for the journal
        self.computes = ""  # a digest of its weights and of the options that change numbers
        self.quota: Callable[[str], Quota] = lambda tenant: Quota()
        self.busy = 0.0  # seconds of computing
        self.writes = Writes()

    # Writes

    def write(self, owner: "Model | ClientSession", work: Callable[[], T]) -> "Future[T]":
        """Do work that writes to the disk, after what was given for this owner before."""
        return self.writes.do(owner.order, work)

    def write_of_tenant(self, tenant: str, work: Callable[[], T]) -> "Future[T]":
        """Do work on a tenant's checkpoints."""
        with self.lock:
            order = self._of_tenant(tenant).order
        return self.writes.do(order, work)

    def writing_weights(self, tenant: str) -> AbstractContextManager[Any]:
        """Let one thread at a time write weights of a tenant's models, because each holds a copy of them in memory."""
        with self.lock:
            return self._of_tenant(tenant).weights

    def write_request(self, model: Model, size: int, work: Callable[[], T]) -> "Future[T]":
        """Do work that writes a model's request of so many bytes."""
        with self.lock:
            own = self._of_tenant(model.tenant)
            if own.writing and own.writing + size > _MOST_WAITING_BYTES:
                own.counts.refused += 1
                raise ApiError(f"{own.writing} bytes of your requests are being written", 429, 1.0)
            own.writing += size

        def ended(_: "Future[T]") -> None:
            with self.lock:
                own.writing -= size

        future = self.write(model, work)
        future.add_done_callback(ended)
        return future

    @contextmanager
    def holding(self, model: Model) -> Iterator[None]:
        """Let a model's jobs be computed again when the work within has ended. `model.held` was set before."""
        try:
            yield
        finally:
            with self.lock:
                model.held = False
            self.wake()

    # Sessions

    def begin(self, tenant: str, metadata: dict[str, Any] | None, name: str | None) -> ClientSession:
        with self.lock:
            self.end_silent()
            if sum(one.tenant == tenant and not one.finished for one in self.sessions.values()) >= _MOST_SESSIONS:
                raise ApiError(f"there are {_MOST_SESSIONS} open sessions: finish some", 429)
            finished = [one for one in self.sessions.values() if one.finished and one.tenant == tenant]
            for old in finished[:-_MOST_FINISHED]:
                del self.sessions[old.id]
            session = ClientSession(str(uuid.uuid4()), tenant, time.time(), self._now(), metadata, name)
            self.sessions[session.id] = session
        about = {"tenant": tenant, "base": self.base, "computes": self.computes, "created": session.created}
        try:
            self._note(session.id, "session", {**about, "user_metadata": metadata, "display_name": name})
        except BaseException:
            with self.lock:
                self.sessions.pop(session.id, None)
            raise
        return session

    def begin_again(self, name: str, about: Mapping[str, Any]) -> ClientSession:
        """Begin a session of the journal, after a restart."""
        given = (about["tenant"], about["created"], self._now(), about["user_metadata"], about["display_name"])
        session = self.sessions[name] = ClientSession(name, *given)
        return session

    def _note(self, session: str, kind: str, event: Mapping[str, Any]) -> None:
        if self.journal is not None:
            self.journal.note(session, {"kind": kind, **event})

    def session(self, tenant: str, name: Any) -> ClientSession:
        """Return a tenant's session, and record that its client is alive."""
        session = self._of(self.sessions, tenant, name, "session")
        if session.finished:
            raise ApiError("the session has finished", 410)
        session.seen = self._now()
        return session

    def finish(self, session: ClientSession) -> "Future[None]":
        """End a session. The future ends when it is forgotten on disk, too."""
        with self.lock:
            forgotten = self.write(session, lambda: self._forget(session.id))
            if session.finished:
                return forgotten
            self._end(session)
            self.ended.append(session)
            self.wake()
            return forgotten

    def _end(self, session: ClientSession) -> None:
        """Drop a session's models, samplers and requests."""
        session.finished = True
        for name in session.models:
            self.models.pop(name, None)
        for name in session.samplers:
            self.samplers.pop(name, None)
        for job in list(self._of_tenant(session.tenant).jobs.values()):
            if job.session == session.id:
                job.fail(JobError("the session has finished"))
                self._drop(job)

    def leave(self, name: str) -> None:
        """Drop a session that cannot be gone on with after a restart. It stays on the disk."""
        with self.lock:
            if (session := self.sessions.pop(name, None)) is not None:
                self._end(session)

    def _forget(self, session: str) -> None:
        if self.journal is None:
            return
        try:
            self.journal.forget(session)
        except OSError:
            log.exception("the session %s was not forgotten", session)
            raise

    def end_silent(self) -> None:
        """End sessions whose clients have been silent for too long."""
        with self.lock:
            for session in list(self.sessions.values()):
                if not session.finished and self._now() - session.seen > _SILENT_SECONDS:
                    self.finish(session)

    def _of(self, table: Mapping[str, Any], tenant: str, name: Any, what: str) -> Any:
        found = table.get(name) if isinstance(name, str) else None
        if found is None or found.tenant != tenant:
            raise unknown(what)
        return found

    def all_sessions(self, tenant: str) -> list[ClientSession]:
        with self.lock:
            own = [one for one in self.sessions.values() if one.tenant == tenant]
        return sorted(own, key=lambda one: -one.created)

    def any_session(self, tenant: str, name: Any) -> ClientSession:
        session: ClientSession = self._of(self.sessions, tenant, name, "session")
        return session

    def model(self, tenant: str, name: Any) -> Model:
        model: Model = self._of(self.models, tenant, name, "model")
        self.session(tenant, model.session)
        model.last_request = time.time()
        return model

    def add_model(self, model: Model, **how: Any) -> Model:
        """Add a model, and return it. If the request is a repetition, return the model from the first one. `how` it is
        created, for the journal."""
        with self.lock:
            if model.id in self.models:
                return self.models[model.id]
            session = self.session(model.tenant, model.session)
            most = min(_MOST_MODELS, self._of_tenant(model.tenant).quota.models or _MOST_MODELS)
            if sum(one.tenant == model.tenant for one in self.models.values()) >= most:
                raise ApiError(f"there are {most} models of yours: finish a session, which frees its own")
            self.models[model.id] = model
            session.models.append(model.id)
        about = {"base": model.base, "adapted": asdict(model.adapted), "user_metadata": model.user_metadata}
        try:
            self._note(session.id, "model", {"id": model.id, "how": how, **about})
            if self.journal is not None:
                self.journal.begin(model.id)
        except BaseException:
            with self.lock:
                self.models.pop(model.id, None)
                session.models.remove(model.id)
            raise
        return model

    def add_sampler(self, sampler: Sampler) -> None:
        """Add a sampler, if its session goes on."""
        with self.lock:
            session = self.sessions.get(sampler.session)
            if session is None or session.finished or self.samplers.get(sampler.id) == sampler:
                return
            if len(session.samplers) >= _MOST_SAMPLERS and sampler.id not in self.samplers:
                raise ApiError(f"there are {_MOST_SAMPLERS} samplers of this session: finish it and begin another", 429)
        self._note(session.id, "sampler", asdict(sampler))
        with self.lock:
            if session.finished:
                return
            self.samplers[sampler.id] = sampler
            if sampler.id not in session.samplers:
                session.samplers.append(sampler.id)

    def remove_samplers(self, tenant: str, path: str) -> None:
        """Forget the samplers of a checkpoint that is removed."""
        with self.lock:
            found = [one for one in self.samplers.values() if (one.tenant, one.path) == (tenant, path)]
        for sampler in found:
            session = self.sessions.get(sampler.session)
            if session is None or session.finished:
                continue
            self._note(session.id, "gone", {"id": sampler.id})
            with self.lock:
                if self.samplers.pop(sampler.id, None) is not None and sampler.id in session.samplers:
                    session.samplers.remove(sampler.id)

    def add_clone(self, session: ClientSession) -> int:
        """Count one more client of a session."""
        with self.lock:
            if session.clones >= _MOST_CLONES:
                raise ApiError(f"{_MOST_CLONES} clients have joined this session: begin another", 429)
            session.clones += 1
            count = session.clones
        self._note(session.id, "clones", {"count": count})
        return count

    def sampler(self, tenant: str, name: Any) -> Sampler:
        sampler: Sampler = self._of(self.samplers, tenant, name, "sampling session")
        self.session(tenant, sampler.session)
        return sampler

    # Futures

    def future(self, tenant: str, name: Any) -> Job:
        """Return a tenant's future."""
        with self.lock:
            own = self._of_tenant(tenant)
            job = own.jobs.get(name) if isinstance(name, str) else None
            if job is None and isinstance(name, str) and name in own.forgotten:
                raise ApiError("the result of this request is kept no longer", 410)
            sampler = self.samplers.get(str(name).rpartition(":")[0]) if job is None else None
            if sampler is not None and sampler.tenant == tenant:  # the client then asks anew
                raise ApiError("the server has started again, and has not kept this request for samples", 410)
        if job is None:
            raise unknown("request")
        if (session := self.sessions.get(job.session)) is not None:
            session.seen = self._now()
        return job

    def known(self, tenant: str, name: str) -> Job | None:
        """Return the future of a repeated request; None if it is new."""
        with self.lock:
            return self._of_tenant(tenant).jobs.get(name)

    def _of_tenant(self, tenant: str) -> Own:
        if tenant not in self._own:
            quota = self.quota(tenant)
            self._own[tenant] = Own(quota, Budget(quota.tokens_per_minute, self._now))
        return self._own[tenant]

    def count(self, tenant: str, **used: int) -> None:
        """Count what a tenant has used."""
        with self.lock:
            own = self._of_tenant(tenant)
            for name, number in used.items():
                setattr(own.counts, name, getattr(own.counts, name) + number)

    def used(self) -> tuple[dict[str, float], dict[str, Counts], dict[str, int]]:
        """Return what the server has, the counters of tenants, and how many of their requests wait."""
        with self.lock:
            going = sum(not one.finished for one in self.sessions.values())
            waiting = {tenant: own.waiting for tenant, own in self._own.items()}
            has = {"sessions": going, "models": len(self.models), "samplers": len(self.samplers)}
            counts = {tenant: replace(own.counts) for tenant, own in self._own.items()}
            return {**has, "queue": sum(waiting.values())}, counts, waiting

    def submit(self, job: Job, model: Model | None = None, *, again: bool = False) -> Job:
        """Submit a request. If a request with the same id was submitted before, return its future. With `model`, its
        jobs are computed in the order of `job.seq`, whatever the order of arrival. `again`: a request of the journal,
        after a restart."""
        with self.lock:
            own = self._of_tenant(job.tenant)
            if job.id in own.jobs:
                return own.jobs[job.id]
            self._check_open(job.session)
            if not again:
                self._check_limits(own, job, model)
            if model is not None and not model.next_seq <= job.seq < model.next_seq + _MOST_WAITING:
                raise ApiError(f"seq_id is {job.seq}, and the next request of this model is {model.next_seq}", 409)
            self._count(own, job, 1, again)
        try:
            if model is not None and self.journal is not None:
                if not again:
                    self.journal.request(model.id, job.seq, job.path, job.body)
                job.record = self._record
            with self.lock:
                self._check_open(job.session)
                self._accept(own, job, model)
        except BaseException:
            with self.lock:
                self._count(own, job, -1, again)
            raise
        return job

    def _check_open(self, name: str) -> None:
        session = self.sessions.get(name)
        if session is None or session.finished:
            raise ApiError("the session has finished", 410)

    def _count(self, own: Own, job: Job, sign: int, again: bool) -> None:
        """Count a request as waiting, and take its tokens from the budget; with `sign` -1 take both back."""
        own.waiting += sign
        own.waiting_bytes += sign * job.size
        if not again:
            job.charged = job.cost
            own.budget.use(sign * (job.tokens + job.charged))

    def _accept(self, own: Own, job: Job, model: Model | None) -> None:
        job.body, ready = b"", [job]
        if model is not None:
            model.early[job.seq] = job
            ready = []
            while model.next_seq in model.early:
                ready.append(model.early.pop(model.next_seq))
                model.next_seq += 1
        own.jobs[job.id] = job
        own.counts.requests += 1
        job.future.add_done_callback(lambda _: self._ended(own, job))
        self._ready.setdefault(job.tenant, deque()).extend(ready)
        self.wake()

    def too_grown(self, model: Model, path: str) -> ApiError | None:
        """Say why a pass of a model is not accepted: its journal grows while a gradient is open."""
        if self.journal is None or path != "forward_backward" or self.journal.grown(model.id) < MOST_GROWN:
            return None
        return ApiError(f"the requests of this model since its last update have more than {MOST_GROWN} bytes: update")

    def live_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's models in the journal."""
        return 0 if self.journal is None else sum(self.journal.bytes(one.id) for one in self.all_sessions(tenant))

    def _check_limits(self, own: Own, job: Job, model: Model | None) -> None:
        """Raise if a tenant has too many requests, or has used its tokens. The client sends the request again.

        Requests that arrived before their predecessors end when those have come. So they are not counted where that is
        all that the tenant's others wait for, and the next request of a model is then accepted whatever there is."""
        early = sum(len(one.early) for one in self.models.values() if one.tenant == job.tenant)
        going = own.waiting - early
        many = going >= (own.quota.requests or _MOST_WAITING) or own.waiting >= _MOST_WAITING
        large = own.waiting_bytes + job.size > _MOST_WAITING_BYTES
        if (many or large) and going:
            own.counts.refused += 1
            raise ApiError(f"{own.waiting} requests of yours are waiting, with {own.waiting_bytes} bytes", 429, 1.0)
        if (many or large) and early and (model is None or job.seq != model.next_seq):
            said = f"{early} requests of yours, with {own.waiting_bytes} bytes, wait for earlier ones of their models"
            raise ApiError(f"{said}, and this one too, which is more than are kept: send less at once", 413)
        wait = own.budget.wait() if job.tokens else 0.0
        if wait:
            own.counts.refused += 1
            quota = f"your {own.quota.tokens_per_minute} tokens of this minute are used"
            raise ApiError(f"{quota}: send the request again in {wait:.0f} s", 429, wait)

    def too_large(self, job: Job) -> str | None:
        """Say why a job is never accepted: it may use so many tokens that others would wait longer than clients do."""
        with self.lock:
            most = self._of_tenant(job.tenant).budget.most
        if most is None or job.tokens + job.cost <= most:
            return None
        return f"the request may use {job.tokens + job.cost} tokens, and your quota allows {most} for one: send less"

    def _record(self, job: Job, outcome: Outcome) -> None:
        """Write how a job of a model ended. When the server ends, the job is computed again by the next one, because it
        may have failed by that."""
        told: dict[str, Any] = {}
        if isinstance(outcome, Result):
            told, body = ({}, outcome.message) if outcome.json is None else ({"json": dict(outcome.json)}, b"")
        else:
            told, body = {"error": str(outcome)[:4000], "user": isinstance(outcome, JobError)}, b""
        if self.journal is None or job.model not in self.models:
            return
        self.writes.check_going()
        try:
            self.journal.result(job.model, job.seq, told, body)
        except OSError:  # the request is in the journal: after a restart it is computed again
            if job.model in self.models:
                log.exception("the result of %s was not written to the journal", job.id)

    def ended_before(self, job: Job) -> None:
        """Add a job that ended before the server was started again."""
        with self.lock:
            own = self._of_tenant(job.tenant)
            own.jobs[job.id] = job
            own.waiting += 1
            job.future.add_done_callback(lambda _: self._ended(own, job))
            job.end(Result())

    def carries(self, job: Job | None) -> bool:
        """Return whether a result goes into the next state's journal: one that was not retrieved, and once one that
        was, as its client may not have it yet."""
        if job is None or job.carried:
            return False
        job.carried = job.retrieved
        return True

    def _ended(self, own: Own, job: Job) -> None:
        with self.lock:
            own.ended(job)
            own.budget.use(job.drawn - job.charged)
            own.counts.failed += job.future.exception() is not None

    def retrieved(self, job: Job) -> None:
        job.retrieved = True

    def _drop(self, job: Job) -> None:
        with self.lock:
            self._of_tenant(job.tenant).jobs.pop(job.id, None)
            ready = self._ready.get(job.tenant)
            if ready is not None and job in ready:
                ready.remove(job)

    def cancel(self, job: Job) -> None:
        """Cancel a sampling request that has not started. Requests that change a model cannot be cancelled."""
        with self.lock:
            if job.together is not None and not job.running and not job.future.done():
                job.fail(JobError("the request was cancelled"))

    def queue_state(self, job: Job) -> tuple[str, str | None]:
        """Return the job's queue state, and the reason if it is waiting."""
        with self.lock:
            before = sum(len(ready) for ready in self._ready.values())
            if job.running or before <= 1:
                return "active", None
            return "paused_capacity", f"{before} requests are waiting on this server"

    # Jobs

    def take(self, most: int = 256) -> list[Job]:
        """Take the next job, from the tenant whose turn it is, and the jobs that may be computed together with it."""
        with self.lock:
            for tenant in list(self._ready):
                ready = self._ready.pop(tenant)
                job = None
                waiting: set[str] = set()  # models of jobs that are passed over: their later jobs are, too
                for first in list(ready):
                    if first.future.done():
                        ready.remove(first)
                    elif self._is_held(first, waiting):
                        waiting.update({first.model} if first.model else ())
                    else:
                        ready.remove(first)
                        job = first
                        break
                if ready:
                    self._ready[tenant] = ready  # at the end, after the other tenants
                if job is not None:
                    jobs = [job, *(self._alike(job, most - 1) if job.together is not None else [])]
                    for one in jobs:
                        one.running = True
                    return jobs
            return []

    def _is_held(self, job: Job, waiting: Collection[str]) -> bool:
        """Tell whether a job's model, or the one whose checkpoint it reads, is being written or has an earlier job that
        waits."""
        read = (job.reads or "").removeprefix("tinker://").partition("/")[0]
        names = [name for name in (job.model, read) if name]
        found = (self.models.get(name) for name in names)
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


def _size(job: Job) -> int:
    if job.future.exception() is not None:
        return 256
    return len(job.future.result().message) + 256
