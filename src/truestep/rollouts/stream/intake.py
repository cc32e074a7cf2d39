"""The intake of streamed documents: repeated ids are rejected, and documents are used once their group is complete."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from truestep.rollouts.advantages import as_rule, assign_advantages
from truestep.rollouts.documents import document_line, read_document
from truestep.rollouts.fields import Field
from truestep.rollouts.files import DataError
from truestep.rollouts.record import BadRecord, Checks, with_defaults
from truestep.rollouts.selection import choose_truncated
from truestep.rollouts.sequences import Joiner, Unfinished, missing_sequences
from truestep.rollouts.stream.ids import SeenIds
from truestep.rollouts.stream.transport import Message
from truestep.rollouts.values import describe
from truestep.text import printable
from truestep.types import PutAside, Rejected, Rollout

MOST_OPEN_BYTES = 2**30  # memory limit of the documents in open groups
_PLACE_BYTES = 256  # estimated size of a group's member, without its document


@dataclass(frozen=True)
class _Member:
    rollout: Rollout
    file: str  # the file of its message
    line: int

    @property
    def size(self) -> int:
        """An estimate of the member's bytes in memory."""
        rollout = self.rollout
        arrays = [rollout.input_ids, rollout.loss_mask, rollout.logprobs, rollout.advantages, rollout.model_version]
        arrays += [*rollout.fields.values(), *rollout.token_fields.values()]
        turns = _PLACE_BYTES * len(rollout.turns)
        return 2 * _PLACE_BYTES + turns + sum(array.nbytes for array in arrays if array is not None)


@dataclass
class _Group:
    """An open group. A rejected record is the member None."""

    opened: float
    members: list[_Member | None] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(_PLACE_BYTES if member is None else member.size for member in self.members)

    def state(self, clock: float) -> dict[str, Any]:
        lines = [None if member is None else _member_line(member) for member in self.members]
        return {"age": clock - self.opened, "members": lines}


class Intake:
    """The documents that were received and not yet taken, and the ids of all received records.

    Records with the same `document_id` become one document when all of them have come.
    Documents become ready when their group is complete, in the order of completion; members of a group keep their
    order. A group that stays open for `group_timeout` is given up. If open groups take too much memory, the oldest is.
    """

    def __init__(self, checks: Checks, ids: SeenIds, group_timeout: float | None = None):
        self._checks = checks
        self._grouped = checks.needs.advantages and as_rule(checks.needs.advantage_rule).from_rewards
        self._groups: dict[str, _Group] = {}  # open groups, oldest first
        self._open_bytes = 0  # estimated bytes of the records in open groups and documents
        self._group_timeout = math.inf if group_timeout is None else group_timeout
        self._clock = 0.0
        self._ids = ids
        self._joiner = Joiner(lambda name: _closed(name) in ids, checks.fields)
        self.ready: deque[Rollout] = deque()
        self.rejected: list[Rejected] = []
        self.put_aside: list[PutAside] = []
        self.num_rejected = 0
        self.accepted = 0

    def add(self, message: Message, outcome: Rollout | BadRecord, clock: float = 0.0) -> None:
        """Add a message and its parsed document or error. `clock` is the time for `group_timeout`."""
        self.expire(clock)
        if isinstance(outcome, Rollout):
            problem = self._joiner.name_problem(outcome, self._ids.__contains__)
            if problem is not None:  # like a repeated record, this one is not a member of a group
                self._reject(message.where, message.file, message.line, BadRecord(problem, id=outcome.id))
                return
        if isinstance(outcome, BadRecord):
            self._reject(message.where, message.file, message.line, outcome)
            if (name := outcome.document_id) is not None:
                self._to_document(name, lambda: self._joiner.add_bad(outcome, self._clock))
            elif outcome.group_id is not None:
                self._place(outcome.group_id, None)
        elif (taken := self._with_new_id(message, outcome)) is not None:
            self.accepted += 1
            member = _Member(taken, message.file, message.line)
            if taken.document_id is None:
                self._place(taken.group_id, member)
            else:
                self._to_document(taken.document_id, lambda: self._joiner.add(taken, member, self._clock))
        else:
            # A repeated record is not a member of its group: a sender that retries a record would otherwise close the
            # group before its last member arrives.
            reason = f"id is {describe(outcome.id)}: repeated, a document of this id came before"
            error = BadRecord(reason, id=outcome.id, group_id=outcome.group_id)
            self._reject(message.where, message.file, message.line, error)

    def _to_document(self, name: str, add: Callable[[], Unfinished | None]) -> None:
        """Add a record to its document, and put the document into its group if it is complete."""
        before = self._size_of(name)
        complete = add()
        self._open_bytes += (self._size_of(name) if complete is None else complete.size) - before
        if complete is not None:
            self._join(name, complete)

    def _size_of(self, document_id: str) -> int:
        document = self._joiner.open.get(document_id)
        return 0 if document is None else document.size

    def _join(self, name: str, document: Unfinished) -> None:
        """Put a document of several sequences into its group, or reject it."""
        self._open_bytes -= document.size
        self._ids.add(_closed(name))
        last: list[_Member] = [member for _, member in document.members]
        joined, refused = self._joiner.close(document)
        if joined is not None:
            self._place(joined.group_id, _Member(joined, last[-1].file, last[-1].line))
            return
        for rollout, member, reason, _ in refused:
            error = BadRecord(reason, id=rollout.id, group_id=document.group_id)
            self._reject(f"{member.file}:{member.line}", member.file, member.line, error)
        if document.group_id is not None:
            self._place(document.group_id, None)

    def _with_new_id(self, message: Message, rollout: Rollout) -> Rollout | None:
        """Return the document with a unique id, or None if it came before.

        A record without an id is identified by its place and content, since a file's name may be reused. Its default id
        gets a number if a record with other content had the same place.
        """
        if rollout.id != message.where or message.content is None:
            return rollout if self._ids.add(rollout.id) else None
        if not self._ids.add(message.content):
            return None
        numbered = (f"{message.where}#{number}" for number in itertools.count(2))
        id = next(id for id in itertools.chain([message.where], numbered) if self._ids.add(id))
        return replace(rollout, id=id)

    def expire(self, clock: float) -> None:
        """Give up groups that have been open for too long or take too much memory.

        Their documents are rejected, because the baseline of an incomplete group would be wrong.
        """
        self._clock = max(self._clock, clock)
        while self._joiner.open:
            document_id, document = next(iter(self._joiner.open.items()))
            if self._clock - document.opened >= self._group_timeout:
                when = f"after {self._group_timeout:g} s (data.group_timeout)"
            elif self._open_bytes > MOST_OPEN_BYTES:
                when = f"when documents that were not complete took more than {MOST_OPEN_BYTES // 2**20} MiB"
            else:
                break
            del self._joiner.open[document_id]
            document.problem = document.problem or missing_sequences(document, when)
            self._join(document_id, document)
        while self._groups:
            group_id, group = next(iter(self._groups.items()))
            if self._clock - group.opened >= self._group_timeout:
                self._give_up(group_id, f"for {self._group_timeout:g} s (data.group_timeout)")
            elif self._open_bytes > MOST_OPEN_BYTES:
                self._give_up(group_id, f"longest while open groups took more than {MOST_OPEN_BYTES // 2**20} MiB")
            else:
                return

    def finish(self) -> None:
        """Close all open documents and groups, since no more records will come."""
        for name, document in self._joiner.finish():
            self._join(name, document)
        for group_id in list(self._groups):
            self._close(group_id)

    def _reject(self, where: str, file: str, line: int, error: BadRecord) -> None:
        if self._checks.stop_at_rejected:
            raise DataError(f"data.on_bad_record: stop: {printable(where)}: {error.reason}")
        self.rejected.append(Rejected(file, line, error.reason, error.id, error.group_id))
        self.num_rejected += 1

    def _give_up(self, group_id: str, how_long: str) -> None:
        group = self._pop(group_id)
        size = f"{len(group.members)} of {self._checks.group_size} records"
        reason = f"its group {describe(group_id)} was open {how_long} and had {size}"
        for member in group.members:
            if member is not None:
                error = BadRecord(reason, id=member.rollout.id, group_id=group_id)
                self._reject(f"{member.file}:{member.line}", member.file, member.line, error)

    def _place(self, group_id: str | None, member: _Member | None) -> None:
        if self._grouped and group_id is not None:
            group = self._groups.setdefault(group_id, _Group(self._clock))
            group.members.append(member)
            self._open_bytes += _PLACE_BYTES if member is None else member.size
            if len(group.members) == self._checks.group_size:
                self._close(group_id)
        elif member is not None:
            self._use([member.rollout])

    def _pop(self, group_id: str) -> _Group:
        group = self._groups.pop(group_id)
        self._open_bytes -= group.size
        return group

    def _close(self, group_id: str) -> None:
        # Rejected members counted towards the group's size, but are not part of the baseline.
        rollouts = [member.rollout for member in self._pop(group_id).members if member is not None]
        self._use(assign_advantages(rollouts, rule=self._checks.needs.advantage_rule, group_size=None))

    def _use(self, rollouts: list[Rollout]) -> None:
        chosen, put_aside = choose_truncated(rollouts, self._checks.truncated)
        self.ready.extend(chosen)
        self.put_aside += put_aside

    @property
    def in_open_groups(self) -> tuple[int, int]:
        """The numbers of documents in open groups and of open groups with documents."""
        waiting = [sum(member is not None for member in group.members) for group in self._groups.values()]
        return sum(waiting), sum(map(bool, waiting))

    @property
    def in_open_documents(self) -> tuple[int, int]:
        """The number of records of incomplete documents, and the number of these documents."""
        unfinished = self._joiner.open.values()
        return sum(document.come for document in unfinished), len(unfinished)

    def state(self) -> dict[str, Any]:
        return {
            "unfinished": {name: _unfinished_line(one, self._clock) for name, one in self._joiner.open.items()},
            "ready": [document_line(rollout) for rollout in self.ready],
            "open": {group_id: group.state(self._clock) for group_id, group in self._groups.items()},
            # If the run stops while it waits for documents, these are not in the ledger yet.
            "put_aside": [[one.id, one.reason, one.group_id] for one in self.put_aside],
            "ids": self._ids.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.ready = deque(read_document(line) for line in state["ready"])
        self._groups = {group_id: _read_group(group) for group_id, group in state["open"].items()}
        fields, unfinished = self._checks.fields, state.get("unfinished", {})
        self._joiner.open = {name: _read_unfinished(one, fields) for name, one in unfinished.items()}
        self._open_bytes = sum(group.size for group in self._groups.values())
        self._open_bytes += sum(document.size for document in self._joiner.open.values())
        self.put_aside = [PutAside(*one) for one in state.get("put_aside", ())]
        self._clock = 0.0
        self._ids.restore(state["ids"])

    def close(self) -> None:
        self._ids.close()


def _member_line(member: _Member) -> dict[str, Any]:
    return {"file": member.file, "line": member.line, "document": document_line(member.rollout)}


def _read_member(line: dict[str, Any]) -> _Member:
    return _Member(read_document(line["document"]), line["file"], line["line"])


def _read_group(state: dict[str, Any]) -> _Group:
    return _Group(-state["age"], [None if line is None else _read_member(line) for line in state["members"]])


def _unfinished_line(document: Unfinished, clock: float) -> dict[str, Any]:
    return {
        "age": clock - document.opened,
        "expected": document.expected,
        "come": document.come,
        "problem": document.problem,
        "group_id": document.group_id,
        "bad": sorted(document.bad),
        "size": document.size,
        "members": [_member_line(member) for _, member in document.members],
    }


def _read_unfinished(state: dict[str, Any], declared: Sequence[Field]) -> Unfinished:
    """Read an unfinished document. Its records get the defaults of fields that were declared after the checkpoint."""
    read = map(_read_member, state["members"])
    members = [replace(one, rollout=with_defaults(one.rollout, declared)) for one in read]
    return Unfinished(
        state["expected"],
        state["come"],
        [(member.rollout, member) for member in members],
        state["problem"],
        state["group_id"],
        set(state["bad"]),
        -state["age"],
        state["size"],
    )


def _closed(name: str) -> str:
    """Return the id that records that a document of several sequences was completed or given up."""
    return f"document_id {name}"
