"""The conversion of messages to documents: checked, new, and used only when their group is complete."""

import base64
import hashlib
from collections import deque
from typing import Any

from truestep.rollouts.advantages import as_rule, assign_advantages
from truestep.rollouts.documents import document_line, read_document
from truestep.rollouts.files import DataError, parse_json, readable
from truestep.rollouts.record import BadRecord, Checks, parse_record
from truestep.rollouts.selection import choose_truncated
from truestep.rollouts.stream.transport import Message
from truestep.rollouts.values import describe
from truestep.types import PutAside, Rejected, Rollout

_DIGEST = 8  # bytes of an id's digest: among a million ids two are alike with a chance of 3 in 100 million


class Intake:
    """The documents that were received and not yet taken, and the ids of all that ever were received.

    Documents become ready in the order in which their groups become complete, members in the order they came in.
    """

    def __init__(self, checks: Checks):
        self._checks = checks
        self._grouped = checks.needs.advantages and as_rule(checks.needs.advantage_rule).from_rewards
        self._groups: dict[str, list[Rollout | None]] = {}  # open ones; None is the place of a rejected record
        self._ids = bytearray()  # as a checkpoint holds them
        self._known: set[bytes] = set()
        self.ready: deque[Rollout] = deque()
        self.rejected: list[Rejected] = []
        self.put_aside: list[PutAside] = []
        self.accepted = 0

    def add(self, message: Message) -> None:
        try:
            if message.problem is not None:
                raise BadRecord(message.problem)
            rollout = parse_record(readable(parse_json(message.payload)), message.where, self._checks)
        except BadRecord as error:
            self._reject(message, error)
            if error.group_id is not None:
                self._place(error.group_id, None)
            return
        if self._is_new(rollout.id):
            self.accepted += 1
            self._place(rollout.group_id, rollout)
        else:
            # It fills no place in its group: whoever sends a record twice, not knowing whether the first arrived, would
            # close the group before its last member came.
            reason = f"id is {describe(rollout.id)}: repeated, a document of this id came before"
            self._reject(message, BadRecord(reason, id=rollout.id, group_id=rollout.group_id))

    def finish(self) -> None:
        """Close every open group: no more will come."""
        for group_id in list(self._groups):
            self._close(group_id)

    def _reject(self, message: Message, error: BadRecord) -> None:
        if self._checks.stop_at_rejected:
            raise DataError(f"data.on_bad_record: stop: {message.where}: {error.reason}")
        self.rejected.append(Rejected(message.file, message.line, error.reason, error.id, error.group_id))

    def _is_new(self, identifier: str) -> bool:
        digest = hashlib.blake2b(identifier.encode(), digest_size=_DIGEST).digest()
        if digest in self._known:
            return False
        self._known.add(digest)
        self._ids += digest
        return True

    def _place(self, group_id: str | None, rollout: Rollout | None) -> None:
        if self._grouped and group_id is not None:
            group = self._groups.setdefault(group_id, [])
            group.append(rollout)
            if len(group) == self._checks.group_size:
                self._close(group_id)
        elif rollout is not None:
            self._use([rollout])

    def _close(self, group_id: str) -> None:
        # A rejected member has had its effect, which is that the group is complete: the baseline is the others'.
        rollouts = [rollout for rollout in self._groups.pop(group_id) if rollout is not None]
        self._use(assign_advantages(rollouts, rule=self._checks.needs.advantage_rule, group_size=None))

    def _use(self, rollouts: list[Rollout]) -> None:
        chosen, put_aside = choose_truncated(rollouts, self._checks.truncated)
        self.ready.extend(chosen)
        self.put_aside += put_aside

    @property
    def in_open_groups(self) -> tuple[int, int]:
        """Count the documents that wait for the rest of their groups, and those groups."""
        waiting = [sum(member is not None for member in group) for group in self._groups.values()]
        return sum(waiting), sum(map(bool, waiting))

    def state(self) -> dict[str, Any]:
        return {
            "ready": [document_line(rollout) for rollout in self.ready],
            "open": {
                group_id: [None if member is None else document_line(member) for member in group]
                for group_id, group in self._groups.items()
            },
            "ids": base64.b64encode(self._ids).decode("ascii"),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.ready = deque(read_document(line) for line in state["ready"])
        self._groups = {
            group_id: [None if line is None else read_document(line) for line in group]
            for group_id, group in state["open"].items()
        }
        self._ids = bytearray(base64.b64decode(state["ids"]))
        self._known = {bytes(self._ids[at : at + _DIGEST]) for at in range(0, len(self._ids), _DIGEST)}
