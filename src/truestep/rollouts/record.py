"""One record, as JSON or Parquet gave it, becomes one `Rollout`, or a `BadRecord` that says what is wrong with it.

Nothing of a record is trusted. Each check has one message that names the field, the index and the value.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from truestep.rollouts import values
from truestep.rollouts.advantages import AdvantageRule, as_rule
from truestep.rollouts.chat import ChatTemplate
from truestep.rollouts.values import BadRecord, Check, checked, checked_array, describe, plain
from truestep.types import Rollout

FIELDS = (
    "input_ids",
    "loss_mask",
    "prompt_length",
    "logprobs",
    "advantage",
    "reward",
    "group_id",
    "temperature",
    "model_version",
    "truncated",
    "reference_logprobs",
    "rewards",
    "messages",
    "tools",
    "id",
    "metadata",
)

LONGEST_TEXT = 4096  # characters of an id: every step's line of the ledger repeats them

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Needs:
    """The values that the loss of a run needs of a document with labels."""

    logprobs: bool
    advantages: bool
    advantage_rule: AdvantageRule | str  # none: records carry `advantage`
    reference_logprobs: bool = False


@dataclass(frozen=True)
class Checks:
    """The demands of a run on its records and their groups."""

    needs: Needs
    vocabulary_size: int | None = None
    default_temperature: float = 1.0
    max_tokens: int | None = None
    group_size: int | None = None  # members of a complete group; None: a group is complete at the end of the data
    stop_at_rejected: bool = False
    chat: ChatTemplate | None = None  # which makes tokens of messages; None: they are not looked at
    truncated: str = "keep"  # what becomes of documents that ended at a length limit: keep, mask or drop


def parse_record(raw: Any, where: str, checks: Checks) -> Rollout:
    """Check one record. Raises `BadRecord` and nothing else, whatever `raw` is.

    `where` ("file.jsonl:12") is the id of a record without one. A null field is an absent field, and fields that are
    not in `FIELDS` are ignored. What the loss needs is never None in the result, save for advantages that are still
    to come from the rewards of the group. A document without labels gets zeros for a needed field that it lacks.
    """
    record = plain(raw, "the record")
    if not isinstance(record, Mapping):
        raise BadRecord(f"the record is {describe(record)}: expected an object with the fields of a rollout")
    try:
        identifier = _text(record, "id")
        record = _with_tokens(record, checks.chat)
        input_ids = _input_ids(record, checks)
        loss_mask = _labels(record, len(input_ids))
        reward = _single(record, "reward", values.reward)
        temperature = _single(record, "temperature", values.temperature)
        group_id = _text(record, "group_id")
        return Rollout(
            id=where if identifier is None else identifier,
            input_ids=input_ids,
            loss_mask=loss_mask,
            logprobs=_logprobs(record, loss_mask, checks.needs),
            advantages=_advantages(record, loss_mask, reward is not None, group_id is not None, checks.needs),
            reward=reward,
            group_id=group_id,
            temperature=float(checks.default_temperature) if temperature is None else temperature,
            model_version=_on_labels(record, "model_version", values.version, loss_mask),
            reference_logprobs=_reference_logprobs(record, loss_mask, checks.needs),
            truncated=_single(record, "truncated", values.true_or_false),
            rewards=_rewards(record),
            metadata=_metadata(record),
        )
    except BadRecord as error:
        identity = {"id": readable_text(record, "id"), "group_id": readable_text(record, "group_id")}
        raise BadRecord(error.reason, **identity) from None


def readable_text(record: Record, field: str) -> str | None:
    """Read a text field of a record that may be broken elsewhere; None where it cannot be read."""
    try:
        return _text(record, field)
    except BadRecord:
        return None


def _with_tokens(record: Record, chat: ChatTemplate | None) -> Record:
    """Make the tokens of a record that has messages and none of its own."""
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
    """Read the mask from whichever of the two fields is there."""
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


def _logprobs(record: Record, loss_mask: np.ndarray, needs: Needs) -> np.ndarray | None:
    _list(record, "logprobs")  # one number for all labels is no log-probability of any
    logprobs = _on_labels(record, "logprobs", values.logprob, loss_mask)
    if logprobs is not None or not needs.logprobs:
        return logprobs
    if loss_mask.any():
        raise BadRecord("logprobs is missing: this run's loss needs the sampler's log-probabilities")
    return np.zeros(len(loss_mask), dtype=np.float32)


def _advantages(
    record: Record, loss_mask: np.ndarray, has_reward: bool, has_group: bool, needs: Needs
) -> np.ndarray | None:
    """Read the record's own advantages; None where they are not needed or come from the rewards of its group."""
    advantages = _on_labels(record, "advantage", values.advantage, loss_mask)
    from_rewards = as_rule(needs.advantage_rule).from_rewards
    from_group = from_rewards and has_reward and has_group
    if advantages is not None or from_group or not needs.advantages:
        return advantages
    if not loss_mask.any():
        return np.zeros(len(loss_mask), dtype=np.float32)
    if not from_rewards:
        raise BadRecord("advantage is missing: with data.advantages: none each record carries its own")
    if not has_reward:
        raise BadRecord("advantage and reward are missing: this run's loss needs one of them")
    raise BadRecord("group_id is missing: advantages come from the rewards of the record's group")


def _reference_logprobs(record: Record, loss_mask: np.ndarray, needs: Needs) -> np.ndarray | None:
    _list(record, "reference_logprobs")  # as with logprobs, one number is none of any label's
    found = _on_labels(record, "reference_logprobs", values.logprob, loss_mask)
    if found is None and needs.reference_logprobs and loss_mask.any():
        raise BadRecord("reference_logprobs is missing: this run's loss takes the reference from the records")
    return found


def _rewards(record: Record) -> dict[str, float]:
    """Read the parts of the reward; one that is null is absent, as a row of Parquet has to write it."""
    parts = plain(record.get("rewards"), "rewards")
    if parts is None:
        return {}
    if not isinstance(parts, Mapping):
        raise BadRecord(f"rewards is {describe(parts)}: expected an object of numbers by name")
    checked_parts: dict[str, float] = {}
    for name, value in parts.items():
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise BadRecord(f"rewards has a part {describe(name)}: its name is not printable text")
        if plain(value, "rewards") is not None:
            checked_parts[name] = checked(values.reward, value, f"rewards[{describe(name)}]")
    return checked_parts


def _metadata(record: Record) -> dict[str, Any]:
    metadata = plain(record.get("metadata"), "metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise BadRecord(f"metadata is {describe(metadata)}: expected an object")
    try:  # it is carried through to outputs that are JSON
        json.dumps(dict(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRecord(f"metadata holds what JSON cannot: {error}") from None
    return dict(metadata)


def _text(record: Record, field: str) -> str | None:
    text = plain(record.get(field), field)
    if text is None:
        return None
    if isinstance(text, int) and not isinstance(text, bool):
        return str(text)  # a number names a document as well as text does
    if not isinstance(text, str):
        raise BadRecord(f"{field} is {describe(text)}: expected text")
    if not text:
        raise BadRecord(f"{field} is empty text")
    if len(text) > LONGEST_TEXT:
        raise BadRecord(f"{field} has {len(text)} characters: expected at most {LONGEST_TEXT}")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: no output file could hold it
        raise BadRecord(f"{field} is {describe(text)}: not valid Unicode") from None
    return text


def _single(record: Record, field: str, check: Callable[[Any], Any]) -> Any:
    value = plain(record.get(field), field)
    return None if value is None else checked(check, value, field)


def _value(record: Record, field: str) -> Any:
    """Get a field that may be a list. An array of numbers stays one: `checked_array` takes it as it is."""
    value = record.get(field)
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype in (np.int64, np.float64):
        return value
    return plain(value, field)


def _list(record: Record, field: str) -> Sequence[Any] | np.ndarray | None:
    value: Any = _value(record, field)
    if value is None or isinstance(value, list | tuple | np.ndarray):
        return value
    raise BadRecord(f"{field} is {describe(value)}: expected a list")


def _on_labels(record: Record, field: str, check: Check, loss_mask: np.ndarray) -> np.ndarray | None:
    """Read one value for all labels, or a list of one a token or one a label. 0 off the mask, whatever stood there."""
    value = _value(record, field)
    if value is None:
        return None
    spread = np.zeros(len(loss_mask), dtype=check.stored)
    labels = np.flatnonzero(loss_mask)
    if not isinstance(value, list | tuple | np.ndarray):
        spread[labels] = checked(check.single, value, field)
    # Never ambiguous: position 0 is no label, so there are always fewer labels than tokens.
    elif len(value) == len(loss_mask):
        indices = labels.tolist()
        on_labels = value[labels] if isinstance(value, np.ndarray) else [value[index] for index in indices]
        spread[labels] = checked_array(check, on_labels, field, indices, " on a label")
    elif len(value) == len(labels):
        spread[labels] = checked_array(check, value, field, place=" on a label")
    else:
        raise BadRecord(
            f"{field} has {len(value)} values: expected {len(loss_mask)} (one a token) or {len(labels)} (one a label)"
        )
    return spread
