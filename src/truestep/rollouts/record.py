"""The conversion of a record from JSON or Parquet to a `Rollout`, with all checks.

No value of a record is trusted. A failed check raises `BadRecord` with the field, the index and the value.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from truestep.rollouts import fields, values
from truestep.rollouts.advantages import AdvantageRule, as_rule
from truestep.rollouts.chat import ChatTemplate
from truestep.rollouts.fields import Field
from truestep.rollouts.routes import check_routes
from truestep.rollouts.rows import read_rows
from truestep.rollouts.sequences import check_membership
from truestep.rollouts.turns import read_turns
from truestep.rollouts.values import BadRecord, Check, checked, checked_array, describe, plain
from truestep.types import ROUTES, Rollout, RouteShape

LONGEST_TEXT = 4096  # characters of a text field; the ledger repeats ids at every step
_MOST_PARTS = 256  # parts of a reward; each part becomes a metric

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Needs:
    """The fields that a run's loss needs in a document with labels."""

    logprobs: bool
    advantages: bool
    advantage_rule: AdvantageRule | str  # "none": records carry `advantage`
    reference_logprobs: bool = False


@dataclass(frozen=True)
class Checks:
    """The checks that a run makes of its records and their groups."""

    needs: Needs
    vocabulary_size: int | None = None
    default_temperature: float = 1.0
    max_tokens: int | None = None
    group_size: int | None = None  # members of a complete group; None: a group is complete at the end of the data
    stop_at_rejected: bool = False
    chat: ChatTemplate | None = None  # tokenizes `messages`; None: `messages` is ignored
    truncated: str = "keep"  # treatment of documents that ended at a length limit: keep, mask or drop
    fields: tuple[Field, ...] = ()  # the user's fields (data.fields), in addition to the built-in ones
    # The shape of `routed_experts` in the model that replays them; None: they are not replayed.
    routes: RouteShape | None = None

    @cached_property
    def read(self) -> tuple["_Reading", ...]:
        """The fields that are read from a record, each with its reader."""
        return tuple(
            _Reading(
                field.in_record,
                field in self.fields or field.name in _INSTEAD,
                field.name,
                _reader_of(field),
                None if field.name in _ATTRIBUTES else _PLACE[field.level],
                field,
            )
            for field in fields.from_records(self.fields)
        )


def parse_record(raw: Any, where: str, checks: Checks) -> Rollout:
    """Check a record and return its `Rollout`. Raises only `BadRecord`, whatever `raw` is.

    `where` ("file.jsonl:12") becomes the id of a record without an id. A null field counts as absent, and unknown
    fields are ignored. Every field that the loss needs is set in the result, except advantages that will be computed
    from the group's rewards. A document without labels gets zeros for a needed field that it lacks.
    """
    record = plain(raw, "the record")
    if not isinstance(record, Mapping):
        raise BadRecord(f"the record is {describe(record)}: expected an object with the fields of a rollout")
    try:
        identifier = _text(record, "id")
        record = _with_tokens(record, checks.chat)
        input_ids = _input_ids(record, checks)
        loss_mask = _labels(record, len(input_ids))
        found, others = _read_fields(record, loss_mask, checks)
        rollout = Rollout(
            id=where if identifier is None else identifier, input_ids=input_ids, loss_mask=loss_mask, **found, **others
        )
        check_membership(rollout)
        if checks.routes is not None:
            check_routes(rollout.token_fields.get(ROUTES), rollout.num_tokens, checks.routes)
        return rollout
    except BadRecord as error:
        raise identified(error, record) from None


def identified(error: BadRecord, record: Record) -> BadRecord:
    """Return an error with the ids of its record, if they are readable."""
    ids = {name: readable_text(record, name) for name in ("id", "group_id", "document_id")}
    try:
        count = None if ids["document_id"] is None else _single(record, "sequences", values.at_least_one)
    except BadRecord:
        count = None
    return BadRecord(error.reason, **ids, num_sequences=count)


def readable_text(record: Record, field: str) -> str | None:
    """Return a text field of a record that may have other errors, or None if the field is invalid."""
    try:
        return _text(record, field)
    except BadRecord:
        return None


def _with_tokens(record: Record, chat: ChatTemplate | None) -> Record:
    """Add tokens and labels to a record that has `messages`."""
    if chat is None or record.get("messages") is None:
        return record
    for name in ("input_ids", "loss_mask", "prompt_length"):
        if record.get(name) is not None:
            raise BadRecord(f"messages and {name} are both there: a document is made of one of the two")
    return {**record, **chat.read(record)}


def _input_ids(record: Record, checks: Checks) -> np.ndarray:
    tokens = _list(record, "input_ids")
    if tokens is None:
        hint = ": this is a prompt, as sampler.prompts has them" if "prompt" in record else ""
        raise BadRecord(f"input_ids is missing{hint}")
    if not len(tokens):
        raise BadRecord("input_ids is empty: a document has at least one token")
    if checks.max_tokens is not None and len(tokens) > checks.max_tokens:
        raise BadRecord(f"input_ids has {len(tokens)} tokens: a micro-batch holds at most {checks.max_tokens}")
    return checked_array(values.token_id(checks.vocabulary_size), tokens, "input_ids")


def _labels(record: Record, num_tokens: int) -> np.ndarray:
    """Return the loss mask from `loss_mask` or `prompt_length`; both may be given if they agree."""
    from_mask = _loss_mask(record, num_tokens)
    from_prompt = _prompt_mask(record, num_tokens)
    if from_mask is not None and from_prompt is not None and (from_mask != from_prompt).any():
        index = int((from_mask != from_prompt).argmax())
        raise BadRecord(
            f"loss_mask[{index}] is {int(from_mask[index])} and prompt_length makes it {int(from_prompt[index])}: "
            "the two disagree, give one of them"
        )
    loss_mask = from_prompt if from_mask is None else from_mask
    if loss_mask is None:
        raise BadRecord("loss_mask and prompt_length are missing: one of them says which tokens are labels")
    return loss_mask


def _loss_mask(record: Record, num_tokens: int) -> np.ndarray | None:
    mask = _list(record, "loss_mask")
    if mask is None:
        return None
    if len(mask) != num_tokens:
        raise BadRecord(f"loss_mask has {len(mask)} values: expected {num_tokens}, one for each of input_ids")
    loss_mask = checked_array(values.zero_or_one, mask, "loss_mask")
    if loss_mask[0]:
        raise BadRecord("loss_mask[0] is 1: nothing predicts the first token, so it cannot be a label")
    return loss_mask


def _prompt_mask(record: Record, num_tokens: int) -> np.ndarray | None:
    prompt_length = _single(record, "prompt_length", values.integer)
    if prompt_length is None:
        return None
    if prompt_length == 0:
        raise BadRecord("prompt_length is 0: nothing predicts the first token, so it cannot be a label")
    if not 1 <= prompt_length <= num_tokens:
        raise BadRecord(f"prompt_length is {prompt_length}: expected 1 to {num_tokens}, the length of input_ids")
    from_prompt: np.ndarray = np.arange(num_tokens) >= prompt_length
    return from_prompt


_PLACE = {"label": "fields", "token": "token_fields", "document": "document_fields"}  # mappings of a `Rollout`
_ATTRIBUTES = frozenset(item.name for item in dataclasses.fields(Rollout))


def _read_fields(record: Record, loss_mask: np.ndarray, checks: Checks) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read all fields except tokens and labels. Returns a rollout's attributes and its mappings of other fields."""
    found: dict[str, Any] = {}
    others: dict[str, Any] = {}
    labels, get = _Labels(loss_mask, np.flatnonzero(loss_mask)), record.get
    for in_record, stands_in, name, read, place, field in checks.read:
        given = get(in_record)
        if given is None and not stands_in:
            continue
        value = None if given is None else read(given, labels)
        if value is None and stands_in:
            value = _instead(field, found, loss_mask, checks)
        if value is None:
            continue
        if place is None:
            found[name] = value
            if name == "advantages" and "document_id" in record and not isinstance(plain(given, name), list | tuple):
                found["one_advantage"] = None if given is None else float(plain(given, name))
        else:
            others.setdefault(place, {})[name] = np.asarray(value)
    return found, others


def _reader_of(field: Field) -> "_Reader":
    """Return the function that reads a field from its value in a record."""
    name = field.in_record
    if field.level == "token":
        return lambda given, labels: read_rows(field, given, len(labels.mask))
    if field.level == "label":
        as_given = _as_value if field.one_for_all else _as_list
        return lambda given, labels: _on_labels(as_given(given, name), field, labels)
    if field.dtype is str:
        return lambda given, labels: _as_text(given, name)
    if field.dtype is list:
        return lambda given, labels: read_turns(_as_list(given, name), len(labels.mask))
    if field.dtype is dict:
        return lambda given, labels: _object(given, name) if field.check is None else _parts(given, name, field.check)
    single = field.check.single if isinstance(field.check, Check) else field.check
    if field.name in _ATTRIBUTES:
        return lambda given, labels: _as_number(given, name, single)
    return lambda given, labels: None if (value := _as_number(given, name, single)) is None else field.dtype(value)


class _Labels(NamedTuple):
    """The labels of a document: a mask over its tokens, and the labels' indices."""

    mask: np.ndarray
    places: np.ndarray


_Reader = Callable[[Any, _Labels], Any]


class _Reading(NamedTuple):
    """A field and its reader."""

    in_record: str
    stands_in: bool  # if a record lacks the field, `_instead` gives its default or rejects the record
    name: str
    read: _Reader
    place: str | None  # the rollout's mapping that holds the field; None: the field is an attribute
    field: Field


_INSTEAD = ("temperature", "logprobs", "reference_logprobs", "advantages")


def _instead(field: Field, found: Mapping[str, Any], loss_mask: np.ndarray, checks: Checks) -> Any:
    """Return the default of a field that a record lacks, or raise `BadRecord` if the run needs it.

    A document without labels gets zeros for needed fields of labels.
    """
    if field.name == "temperature":
        return float(checks.default_temperature)
    if field.default is not None:
        return _default(field, loss_mask)
    reason = _needed(field, found, checks)
    if reason is None:
        return None
    if loss_mask.any() or not field.masked:
        raise BadRecord(reason)
    return None if field.name == "reference_logprobs" else np.zeros(len(loss_mask), dtype=field.dtype)


def _default(field: Field, loss_mask: np.ndarray) -> Any:
    if field.level == "label":
        return np.where(loss_mask, field.default, 0).astype(field.dtype)
    return np.asarray(field.default, field.dtype)


def with_defaults(rollout: Rollout, declared: Sequence[Field]) -> Rollout:
    """Fill in missing user fields of a document that was read without a run's `Checks`.

    Required fields become zeros, the others their defaults.
    """
    for field in declared:
        if rollout.value(field.name) is None:
            value = np.zeros(rollout.num_tokens, field.dtype) if field.required else _default(field, rollout.loss_mask)
            place = _PLACE[field.level]
            held: dict[str, Any] = {place: {**getattr(rollout, place), field.name: value}}
            rollout = dataclasses.replace(rollout, **held)
    return rollout


def _needed(field: Field, found: Mapping[str, Any], checks: Checks) -> str | None:
    """Return why a run needs a missing field, or None if the field is optional."""
    needs, name = checks.needs, field.name
    if field.required:
        return f"{name} is missing: data.fields has no default for it"
    if name == "logprobs" and needs.logprobs:
        return "logprobs is missing: this run's loss needs the sampler's log-probabilities"
    if name == "reference_logprobs" and needs.reference_logprobs:
        return "reference_logprobs is missing: this run's loss takes the reference from the records"
    if name == "advantages" and needs.advantages:
        return _no_advantages("reward" in found, "group_id" in found, needs)
    return None


def _no_advantages(has_reward: bool, has_group: bool, needs: Needs) -> str | None:
    """Return why a record has no advantages, or None if they will be computed from its group's rewards."""
    from_rewards = as_rule(needs.advantage_rule).from_rewards
    if from_rewards and has_reward and has_group:
        return None
    if not from_rewards:
        return "advantage is missing: with data.advantages: none each record carries its own"
    if not has_reward:
        return "advantage and reward are missing: this run's loss needs one of them"
    return "group_id is missing: advantages come from the rewards of the record's group"


def _parts(given: Any, whole: str, check: Callable[[Any], Any]) -> dict[str, float] | None:
    """Read an object of numbers by name. Null numbers count as absent, because Parquet rows repeat every name."""
    parts = plain(given, whole)
    if parts is None:
        return None
    if not isinstance(parts, Mapping):
        raise BadRecord(f"{whole} is {describe(parts)}: expected an object of numbers by name")
    if sum(value is not None for value in parts.values()) > _MOST_PARTS:
        raise BadRecord(f"{whole} has more than {_MOST_PARTS} parts")
    checked_parts: dict[str, float] = {}
    for name, value in parts.items():
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise BadRecord(f"{whole} has a part {describe(name)}: its name is not printable text")
        if plain(value, whole) is not None:
            checked_parts[name] = checked(check, value, f"{whole}[{describe(name)}]")
    return checked_parts


def _object(given: Any, whole: str) -> dict[str, Any] | None:
    metadata = plain(given, whole)
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise BadRecord(f"{whole} is {describe(metadata)}: expected an object")
    try:  # metadata is copied to JSON outputs
        json.dumps(dict(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecord(f"{whole} holds what JSON cannot: {error}") from None
    return dict(metadata)


def _text(record: Record, field: str) -> str | None:
    return _as_text(record.get(field), field)


def _as_text(given: Any, field: str) -> str | None:
    text = plain(given, field)
    if text is None:
        return None
    if isinstance(text, int) and not isinstance(text, bool):
        return str(text)  # integer ids are accepted
    if not isinstance(text, str):
        raise BadRecord(f"{field} is {describe(text)}: expected text")
    if not text:
        raise BadRecord(f"{field} is empty text")
    if len(text) > LONGEST_TEXT:
        raise BadRecord(f"{field} has {len(text)} characters: expected at most {LONGEST_TEXT}")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 output files cannot hold
        raise BadRecord(f"{field} is {describe(text)}: not valid Unicode") from None
    return text


def _single(record: Record, field: str, check: Callable[[Any], Any]) -> Any:
    return _as_number(record.get(field), field, check)


def _as_number(given: Any, field: str, check: Callable[[Any], Any]) -> Any:
    value = plain(given, field)
    return None if value is None else checked(check, value, field)


# Types of arrays whose values the arrays of `checked_array` hold exactly.
_EXACT = frozenset({np.bool_, np.int32, np.int64, np.float32, np.float64})


def _as_value(value: Any, field: str) -> Any:
    """Return the plain value of a field that may be a list. Numeric arrays are kept for `checked_array`."""
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype.type in _EXACT:
        return value
    return plain(value, field)


def _list(record: Record, field: str) -> Sequence[Any] | np.ndarray | None:
    return _as_list(record.get(field), field)


def _as_list(given: Any, field: str) -> Sequence[Any] | np.ndarray | None:
    value: Any = _as_value(given, field)
    if value is None or isinstance(value, list | tuple | np.ndarray):
        return value
    raise BadRecord(f"{field} is {describe(value)}: expected a list")


def _on_labels(value: Any, field: Field, labels: _Labels) -> np.ndarray | None:
    """Spread a single value, a list per token or a list per label over the tokens, with 0 where the mask is 0."""
    if value is None:
        return None
    name, check, (mask, places) = field.in_record, field.check, labels
    spread = np.zeros(len(mask), dtype=check.stored)
    if not isinstance(value, list | tuple | np.ndarray):
        spread[places] = checked(check.single, value, name)
    # Unambiguous: token 0 is never a label, so there are always fewer labels than tokens.
    elif len(value) == len(mask):
        indices = places.tolist()
        on_labels = value[places] if isinstance(value, np.ndarray) else [value[index] for index in indices]
        spread[places] = checked_array(check, on_labels, name, indices, " on a label")
    elif len(value) == len(places):
        spread[places] = checked_array(check, value, name, place=" on a label")
    else:
        raise BadRecord(
            f"{name} has {len(value)} values: expected {len(mask)} (one a token) or {len(places)} (one a label)"
        )
    return spread
