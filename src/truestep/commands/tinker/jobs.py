"""Computes clients' jobs, one after another, in the thread that uses the device.

A model is a `Session` that shares the base model's frozen weights and has its own adapter. A job of one model, even if
it fails, changes nothing in other models.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from truestep.commands.session.session import Session
from truestep.commands.tinker import state as states
from truestep.commands.tinker.answers import answer
from truestep.commands.tinker.checkpoints import WEIGHTS, Adapted, Checkpoints, Saved
from truestep.commands.tinker.errors import ApiError, JobError, ServerError
from truestep.commands.tinker.objects import ClientSession, Job, Model, Result, Sampler
from truestep.commands.tinker.samplers import SamplerSessions
from truestep.commands.tinker.state import State
from truestep.commands.tinker.wire import forward_backward_output, sample_response
from truestep.commands.tinker.work import (
    GRADIENT,
    UPDATE,
    Create,
    ForwardBackwardJob,
    Load,
    OptimStep,
    Refused,
    Sample,
    Save,
    Told,
)
from truestep.commands.tinker.writes import Order
from truestep.config.schema import NOTHING_IS_DRAWN, Config
from truestep.errors import TruestepError
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import Completion, Request, completing
from truestep.losses.client import FIELDS, PLAIN, PREFIX, loss_of
from truestep.model.adapter import ALL_LINEAR, target_modules
from truestep.model.loading.read import read_model
from truestep.model.policy import Policy
from truestep.types import StepTotals
from truestep.weights.errors import ModelError

log = logging.getLogger(__name__)

# with these totals a loss is divided by 1, so it is the sum over its labels
_SUM = StepTotals(num_documents=1, num_labels=1, num_tokens=1)
_MOST_HIDDEN = 16  # most samplers without names that are kept for each model
_STATE_SECONDS = 60.0  # a model's state is written after so many seconds of computing for it
_STATE_BYTES = 2**28  # it is also written after requests of so many bytes, or of the state's own size


class Jobs:
    def __init__(self, config: Config, policy: Policy, checkpoints: Checkpoints, state: State):
        """`policy`: the base model, with frozen weights."""
        self._config, self._policy = config, policy
        self._base = EngineGenerator(policy, EngineSettings(waves=config.deterministic))
        self._checkpoints, self._state = checkpoints, state
        self._sessions: dict[str, Session] = {}  # sessions of models, by model id
        self._samplers = SamplerSessions()
        self._open: set[str] = set()  # ids of models with a gradient, or with a part of one that failed
        self._linear: tuple[str, ...] | None = None
        # seconds of steps and loads since a model's last state, by model id
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._sweeps = Order()
        self._sweep: Future[None] | None = None  # the last removal of expired checkpoints

    def run(self, jobs: Sequence[Job]) -> None:
        """Compute jobs that were taken together. A failing job fails only its own client's future."""
        works = [(job, job.work) for job in jobs]  # a job drops its work when it ends
        works = [(job, work) for job, work in works if work is not None]
        if not works:
            return
        (job, work), *_ = works
        try:
            if isinstance(work, Sample):
                self._sample(works)
                return
            do: Mapping[type, Callable[[Any], Result]] = {
                Refused: self._refuse,
                Told: lambda work: Result(),
                Create: self._create,
                ForwardBackwardJob: self._forward_backward,
                OptimStep: self._optim_step,
                Load: self._load,
            }
            if isinstance(work, Save):
                self._begin_save(job, work)
                return
            start = time.monotonic()
            with torch.enable_grad():
                result = do[type(work)](work)
            if getattr(work, "part", None) is not None:  # a restart computes only these again
                self._spent[work.model.id] += time.monotonic() - start
            if isinstance(work, ForwardBackwardJob | OptimStep):
                tokens = work.tokens if isinstance(work, ForwardBackwardJob) else 0
                self._state.count(job.tenant, trained_tokens=tokens, steps=int(isinstance(work, OptimStep)))
            if getattr(work, "part", None) == GRADIENT:
                self._open.add(work.model.id)
            elif isinstance(work, OptimStep | Load):
                self._open.discard(work.model.id)
            self._tell(job, work, result)
        except Exception as error:
            for job, work in works:
                self._fail(job, work, error)

    def _tell(self, job: Job, work: Any, outcome: Result | Exception) -> None:
        """Write how a job ended, and then its model's state if it is due. Tell it when both are written. Meanwhile
        other models' jobs are computed."""
        if isinstance(work, Sample):
            self._end(job, outcome)
            return
        model, state = work.model, self._state
        due = self._is_due(work)
        model.held = due

        def write() -> None:
            try:
                with state.holding(model) if due else nullcontext():
                    job.keep(outcome)
                    if due:
                        self._keep_state(job, model)
            finally:
                self._end(job, outcome)

        state.write(model, write)

    @staticmethod
    def _end(job: Job, outcome: Result | Exception) -> None:
        if isinstance(outcome, Result):
            job.end(outcome)
        else:
            job.fail(outcome)

    def _fail(self, job: Job, work: Any, error: Exception) -> None:
        """Fail a job. A failed gradient makes the step's update fail too. A failed update ends the step, and drops its
        gradient."""
        part = getattr(work, "part", None)
        if part == GRADIENT:
            work.model.spoiled = True
            self._open.add(work.model.id)
        elif part == UPDATE:
            work.model.spoiled = False
            self._open.discard(work.model.id)
            if (session := self._sessions.get(work.model.id)) is not None:
                session.drop()
        if isinstance(job.told, Result) and not isinstance(work, Told):
            work.model.lost = _not_again(job)
        self._tell(job, work, _told(error))

    def _refuse(self, work: Refused) -> Result:
        raise work.error

    def free(self, session: ClientSession) -> None:
        """Free the models of a client's ended session, and remove their samplers without names."""
        for name in session.models:
            self._sessions.pop(name, None)
            self._open.discard(name)
            self._spent.pop(name, None)
        journal = self._state.journal

        def clean() -> None:
            for name in session.models:
                self._forget_hidden(session.tenant, name, keep=0)
            if journal is not None:
                journal.clean(session.id)

        self._state.write(session, clean)

    def _forget_hidden(self, tenant: str, run: str, keep: int) -> None:
        """Remove a model's samplers without names, except the last `keep`."""
        try:
            found = self._checkpoints.hidden(tenant, run)
            for saved in found[: max(0, len(found) - keep)]:
                self._samplers.drop(tenant, saved.path)
                self._checkpoints.discard(tenant, saved)
                self._state.remove_samplers(tenant, saved.path)
        except Exception:  # log the error; the server continues
            log.exception("samplers without names were not removed")

    def _is_due(self, work: Any) -> bool:
        """Tell whether a model's state is written now: after enough computing or enough bytes since the last one, if
        there is no gradient. Where weights come from a checkpoint that may be removed, it is due at once."""
        journal, model = self._state.journal, work.model
        loaded = isinstance(work, Load) or (isinstance(work, Create) and work.checkpoint is not None and not work.kept)
        session = self._sessions.get(model.id)
        if isinstance(work, Create) and not loaded:
            return False
        if journal is None or model.id in self._open or model.lost or session is None or not session.has_weights:
            return False
        # The server refuses passes at `MOST_GROWN`.
        most = min(max(_STATE_BYTES, journal.size(model.id)), states.MOST_GROWN // 2)
        grown = journal.grown(model.id) >= most
        if not (loaded or grown or self._spent[model.id] >= _STATE_SECONDS):
            return False
        self._spent[model.id] = 0
        return True

    def _keep_state(self, job: Job, model: Model) -> None:
        """Write a model's state to the journal, with the requests and results that are still wanted."""
        journal, state, session = self._state.journal, self._state, self._sessions.get(model.id)
        if journal is None or session is None:  # it was freed meanwhile
            return
        try:
            with state.writing_weights(model.tenant):
                switch = journal.keep(model.id, job.seq + 1, model.version, session.write)
            switch(lambda seq: state.carries(state.known(model.tenant, f"{model.id}:{seq}")))
        except Exception:  # the journal still has all requests since the last state
            if model.id in state.models:
                log.exception("the state of %s was not written", model.id)
        finally:
            if model.id not in state.models:  # its session finished meanwhile
                journal.clean(model.session)

    def sweep(self) -> None:
        """Remove expired checkpoints."""

        def sweep() -> None:
            try:
                self._checkpoints.sweep()
            except Exception:  # log the error; the server continues
                log.exception("expired checkpoints were not removed")

        if self._sweep is None or self._sweep.done():
            self._sweep = self._state.writes.do(self._sweeps, sweep)

    # Models

    def targets(self, *, mlp: bool, attention: bool) -> list[str]:
        """Return the names of the linear layers that an adapter trains. The head is not among them."""
        if self._linear is None:
            model, _ = read_model(self._config.model.path, self._config.model.trust_remote_code)
            self._linear = target_modules(model, ALL_LINEAR)
        found = [name for name in self._linear if (attention if _attends(name) else mlp)]
        if not found:
            raise ModelError("the adapter would train no layer")
        return found

    def _config_of(self, adapted: Adapted) -> Config:
        fields = {PREFIX + name: {"dtype": "float32", "level": "label"} for name in FIELDS}
        return self._config.changed(
            {
                "adapter": {"rank": adapted.rank, "alpha": 32.0, "targets": adapted.targets},
                "seed": adapted.seed,
                "loss": PLAIN,
                "optimizer": {"type": "adamw", "learning_rate": 1e-4, "gradient_clip": None},
                "data.fields": fields,
                **NOTHING_IS_DRAWN,
            }
        )

    def _create(self, work: Create) -> Result:
        model = work.model
        if not model.adapted.targets:
            how = {"mlp": model.adapted.train_mlp, "attention": model.adapted.train_attn}
            model.adapted.targets.extend(self.targets(**how))
        made = Result({"model_id": model.id, "type": "create_model"})
        if work.checkpoint is not None:
            made = Result({"path": work.checkpoint, "model_id": model.id, "type": "load_weights"})
        if model.id in self._sessions:  # the client repeated a request whose result was already dropped
            return made
        self._sessions[model.id] = Session(self._config_of(model.adapted), weights=work.kept, base=self._policy)
        if work.checkpoint is None or work.kept is not None:
            return made
        try:
            return self._load(Load(model, 0, work.checkpoint, work.optimizer))
        except BaseException:
            del self._sessions[model.id]
            raise

    def _of(self, model: Model) -> Session:
        session = self._sessions.get(model.id)
        if session is None:
            raise JobError("the model was not created, or its session has finished")
        if model.lost:
            raise JobError(model.lost)
        return session

    def _forward_backward(self, work: ForwardBackwardJob) -> Result:
        session, request = self._of(work.model), work.batch.request
        documents = work.batch.documents
        if request.forward_only:
            scores = session.forward(documents)
        else:
            scores = session.forward_backward(documents, loss_of(request.loss), totals=_SUM)
        outputs, metrics = work.batch.outputs([one.logprobs for one in scores])
        return Result(message=forward_backward_output(outputs, metrics))

    def _optim_step(self, work: OptimStep) -> Result:
        session = self._of(work.model)
        if work.model.spoiled:
            raise JobError("a forward_backward of this step failed: its gradient is dropped, and nothing was updated")
        work.model.version = work.seq  # before the step, because a step that fails may have changed the weights
        made = session.step(work.learning_rate, **work.options)
        names = {"grad_norm": "grad_norm", "learning_rate": "learning_rate", "step": "step"}
        return Result({"metrics": {name: float(made[of]) for name, of in names.items()}, "type": "optim_step"})

    # Checkpoints

    def _begin_save(self, job: Job, work: Save) -> None:
        """Save in the model's order, while other models' jobs are computed."""
        self._of(work.model)
        work.model.held = True

        def write() -> None:
            with self._state.holding(work.model):
                try:
                    outcome: Result | Exception = self._save(work)
                except Exception as error:
                    outcome = _told(error)
                    if isinstance(job.told, Result):
                        work.model.lost = _not_again(job)
                try:
                    job.keep(outcome)
                finally:
                    self._end(job, outcome)

        self._state.write(work.model, write)

    def _save(self, work: Save) -> Result:
        model, session = work.model, self._of(work.model)
        now = self._checkpoints.now()
        expires = None if work.expires_in is None else now + work.expires_in
        hidden = work.sampler is not None
        saved = Saved(
            model.id,
            work.kind,
            work.name,
            now,
            asdict(model.adapted),
            session.steps,
            expires,
            work.user_metadata,
            hidden,
            request=f"{model.id}:{work.seq}",
        )
        keeps = work.kind == WEIGHTS

        def write(folder: Path) -> Path:
            return session.write(folder, optimizer=keeps, leave_open=True)

        def room() -> None:
            if (most := self._state.quota(model.tenant).bytes) is not None:
                self._checkpoints.check_room(model.tenant, most, self._state.live_bytes(model.tenant))

        with self._state.writing_weights(model.tenant):  # so that the next save's quota check counts this one
            saved = self._checkpoints.write(model.tenant, saved, write, overwrite=work.overwrite, room=room)
        self._samplers.drop(model.tenant, saved.path)
        if work.sampler is None:
            return Result(
                {"path": saved.path, "type": f"save_{work.kind}".replace("sampler_weights", "weights_for_sampler")}
            )
        whose = (work.sampler, model.tenant, model.session, model.base)
        sampler = Sampler(*whose, saved.path, model.id, model.version, work.inflight)

        owner = self._state.sessions.get(model.session)

        def add() -> None:
            ended = owner is None or owner.finished  # the session may have ended meanwhile
            self._forget_hidden(model.tenant, model.id, keep=0 if ended else _MOST_HIDDEN)
            self._state.add_sampler(sampler)

        if owner is None:
            add()
        else:
            self._state.write(owner, add).result()
        return Result({"sampling_session_id": work.sampler, "type": "save_weights_for_sampler"})

    def _load(self, work: Load) -> Result:
        saved, directory = self._checkpoints.find(work.model.tenant, work.checkpoint)
        if saved.kind != WEIGHTS and work.optimizer:
            raise JobError(f"{saved.path} has no state of an optimizer: it was saved for a sampler")
        own, theirs = asdict(work.model.adapted), {**saved.adapted}
        if (own["rank"], own["targets"]) != (theirs["rank"], theirs["targets"]):
            raise JobError(f"{saved.path} has an adapter of rank {theirs['rank']} on other layers than this model's")
        lost, work.model.lost = work.model.lost, ""
        session = self._of(work.model)
        work.model.version, work.model.lost = work.seq, lost
        session.load(directory, optimizer=work.optimizer)
        work.model.spoiled, work.model.lost = False, ""
        return Result({"path": saved.path, "model_id": work.model.id, "type": "load_weights"})

    # Samples

    def _sample(self, works: Sequence[tuple[Job, Sample]]) -> None:
        """Sample for all jobs together. A job ends when all of its samples are drawn, or fails alone."""
        session = self._sampled_from(works[0][1].sampler)
        policy = self._policy if session is None else session.policy
        owners = [(job, work) for job, work in works for _ in range(work.asked.count)]
        members = [(work, member) for _, work in works for member in range(work.asked.count)]
        requests = [Request(work.asked.prompt, work.asked.draw, (work.seed, member)) for work, member in members]
        drawn: dict[Job, list[tuple[int, Completion]]] = {job: [] for job, _ in works}

        def done(number: int, completion: Completion) -> None:
            job, work = owners[number]
            drawn[job].append((number, completion))
            if len(drawn[job]) == work.asked.count and not work.asked.scores:
                self._answer(policy, job, work, drawn[job])

        try:
            if session is None:
                self._base.map(list(enumerate(requests)), completing(done))
            else:
                session.complete(requests, done)
        except Exception:
            if len(works) == 1:
                raise
            for job, _ in works:
                self.run([job])
            return
        for job, work in works:
            if work.asked.scores:
                self._answer(policy, job, work, drawn[job])

    def _answer(self, policy: Policy, job: Job, work: Sample, drawn: list[tuple[int, Completion]]) -> None:
        own = [completion for _, completion in sorted(drawn, key=lambda one: one[0])]
        job.drawn = sum(len(one.token_ids) for one in own)
        self._state.count(job.tenant, prompt_tokens=len(work.asked.prompt), sampled_tokens=job.drawn)
        try:
            job.end(Result(message=sample_response(answer(policy, work, own))))
        except Exception as error:
            self._fail(job, work, error)

    def _sampled_from(self, sampler: Sampler) -> Session | None:
        """Return the session with a sampler's weights; None: sample from the base model."""
        if sampler.path is None:
            return None
        model = self._state.models.get(sampler.model or "")
        if model is not None and (sampler.inflight or model.version == sampler.version) and model.id in self._sessions:
            return self._sessions[model.id]
        saved, directory = self._checkpoints.find(sampler.tenant, sampler.path)
        found = self._samplers.get(sampler.tenant, saved.path)
        if found is None:
            found = Session(self._config_of(Adapted(**saved.adapted)), weights=directory, base=self._policy)
        self._samplers.keep(sampler.tenant, saved.path, found)
        return found


def _told(error: Exception) -> Exception:
    """Return the error that a client gets."""
    if isinstance(error, TruestepError | JobError | ApiError):
        return JobError(str(error))
    if not isinstance(error, ServerError):  # a ServerError was logged where it occurred
        log.error("a job failed", exc_info=error)
        return ServerError(type(error).__name__)
    return error


def _not_again(job: Job) -> str:
    return f"{job.id} could not be computed again after a restart: load a checkpoint"


def _attends(layer: str) -> bool:
    return "attn" in layer or "attention" in layer
