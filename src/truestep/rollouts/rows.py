"""Reading of token-level fields: one row of values per token.

A record gives nested lists, an array, or base64 of little-endian numbers. The last tokens may have no row. Example:
`{"data": base64, "dtype": "uint8", "shape": [3, 2, 4]}` is 3 rows of 2 times 4 numbers.
"""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from truestep.files import bounded
from truestep.rollouts.fields import Field
from truestep.rollouts.values import BadRecord, checked, describe, integer, plain

LONGEST = 2**16  # largest size of every dimension except the first


def read_rows(field: Field, value: Any, num_tokens: int) -> np.ndarray | None:
    """Return the checked rows of a token-level field, or None if there are no rows."""
    if not (isinstance(value, np.ndarray) and value.dtype.kind in "iuf"):
        value = plain(value, field.in_record)
    if value is None:
        return None
    if isinstance(value, Mapping):
        found = _decode(field, value)
    elif isinstance(value, np.ndarray):
        found = _check(field, value)
    else:
        found = _from_lists(field, value)
    if len(found) > num_tokens:
        raise BadRecord(f"{field.in_record} has {len(found)} rows: expected at most {num_tokens}, one for each token")
    return found if len(found) else None


def narrowest(field: Field) -> list[np.dtype[Any]]:
    """Return the dtypes that a field may be given and stored in, narrowest first."""
    stored = np.dtype(field.check.stored)
    if stored.kind != "u":
        return [stored]
    return [np.dtype(name) for name in ("uint8", "uint16", "uint32") if np.dtype(name).itemsize <= stored.itemsize]


def encode(array: np.ndarray) -> dict[str, Any]:
    """Return an array as a lossless JSON object."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")
    return {"data": data, "dtype": array.dtype.name, "shape": list(array.shape)}


def decode(written: Mapping[str, Any]) -> np.ndarray:
    """Return the array that `encode` wrote."""
    kind = np.dtype(written["dtype"]).newbyteorder("<")
    array = np.frombuffer(base64.b64decode(written["data"]), kind).reshape(written["shape"])
    return array.astype(array.dtype.newbyteorder("="))


def _decode(field: Field, written: Mapping[str, Any]) -> np.ndarray:
    name = field.in_record
    for part in ("data", "dtype", "shape"):
        if written.get(part) is None:
            raise BadRecord(f"{name}.{part} is missing: expected data, dtype and shape")
    data, kinds = written["data"], {kind.name: kind for kind in narrowest(field)}
    kind = written["dtype"]
    if not isinstance(kind, str) or kind not in kinds:
        raise BadRecord(f"{name}.dtype is {describe(kind)}: expected {' or '.join(kinds)}")
    shape = _shape(field, written["shape"])
    if not isinstance(data, str):
        raise BadRecord(f"{name}.data is {describe(data)}: expected text of base64")
    _check_size(field, math.prod(shape) * kinds[kind].itemsize)
    try:
        content = base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise BadRecord(f"{name}.data is not base64: {describe(str(error))}") from None
    expected = math.prod(shape) * kinds[kind].itemsize
    if len(content) != expected:
        raise BadRecord(f"{name}.data has {len(content):,} bytes: expected {expected:,} for its shape and dtype")
    return _check(field, np.frombuffer(content, kinds[kind].newbyteorder("<")).reshape(shape))


def _shape(field: Field, given: Any) -> list[int]:
    name, shape = f"{field.in_record}.shape", plain(given, f"{field.in_record}.shape")
    wanted = ", ".join(str(size) for size in ("tokens", *field.shape))
    if not isinstance(shape, list | tuple) or len(shape) != 1 + len(field.shape):
        found = f"has {len(shape)} numbers" if isinstance(shape, list | tuple) else f"is {describe(shape)}"
        raise BadRecord(f"{name} {found}: expected [{wanted}]")
    sizes = [checked(integer, size, f"{name}[{index}]") for index, size in enumerate(shape)]
    if sizes[0] < 0:
        raise BadRecord(f"{name}[0] is {sizes[0]}: expected at least 0")
    _check_sizes(field, sizes[1:])
    return sizes


def _check_sizes(field: Field, sizes: Sequence[int]) -> None:
    """Check the sizes of all dimensions except the first."""
    for size, wanted in zip(sizes, field.shape, strict=True):
        if isinstance(wanted, int) and size != wanted:
            raise BadRecord(f"{field.in_record} has {size} values where {wanted} are expected")
        if not 1 <= size <= LONGEST:
            raise BadRecord(f"{field.in_record} has {size:,} {wanted}: expected 1 to {LONGEST:,}")


def _check_size(field: Field, size: int) -> None:
    if size > bounded.TOKEN_FIELD:
        raise BadRecord(f"{field.in_record} is not read: {bounded.too_long(bounded.TOKEN_FIELD)}")


def _check(field: Field, array: np.ndarray) -> np.ndarray:
    """Check an array's shape and values, and return it in the narrowest dtype that holds them."""
    name = field.in_record
    if array.ndim != 1 + len(field.shape):
        raise BadRecord(f"{name} has {array.ndim} dimensions: expected {1 + len(field.shape)}")
    if not len(array):
        return np.zeros(0, field.check.stored)
    _check_sizes(field, array.shape[1:])
    whole = np.dtype(field.check.wide).kind == "i"
    if whole and array.dtype.kind == "f":
        raise BadRecord(f"{name} is of {array.dtype.name}: expected integers")
    accepted = field.check.accepts(array)
    if not accepted.all() or (array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any()):
        first = tuple(int(place) for place in np.unravel_index(int((~accepted).argmax()), array.shape))
        checked(field.check.single, array[first].item(), name + "".join(f"[{place}]" for place in first))
    return _narrowed(field, array)


def _narrowed(field: Field, array: np.ndarray) -> np.ndarray:
    largest = array.max() if np.dtype(field.check.stored).kind == "u" else 0
    kind = next(kind for kind in narrowest(field) if kind.kind != "u" or largest <= np.iinfo(kind).max)
    stored = array.astype(kind)
    _check_size(field, stored.nbytes)
    return stored


def _from_lists(field: Field, value: Any) -> np.ndarray:
    """Return nested lists as an array. Lists of the same depth must have the same length."""
    name, shape = field.in_record, list[int]()
    level: list[Any] = [value]
    for _ in range(1 + len(field.shape)):
        for index, item in enumerate(level):
            if not isinstance(item, list | tuple):
                raise BadRecord(f"{name}{_place(index, shape)} is {describe(item)}: expected a list")
        lengths = list(map(len, level))
        if len(set(lengths)) > 1:
            index = next(index for index, length in enumerate(lengths) if length != lengths[0])
            where = _place(index, shape)
            raise BadRecord(f"{name}{where} has {lengths[index]} values: expected {lengths[0]}, as in the first list")
        shape.append(lengths[0] if lengths else 0)
        level = list(chain.from_iterable(level))
    if not shape[0]:
        return np.zeros(0, field.check.stored)
    _check_sizes(field, shape[1:])
    _check_size(field, len(level) * narrowest(field)[0].itemsize)
    if set(map(type, level)) <= field.check.types:
        try:
            array = np.asarray(level, dtype=field.check.wide)
        except OverflowError:  # an integer is too large for the array; the checks below report which one
            array = None
        if array is not None and field.check.accepts(array).all():
            return _narrowed(field, array.reshape(shape))
    one_by_one = [checked(field.check.single, item, name + _place(index, shape)) for index, item in enumerate(level)]
    return _narrowed(field, np.array(one_by_one, dtype=field.check.wide).reshape(shape))


def _place(index: int, shape: Sequence[int]) -> str:
    """Return the indices of an element of nested lists as text. Example: `[2][0]` for index 4 of shape [3, 2]."""
    return "".join(f"[{place}]" for place in (np.unravel_index(index, shape) if shape else ()))
