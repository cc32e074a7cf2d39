"""The fields of a document, one entry of `TABLE` each.

Records, JSON, Parquet, streams, packing, masking, stored documents, `data check` and `verify` loop over `TABLE`,
so a new field needs only an entry. Some fields are attributes of `Rollout` and `PackedLabels`. The rest are in their
mappings, by level: `fields` (label), `token_fields` (token), `document_fields` (document). Imports no torch.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from truestep.errors import TruestepError
from truestep.rollouts import values
from truestep.rollouts.values import Check, UnfitError, describe
from truestep.types import Rollout

Level = Literal["token", "label", "document"]


@dataclass(frozen=True)
class Field:
    """A field of a document. Example: `Field("reward", "document", np.float32, values.reward)`."""

    name: str  # the name in a `Rollout`
    level: Level  # a value per token, per label or per document
    dtype: Any  # numpy dtype when packed; `str`: text, `dict`: an object
    check: Any = None  # a `Check` of the record's values, or for a single value a function like `Check.single`
    record: str = ""  # name in a record, if different
    labels: str = ""  # name in `PackedLabels`, if different
    source: Literal["record", "trainer"] = "record"
    written: str = ""  # type as written in the docs
    # The dimensions of one token's value: a size, or a name if records choose the size.
    shape: tuple[str | int, ...] = ()
    missing: Any = 0  # packed value for documents without the field, and for padding
    one_for_all: bool = True  # a record may give one value for all labels
    has: bool = True  # `PackedLabels.has` tells losses and metrics which documents have the field
    kept: bool = True  # part of the `Rollout`; False: only read to make tokens and labels
    packed: bool = True  # a numeric field is part of `PackedLabels`
    required: bool = False  # a record without the field is bad
    default: Any = None  # value for a record without the field; None: no value

    @cached_property
    def in_record(self) -> str:
        return self.record or self.name

    @cached_property
    def among_labels(self) -> str:
        return self.labels or self.name

    @cached_property
    def numeric(self) -> bool:
        return isinstance(self.dtype, type) and issubclass(self.dtype, np.generic)

    @property
    def masked(self) -> bool:
        """True if values are 0 outside the loss mask, and are set to 0 where labels are masked."""
        return self.level == "label"


# The order is that of the checks. Only the first error of a record is reported.
TABLE: tuple[Field, ...] = (
    Field("input_ids", "token", np.int64, written="list of int", kept=False, has=False),
    Field("prompt_length", "document", np.int64, written="int", kept=False, has=False),
    Field("loss_mask", "token", np.bool_, written="list of 0/1", kept=False, has=False),
    Field("reward", "document", np.float32, values.reward, written="float"),
    Field("temperature", "document", np.float32, values.temperature, written="float", has=False),
    Field("group_id", "document", str, written="text or int"),
    Field("logprobs", "label", np.float32, values.logprob, labels="old_logprobs", written="list of float",
          one_for_all=False),
    Field("advantages", "label", np.float32, values.advantage, record="advantage", written="float, or one per token"),
    Field("model_version", "label", np.int64, values.version, written="int, or one per token"),
    Field("reference_logprobs", "label", np.float32, values.logprob, written="list of float", one_for_all=False),
    Field("recomputed_logprobs", "label", np.float32, source="trainer"),
    Field("chosen", "label", np.uint8, source="trainer", has=False),
    Field("targets", "label", np.int64, source="trainer", has=False, packed=False),
    Field("routed_experts", "token", np.int32, values.expert, shape=("layers", "k"), missing=-1, has=False,
          written="list of lists of lists of int, or an object"),
    Field("truncated", "document", np.bool_, values.true_or_false, written="true or false"),
    Field("rewards", "document", dict, values.reward, written="object"),
    Field("document_id", "document", str, written="text or int"),
    Field("num_sequences", "document", np.int64, values.at_least_one, record="sequences", written="int", packed=False),
    Field("turns", "document", list, written="list of objects"),
    Field("messages", "document", list, written="list", kept=False),
    Field("tools", "document", list, written="list", kept=False),
    Field("id", "document", str, written="text or int", kept=False),
    Field("metadata", "document", dict, written="object"),
)  # fmt: skip


def from_records(declared: Iterable[Field] = ()) -> list[Field]:
    """Return the fields that a record may have besides its id, tokens and labels."""
    return [field for field in (*TABLE, *declared) if field.kept and field.source == "record"]


def record_names(declared: Iterable[Field] = ()) -> tuple[str, ...]:
    """Return the names of all fields of a record."""
    return tuple(field.in_record for field in (*TABLE, *declared) if field.source == "record")


def of_labels() -> list[Field]:
    """Return the fields of labels, including those that the trainer computes."""
    return [field for field in TABLE if field.level == "label"]


def packed(declared: Iterable[Field] = ()) -> list[Field]:
    """Return the fields that are packed per label or per document."""
    return [
        field
        for field in (*TABLE, *declared)
        if field.level != "token" and field.numeric and field.kept and field.packed
    ]


def names_in_has() -> list[str]:
    """Return the names of the fields in `PackedLabels.has`."""
    return [field.name for field in packed() if field.has]


# ---- fields declared by the user

_CHECKS: Mapping[str, tuple[Any, Check]] = {
    "float32": (np.float32, values.advantage),
    "int64": (np.int64, values.whole_number),
    "bool": (np.bool_, values.zero_or_one),
}


class FieldError(TruestepError):
    """An invalid declaration of a user's field, or a document without a required one."""


def declare(options: Mapping[str, Mapping[str, Any]] | None) -> tuple[Field, ...]:
    """Return the fields declared in `data.fields`. A field without a default is required."""
    taken = {name for field in TABLE for name in (field.name, field.in_record, field.among_labels)}
    taken |= {item.name for item in dataclasses.fields(Rollout)}
    return tuple(_declare(name, given, taken) for name, given in (options or {}).items())


def _declare(name: str, given: Mapping[str, Any], taken: Collection[str]) -> Field:
    where = f"data.fields.{name}"
    if name in taken:
        raise FieldError(f"{where}: truestep has a field of this name already; give yours another name")
    dtype, check = _CHECKS[given.get("dtype", "float32")]
    default = given.get("default")
    if default is not None:
        try:
            default = check.single(default)
        except UnfitError as expected:
            raise FieldError(f"{where}.default is {describe(default)}: {expected}") from None
    return Field(name, given["level"], dtype, check, required=default is None, default=default)


def optional(fields: Iterable[Field]) -> tuple[Field, ...]:
    """Return copies of the fields that are not required and have no default."""
    return tuple(dataclasses.replace(field, required=False, default=None) for field in fields)
