"""The table of fields: a line for each value of a document. Records, JSON, Parquet, streams, packing, masking, tables
of large files, `data check` and `verify` are loops over it.

A new field is a line of `TABLE`. `Rollout` and `PackedLabels` have some fields as attributes; every other one lies in
their mappings: a label's value in `fields`, a token's in `token_fields`, a document's in `document_fields`. Imports no
torch.
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
    """A value of a document. Example: `Field("reward", "document", np.float32, values.reward)`."""

    name: str  # in a `Rollout`
    level: Level  # whose value it is
    dtype: Any  # numpy's, when it is packed; `str`: text, `dict`: an object
    check: Any = None  # of the values in a record: a `Check`, or of a document's single value its `Check.single`
    record: str = ""  # its name in a record, where that is another
    labels: str = ""  # its name among the labels of a micro-batch, where that is another
    source: Literal["record", "trainer"] = "record"
    written: str = ""  # its type in the docs
    shape: tuple[str | int, ...] = ()  # a token's dimensions: a number, or the name of one that records choose
    missing: Any = 0  # what is packed where a document has none, and in padding
    one_for_all: bool = True  # a record may give one value for all labels
    has: bool = True  # `has` tells losses and metrics which documents have it
    kept: bool = True  # `parse_record` makes it; False: it is only a way to write tokens and labels
    required: bool = False  # a record without it is bad
    default: Any = None  # what a record without it gets; None: it stays without

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
        """Tell whether its values are 0 where a token is no label, and gone where labels are masked."""
        return self.level == "label"


# In the order in which a record's faults are looked for.
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
    Field("routed_experts", "token", np.int32, values.expert, shape=("layers", "k"), missing=-1, has=False,
          written="list of lists of lists of int, or an object"),
    Field("truncated", "document", np.bool_, values.true_or_false, written="true or false"),
    Field("rewards", "document", dict, values.reward, written="object"),
    Field("messages", "document", list, written="list", kept=False),
    Field("tools", "document", list, written="list", kept=False),
    Field("id", "document", str, written="text or int", kept=False),
    Field("metadata", "document", dict, written="object"),
)  # fmt: skip


def from_records(declared: Iterable[Field] = ()) -> list[Field]:
    """List what a record may have beside its id, tokens and labels."""
    return [field for field in (*TABLE, *declared) if field.kept and field.source == "record"]


def record_names(declared: Iterable[Field] = ()) -> tuple[str, ...]:
    """List the names that a record's fields have."""
    return tuple(field.in_record for field in (*TABLE, *declared) if field.source == "record")


def of_labels(declared: Iterable[Field] = ()) -> list[Field]:
    """List the fields of labels, the trainer's included."""
    return [field for field in (*TABLE, *declared) if field.level == "label"]


def packed(declared: Iterable[Field] = ()) -> list[Field]:
    """List what is packed of each label or each document."""
    return [field for field in (*TABLE, *declared) if field.level != "token" and field.numeric and field.kept]


def names_in_has(declared: Iterable[Field] = ()) -> list[str]:
    """Name the fields of which losses and metrics are told which documents have them."""
    return [field.name for field in packed(declared) if field.has]


def number_lists(declared: Iterable[Field] = ()) -> dict[str, Any]:
    """Name the fields that a record has as plain lists of numbers, with the types of these."""
    plain = [
        field
        for field in (*TABLE, *declared)
        if field.source == "record" and field.numeric and field.level != "document" and not field.shape
    ]
    return {field.in_record: field.dtype for field in plain}


# ---- the fields of a user

_CHECKS: Mapping[str, tuple[Any, Check]] = {
    "float32": (np.float32, values.advantage),
    "int64": (np.int64, values.whole_number),
    "bool": (np.bool_, values.zero_or_one),
}


class FieldError(TruestepError):
    """A declaration of a user's field that cannot be."""


def declare(options: Mapping[str, Mapping[str, Any]] | None) -> tuple[Field, ...]:
    """Make fields of a user's declarations, `data.fields`. One without a default is required."""
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


def declarations(fields: Iterable[Field]) -> dict[str, dict[str, str]]:
    """Describe a user's fields as JSON can hold them, without what becomes of records that lack one."""
    names = {dtype: name for name, (dtype, _) in _CHECKS.items()}
    return {field.name: {"level": field.level, "dtype": names[field.dtype]} for field in fields}


def optional(fields: Iterable[Field]) -> tuple[Field, ...]:
    """Give the fields as ones that a record may lack."""
    return tuple(dataclasses.replace(field, required=False, default=None) for field in fields)
