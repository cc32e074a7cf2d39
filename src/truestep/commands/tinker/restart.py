"""Brings sessions, models, samplers and requests back from the journal when the server starts."""

import logging
from collections.abc import Mapping
from typing import Any

from truestep.commands.tinker.checkpoints import Adapted
from truestep.commands.tinker.journal import Journal
from truestep.commands.tinker.objects import Job, Model, Outcome, Sampler
from truestep.commands.tinker.orders import Orders, told_of
from truestep.commands.tinker.state import State
from truestep.commands.tinker.work import Create

log = logging.getLogger(__name__)


def restart(state: State, journal: Journal, orders: Orders) -> set[str]:
    """Begin the sessions of the journal again. Requests since the last state of each model are computed again, in their
    order. A client that has got a request's result gets the same again. Return all sessions that are not forgotten,
    also those that wait for the server of another model."""
    names = journal.sessions()
    for name in list(names):
        try:
            events = journal.events(name)
            if not events or events[0]["kind"] != "session":  # the client never got the session's id
                journal.forget(name)
                journal.clean(name)
                names.remove(name)
            elif _is_for(state, journal, name, events[0]):
                _begin(state, journal, orders, name, events)
        except Exception:  # the other sessions go on
            state.leave(name)
            log.exception("session %s cannot be read: it is not gone on with. Its files stay", journal.place(name))
    return set(names)


def _is_for(state: State, journal: Journal, name: str, begun: Mapping[str, Any]) -> bool:
    """Tell whether a session began with what this server serves. If it did not, say so."""
    if begun["base"] != state.base:
        log.warning("session %s is of %s, which this server does not serve: it waits", name, begun["base"])
    elif "computes" not in begun:
        said = "session %s is of an older truestep, which did not write what it computes with: it is not gone on with"
        log.warning(f"{said}. Its checkpoints are there; remove %s to forget it", name, journal.place(name))
    elif begun["computes"] != state.computes:
        said = "session %s began with other weights in %s, or with other options of its numbers: it waits for those"
        log.warning(said, name, begun["base"])
    else:
        return True
    return False


def _begin(state: State, journal: Journal, orders: Orders, name: str, events: list[dict[str, Any]]) -> None:
    session = state.begin_again(name, events[0])
    for event in events[1:]:
        kind, about = event["kind"], {key: value for key, value in event.items() if key != "kind"}
        if kind == "sampler":
            state.samplers[about["id"]] = Sampler(**about)
            if about["id"] not in session.samplers:
                session.samplers.append(about["id"])
        elif kind == "gone":
            state.samplers.pop(about["id"], None)
            if about["id"] in session.samplers:
                session.samplers.remove(about["id"])
        elif kind == "clones":
            session.clones = about["count"]
        elif about["id"] not in state.models:
            adapted = Adapted(**about["adapted"])
            model = Model(about["id"], session.tenant, name, about["base"], adapted, about["user_metadata"])
            state.models[model.id] = model
            session.models.append(model.id)
            _go_on(state, journal, orders, model, about["how"])


def _go_on(state: State, journal: Journal, orders: Orders, model: Model, how: Mapping[str, Any]) -> None:
    """Go on with a model from its last state."""
    kept = journal.kept(model.id)
    model.next_seq, model.version = kept.next_seq, kept.version
    work = Create(model, **how, kept=kept.checkpoint)
    reads = work.checkpoint if kept.checkpoint is None else None
    state.submit(Job(f"{model.id}:0", model.tenant, model.session, work, model=model.id, reads=reads), again=True)
    told: dict[int, Outcome] = {
        one.seq: told_of(one.head, one.body) for one in journal.records(model.id) if not one.is_request
    }
    for record in journal.records(model.id):
        if record.is_request:
            outcome = told.pop(record.seq, None)
            state.submit(
                orders.job_again(model, record.seq, record.head["path"], record.body, outcome), model, again=True
            )
    for seq, outcome in told.items():  # these requests came before the state
        name = f"{model.id}:{seq}"
        state.ended_before(Job(name, model.tenant, model.session, None, model=model.id, seq=seq, told=outcome))
