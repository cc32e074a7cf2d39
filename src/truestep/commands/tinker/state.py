"""The sessions, models, samplers and futures of tenants.

Requests come from the server's thread; the compute thread takes jobs. Every lookup names the tenant, so other tenants'
objects are reported as unknown. With a journal, all of them but samples are kept on disk. Nothing is written while
`State.lock` is held: what writes is called in the order of its model, session or tenant (`State.write`).
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from truestep.commands.tinker.accounts import MOST_WAITING, Account
from truestep.commands.tinker.errors import ApiError, JobError, unknown
from truestep.commands.tinker.journal import Journal
from truestep.commands.tinker.objects import ClientSession, Job, Model, Outcome, Result, Sampler
from truestep.commands.tinker.turns import Turns
from truestep.commands.tinker.usage import Budget, Counts, Quota
from truestep.commands.tinker.writes import Writes

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_GROWN = 2**32  # most bytes of a model's requests and results since its last state
_MOST_MODELS = 256  # most models per tenant
_MOST_FINISHED = 1024  # most finished sessions that are remembered, per tenant
_MOST_SESSIONS = 1024  # most open sessions per tenant
_MOST_SAMPLERS = 4096  # most samplers of a session
_MOST_CLONES = 2**16  # most clients that join a session
_SILENT_SECONDS = 600.0  # a session without a request for so long has ended


class State:
    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self.lock = threading.RLock()
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self._own: dict[str, Account] = {}  # by tenant
        self._turns = Turns(self.models)
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
            own.begin_writing(size)

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

    def _of_tenant(self, tenant: str) -> Account:
        if tenant not in self._own:
            quota = self.quota(tenant)
            self._own[tenant] = Account(quota, Budget(quota.tokens_per_minute, self._now))
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
                early = sum(len(one.early) for one in self.models.values() if one.tenant == job.tenant)
                own.check_limits(job, model, early)
            if model is not None and not model.next_seq <= job.seq < model.next_seq + MOST_WAITING:
                raise ApiError(f"seq_id is {job.seq}, and the next request of this model is {model.next_seq}", 409)
            own.count_waiting(job, 1, again)
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
                own.count_waiting(job, -1, again)
            raise
        return job

    def _check_open(self, name: str) -> None:
        session = self.sessions.get(name)
        if session is None or session.finished:
            raise ApiError("the session has finished", 410)

    def _accept(self, own: Account, job: Job, model: Model | None) -> None:
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
        self._turns.add(job.tenant, ready)
        self.wake()

    def too_grown(self, model: Model, path: str) -> ApiError | None:
        """Say why a pass of a model is not accepted: its journal grows while a gradient is open."""
        if self.journal is None or path != "forward_backward" or self.journal.grown(model.id) < MOST_GROWN:
            return None
        return ApiError(f"the requests of this model since its last update have more than {MOST_GROWN} bytes: update")

    def live_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's models in the journal."""
        return 0 if self.journal is None else sum(self.journal.bytes(one.id) for one in self.all_sessions(tenant))

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

    def _ended(self, own: Account, job: Job) -> None:
        with self.lock:
            own.ended(job)

    def retrieved(self, job: Job) -> None:
        job.retrieved = True

    def _drop(self, job: Job) -> None:
        with self.lock:
            self._of_tenant(job.tenant).jobs.pop(job.id, None)
            self._turns.remove(job)

    def cancel(self, job: Job) -> None:
        """Cancel a sampling request that has not started. Requests that change a model cannot be cancelled."""
        with self.lock:
            if job.together is not None and not job.running and not job.future.done():
                job.fail(JobError("the request was cancelled"))

    def queue_state(self, job: Job) -> tuple[str, str | None]:
        """Return the job's queue state, and the reason if it is waiting."""
        with self.lock:
            before = len(self._turns)
            if job.running or before <= 1:
                return "active", None
            return "paused_capacity", f"{before} requests are waiting on this server"

    def take(self, most: int = 256) -> list[Job]:
        """Take the jobs that are computed next, together."""
        with self.lock:
            jobs = self._turns.take(most)
            for job in jobs:
                job.running = True
            return jobs
