"""Reads the requests of a model that are computed in the order of their seq_id: from a client, or from the journal."""

import json
import logging
import re
import sys
from typing import Any

from truestep.commands.tinker import wire
from truestep.commands.tinker.bodies import read_json
from truestep.commands.tinker.checkpoints import SAMPLER, WEIGHTS, named, time_to_live
from truestep.commands.tinker.errors import ApiError, JobError, ServerError, not_served
from truestep.commands.tinker.objects import Job, Model, Outcome, Result
from truestep.commands.tinker.requests import Model as Fits
from truestep.commands.tinker.requests import batch_of
from truestep.commands.tinker.work import GRADIENT, UPDATE, ForwardBackwardJob, Load, OptimStep, Refused, Save, Told

log = logging.getLogger(__name__)

_LARGEST_FLOAT = sys.float_info.max
_METADATA = 64  # most entries of metadata that a tenant may attach
_REFUSED = "refused"  # the path in the journal of a request that could not be read

Body = dict[str, Any]
JSON_PATHS = ("optim_step", "save_weights", "save_weights_for_sampler", "load_weights", "save_weights_external")


class Orders:
    def __init__(self, fits: Fits):
        self._fits = fits

    def job(self, model: Model, seq: int, path: str, body: bytes, refused: ApiError | None = None) -> Job:
        """Return the job of a request. An invalid request also gets a job, which fails in its turn, because later
        requests of the model wait for it. `refused`: why it is one, if that is known."""
        size = len(body)
        try:
            if refused is not None:
                raise refused
            work = self._read(model, seq, path, body)
        except Exception as error:
            own = isinstance(error, ApiError | wire.WireError)
            if not own:  # a bug in this server
                log.exception("a request could not be read")
            said = str(error)[:4000] if own else type(error).__name__
            work = Refused(model, JobError(said) if own else ServerError(said), _part(path, body))
            path, body = _REFUSED, json.dumps({"error": said, "own": own, "part": work.part}).encode()
        name, tokens = f"{model.id}:{seq}", work.tokens if isinstance(work, ForwardBackwardJob) else 0
        order: Body = {"seq": seq, "path": path, "body": body, "reads": getattr(work, "checkpoint", None)}
        return Job(name, model.tenant, model.session, work, model=model.id, size=size, tokens=tokens, **order)

    def job_again(self, model: Model, seq: int, path: str, body: bytes, told: Outcome | None) -> Job:
        """Return the job of a request of the journal. `told`: the outcome that its client has got, and gets
        again."""
        if path == _REFUSED:
            given = json.loads(body)
            error = JobError(given["error"]) if given["own"] else ServerError(given["error"])
            work: Any = Refused(model, error, given["part"])
        elif isinstance(told, Exception):
            work = Refused(model, told, _part(path, body))
        elif told is not None and _part(path, body) is None and path != "load_weights":
            work = Told(model)
        else:
            job = self.job(model, seq, path, body)
            job.told = told
            return job
        size = len(body)
        return Job(
            f"{model.id}:{seq}", model.tenant, model.session, work, model=model.id, size=size, seq=seq, told=told
        )

    def _read(self, model: Model, seq: int, path: str, raw: bytes) -> Any:
        if path == "forward_backward":
            return ForwardBackwardJob(model, batch_of(wire.read_forward_backward(raw), self._fits))
        body = read_json(raw)
        if path == "optim_step":
            return OptimStep(model, seq, *_adamw(body))
        if path == "load_weights":
            check_own(body)
            return Load(model, seq, str(body.get("path")), body.get("optimizer") is True)
        if path == "save_weights":
            name = f"{seq:06d}" if body.get("path") is None else named(body.get("path"))
            return Save(model, seq, WEIGHTS, name, *_kept(body), overwrite=body.get("overwrite") is True)
        if path == "save_weights_for_sampler":
            return _save_for_sampler(model, seq, body)
        raise not_served("an export by a client (`truestep export` makes one of a checkpoint)")


def told_of(head: Body, message: bytes) -> Outcome:
    """Return how a job ended, as `State` wrote it to the journal."""
    if "error" in head:
        return JobError(head["error"]) if head["user"] else ServerError(head["error"])
    return Result(json=head["json"]) if "json" in head else Result(message=message)


def _part(path: str, body: bytes) -> str | None:
    """Return the part of a request in a training step."""
    if path == "forward_backward":
        return None if wire.read_head(body).forward_only else GRADIENT
    return UPDATE if path == "optim_step" else None


def _save_for_sampler(model: Model, seq: int, body: Body) -> Save:
    if (kind := body.get("kind", "snapshot")) not in ("snapshot", "inflight"):
        raise ApiError("kind: snapshot or inflight is expected")
    if body.get("path") is not None:
        return Save(model, seq, SAMPLER, named(body.get("path")), *_kept(body))
    sampler = f"{model.session}:sample:{whole_number(body, 'sampling_session_seq_id')}"
    return Save(model, seq, SAMPLER, f"unnamed-{seq:06d}", *_kept(body), True, sampler, kind == "inflight")


def whole_number(body: Body, name: str) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise ApiError(f"{name}: a whole number is expected")
    return value


def _kept(body: Body) -> tuple[float | None, dict[str, str] | None]:
    """Read a checkpoint's time to live and its metadata."""
    return time_to_live(body.get("ttl_seconds")), metadata_of(body.get("user_metadata"))


def metadata_of(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > _METADATA or len(json.dumps(given)) > 2**16:
        raise ApiError(f"user_metadata: an object of up to {_METADATA} entries is expected")
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}


def check_own(body: Body) -> None:
    if body.get("weights_access_token") is not None:
        raise not_served("a checkpoint of another account")


def check_optimizer(given: Any) -> None:
    if given is not None and (not isinstance(given, dict) or given.get("type", "adamw") != "adamw"):
        kind = re.sub(r"[^ -~]", "?", str(given.get("type") if isinstance(given, dict) else given))[:60]
        raise not_served(f"an optimizer of type {kind} (only adamw is)")


def _adamw(body: Body) -> tuple[float, dict[str, float | None]]:
    """Read the parameters of an update: the learning rate, and the options for `Session.step`."""
    given = body.get("adam_params")
    if given is None and body.get("optimizer_params") is not None:
        check_optimizer(body.get("optimizer_params"))
    if not isinstance(given, dict):
        raise ApiError("adam_params: an object is expected")
    own = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    if odd := sorted(set(given) - set(own)):
        raise ApiError(f"adam_params: {odd[0][:60]} is unknown: there are {', '.join(own)}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST_FLOAT:
            raise ApiError(f"adam_params: {name} is {value!r:.60}: a finite number of 0 or more is expected")
        if name in ("beta1", "beta2") and value >= 1:
            raise ApiError(f"adam_params: {name} must be below 1")
        own[name] = float(value)
    clip = own["grad_clip_norm"] or None
    names = {"beta1": "beta1", "beta2": "beta2", "eps": "epsilon", "weight_decay": "weight_decay"}
    return own["learning_rate"], {**{to: own[of] for of, to in names.items()}, "gradient_clip": clip}
