"""Documents of several sequences: records with the same `document_id` are joined when all of them have arrived.

A sequence is the tokens that the model saw in one context. An episode has several if its conversation was rewritten on
the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from truestep.rollouts.fields import TABLE, Field
from truestep.rollouts.values import BadRecord, describe
from truestep.types import PLACES, Rollout

_RECORD_BYTES = 512  # estimated bytes of a record, without its values
_MOST = 4096  # sequences of a document
# Values that a document has only once, so all its records must agree in them. Maps each attribute to its name in a
# record.
_AGREED = {
    "num_sequences": "sequences",
    "group_id": "group_id",
    "reward": "reward",
    "rewards": "rewards",
    "truncated": "truncated",
    "temperature": "temperature",
    "one_advantage": "advantage",
}


def check_membership(rollout: Rollout) -> None:
    """Check the fields that make a record one of several sequences."""
    if rollout.document_id is None and rollout.num_sequences is None:
        return
    if rollout.document_id is None:
        raise BadRecord("document_id is missing: sequences says how many records of one document_id there are")
    if rollout.num_sequences is None:
        raise BadRecord("sequences is missing: it says how many records have this document_id")
    if rollout.num_sequences > _MOST:
        raise BadRecord(f"sequences is {rollout.num_sequences}: expected at most {_MOST}")


@dataclass
class Unfinished:
    """A document whose sequences have not all arrived."""

    expected: int | None = None  # the number of sequences; None: no record has stated it yet
    come: int = 0  # the number of sequences that have arrived, including bad ones
    members: list[tuple[Rollout, Any]] = field(default_factory=list)  # good sequences, each with the reader's note
    problem: str | None = None  # why the document is rejected
    group_id: str | None = None  # the group in which the document counts: that of its first record with a group
    bad: set[str] = field(default_factory=set)  # ids of its bad records
    opened: float = 0.0  # the reader's clock when the first sequence arrived
    size: int = 0  # an estimate of its bytes in memory, if the reader's notes have a `size`

    @property
    def complete(self) -> bool:
        return self.expected is not None and self.come >= self.expected


@dataclass
class Joiner:
    """Collects the records of documents of several sequences, in the order in which they come."""

    closed: Callable[[str], bool]  # tells whether a document of this name was completed or given up before
    declared: Sequence[Field] = ()  # the user's fields
    open: dict[str, Unfinished] = field(default_factory=dict)  # by document_id, oldest first

    def name_problem(self, rollout: Rollout, taken: Callable[[str], bool]) -> str | None:
        """Return why a record's `id` or `document_id` belongs to another document; None if it does not. `taken` tells
        whether an earlier record has an id."""
        name = rollout.document_id
        if name is None and (rollout.id in self.open or self.closed(rollout.id)):
            return f"id is {describe(rollout.id)}: the document_id of others"
        if name is not None and name not in self.open and (self.closed(name) or taken(name)):
            return f"document_id is {describe(name)}: repeated, a document of this name came before"
        return None

    def add(self, rollout: Rollout, note: Any = None, clock: float = 0.0) -> Unfinished | None:
        """Add a record with a `document_id`. Returns its document if it is complete."""
        assert rollout.document_id is not None
        document = self._of(rollout.document_id, rollout.num_sequences, rollout.group_id, clock)
        document.members.append((rollout, note))
        document.size += getattr(note, "size", 0)
        if document.problem is None:
            document.problem = disagreement(document.members[0][0], rollout)
        return self._completed(rollout.document_id)

    def add_bad(self, error: BadRecord, clock: float = 0.0) -> Unfinished | None:
        """Count a bad record of a document, and mark the document as rejected. Returns the document if it is
        complete."""
        name = error.document_id
        if name is None or (name not in self.open and self.closed(name)):
            return None
        if name in self.open and error.id in self.open[name].bad:
            return None  # the same bad record was sent again
        document = self._of(name, error.num_sequences, error.group_id, clock)
        if error.id is not None:
            document.bad.add(error.id)
            document.size += len(error.id)
        if document.problem is None:
            which = "of its sequences" if error.id is None else f"of its sequences, {describe(error.id)},"
            document.problem = f"one {which} was rejected: {error.reason}"
        return self._completed(name)

    def _of(self, document_id: str, expected: int | None, group_id: str | None, clock: float) -> Unfinished:
        document = self.open.setdefault(document_id, Unfinished(opened=clock))
        document.come += 1
        document.size += _RECORD_BYTES
        # Records that disagree still belong to the document, so that none of them begins a new document of the same
        # name.
        document.expected = max(filter(None, (document.expected, expected)), default=None)
        document.group_id = document.group_id or group_id
        return document

    def _completed(self, document_id: str) -> Unfinished | None:
        return self.open.pop(document_id) if self.open[document_id].complete else None

    def close(self, document: Unfinished) -> tuple[Rollout | None, list[tuple[Rollout, Any, str, str | None]]]:
        """Join a document and return it. If it is rejected, return for each of its good records: the record, the
        reader's note, the reason, and a group. Only the first of these has the document's group, so that the document
        counts once."""
        if document.problem is None:
            try:
                return join([member for member, _ in document.members], self.declared), []
            except BadRecord as error:
                document.problem = error.reason
        return None, [
            (member, note, rejection(document, member), None if number else document.group_id)
            for number, (member, note) in enumerate(document.members)
        ]

    def finish(self) -> list[tuple[str, Unfinished]]:
        """Return the documents that will never be complete, with their names and the reason."""
        left = list(self.open.items())
        for _, document in left:
            document.problem = document.problem or missing_sequences(document, "at the end of the data")
        self.open.clear()
        return left


def missing_sequences(document: Unfinished, when: str) -> str:
    return f"its document had {document.come} of {document.expected} sequences {when}"


def rejection(document: Unfinished, rollout: Rollout) -> str:
    """Return why a good record of a rejected document is rejected."""
    return f"document_id {describe(rollout.document_id)}: {document.problem}"


def disagreement(first: Rollout, last: Rollout) -> str | None:
    """Return how a document's last record differs from its first; None if they agree."""
    for name, in_record in _AGREED.items():
        values = getattr(first, name), getattr(last, name)
        # If one of them has no advantages, `join` reports it.
        if name == "one_advantage" and any(one.advantages is None or not one.num_labels for one in (first, last)):
            continue
        if values[0] != values[1]:
            several = "a list" if name == "one_advantage" else "null"
            shown = " and ".join(several if value is None else describe(value) for value in values)
            return f"{in_record} is {shown} in two of its sequences: all must have the same"
    for name in first.document_fields.keys() | last.document_fields.keys():
        own = [member.document_fields.get(name) for member in (first, last)]
        if own[0] is None or own[1] is None or own[0] != own[1]:
            return f"{name} differs in two of its sequences: all must have the same"
    return None


def join(members: Sequence[Rollout], declared: Sequence[Field] = ()) -> Rollout:
    """Join the records of a document. Raises `BadRecord` if some have values of labels that others lack."""
    first = members[0]
    assert first.document_id is not None
    fields = {one.name: one for one in (*TABLE, *declared)}
    lengths = [member.num_tokens for member in members]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    arrays = {
        name: np.concatenate([getattr(member, name) for member in members]) for name in ("input_ids", "loss_mask")
    }
    own = (one for one in TABLE if one.level == "label" and one.name in vars(first))
    of_labels = {one.name: _of_labels(members, one) for one in own}
    held: dict[str, dict[str, np.ndarray]] = {place: {} for place in PLACES}
    for place, read in (("fields", _of_labels), ("token_fields", _of_tokens)):
        for name in sorted({name for member in members for name in getattr(member, place)} & fields.keys()):
            values = read(members, fields[name])
            if values is not None:
                held[place][name] = values
    turns = [
        replace(turn, start=turn.start + start, end=turn.end + start)
        for member, start in zip(members, starts, strict=True)
        for turn in member.turns
    ]
    joined: dict[str, Any] = {
        **arrays,
        **of_labels,
        **held,
        "document_fields": first.document_fields,
        "turns": tuple(turns),
        "starts": tuple(starts),
        "record_ids": tuple(member.id for member in members),
        "metadata": {name: value for member in reversed(members) for name, value in member.metadata.items()},
    }
    alone: dict[str, Any] = {"document_id": None, "num_sequences": None, "one_advantage": None}
    return replace(first, id=first.document_id, **joined, **alone)


def _of_labels(members: Sequence[Rollout], field: Field) -> np.ndarray | None:
    """Concatenate a field of labels. Sequences without labels need not have it."""
    found = [member.value(field.name) for member in members]
    if all(values is None for values in found):
        return None
    if any(values is None and member.num_labels for values, member in zip(found, members, strict=True)):
        raise BadRecord(f"{field.in_record} is there for some of its sequences and not for others")
    blank = [np.full(member.num_tokens, 0, field.dtype) for member in members]
    return np.concatenate([empty if values is None else values for values, empty in zip(found, blank, strict=True)])


def _of_tokens(members: Sequence[Rollout], field: Field) -> np.ndarray | None:
    """Concatenate a field of tokens; tokens without a row get the field's value for missing ones."""
    found = [member.value(field.name) for member in members]
    shapes = {values.shape[1:] for values in found if values is not None}
    if len(shapes) > 1:
        raise BadRecord(f"{field.in_record} has rows of different shapes in its sequences")
    pairs = list(zip(members, found, strict=True))
    if all(values is not None and len(values) == member.num_tokens for member, values in pairs):
        return np.concatenate([values for values in found if values is not None])
    parts = []
    for member, values in pairs:
        rows = np.full((member.num_tokens, *next(iter(shapes))), field.missing, field.dtype)
        if values is not None:
            rows[: len(values)] = values
        parts.append(rows)
    return np.concatenate(parts)
