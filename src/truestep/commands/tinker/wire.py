"""Reads and writes the protocol's protobuf messages, by field number.

A message is a sequence of fields. A field is a key (field number and wire type), and a number or bytes.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NUMBER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_FLOAT32, _INT64 = 1, 2  # the protocol's tensor types
_DTYPES: Mapping[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_MOST_NUMBERS = 2**23  # most numbers in the tensors of a request, counted as dense tensors


class WireError(Exception):
    """Bytes that are not a message of the protocol."""


@dataclass(frozen=True)
class Datum:
    tokens: np.ndarray  # [N], the model's input
    inputs: Mapping[str, np.ndarray]  # inputs of the loss, [N] or [N, K]


@dataclass(frozen=True)
class Head:
    """The model and sequence number of a request. They are read from invalid requests too."""

    model_id: str = ""
    seq_id: int = 0
    forward_only: bool = False


@dataclass(frozen=True)
class ForwardBackward:
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: integers, doubles as floats, and everything else as bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _NUMBER:
            value, at = _varint(message, at)
            yield number, value
        elif kind in (_EIGHT, _FOUR):
            size = 8 if kind == _EIGHT else 4
            if at + size > len(message):
                raise WireError("a number ends before its last byte")
            yield number, struct.unpack_from("<d" if kind == _EIGHT else "<f", message, at)[0]
            at += size
        elif kind == _BYTES:
            length, at = _varint(message, at)
            if at + length > len(message):
                raise WireError("a field ends before its last byte")
            yield number, message[at : at + length]
            at += length
        else:
            raise WireError(f"field {number} is of wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise WireError("a number ends before its last byte")
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), at
    raise WireError("a number has more than 64 bits")


def _text(value: Any) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError:
        raise WireError("a text is not UTF-8") from None


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise WireError("there is a number where bytes are expected")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise WireError("there are bytes where a number is expected")
    return value - 2**64 if value >= 2**63 else value


def _double(value: Any) -> float:
    """Return a field's number; 0 if the field is missing."""
    if not isinstance(value, float | int | None):
        raise WireError("there are bytes where a number is expected")
    return float(value or 0.0)


def _entry(message: Any) -> tuple[str, Any]:
    """Read an entry of a map."""
    found = dict(fields_of(_bytes(message)))
    return _text(found.get(1, b"")), found.get(2)


def read_head(body: bytes) -> Head:
    """Read the head of a request for a pass. If the bytes are invalid, use the fields before the error."""
    found: dict[str, Any] = {}
    with suppress(WireError):
        for number, value in fields_of(body):
            if number == 1:
                found["model_id"] = _text(value)
            elif number == 2:
                found["seq_id"] = _number(value)
            elif number == 6:
                found["forward_only"] = bool(_number(value))
    return Head(**found)


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Read a request for a forward pass, or for a forward and a backward pass."""
    loss, forward_only, left = "", False, _MOST_NUMBERS
    data: list[Datum] = []
    config: dict[str, float | str] = {}
    for number, value in fields_of(body):
        if number == 3:
            data.append(_datum(_bytes(value), left))
            left -= sum(one.size for one in data[-1].inputs.values())
        elif number == 4:
            loss = _text(value)
        elif number == 5:
            name, given = _entry(value)
            config.setdefault(name, _double(given))
        elif number == 6:
            forward_only = bool(_number(value))
        elif number == 7:
            name, given = _entry(value)
            inner = dict(fields_of(_bytes(given if given is not None else b"")))
            config[name] = _text(inner[2]) if 2 in inner else _double(inner.get(1))
    return ForwardBackward(data, loss, config, forward_only)


def _datum(message: bytes, left: int) -> Datum:
    tokens: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in fields_of(message):
        if number == 1:
            tokens.append(_chunk(_bytes(value)))
        elif number == 2:
            name, given = _entry(value)
            inputs[name] = read_tensor(_bytes(given if given is not None else b""), left)
            left -= inputs[name].size
    return Datum(np.concatenate([np.zeros(0, np.int64), *tokens]), inputs)


def _chunk(message: bytes) -> np.ndarray:
    for number, value in fields_of(message):
        if number != 1:
            raise WireError("a model input has a chunk of images or audio: only chunks of tokens are served")
        return _array(dict(fields_of(_bytes(value))).get(1, b""), np.dtype("<i4")).astype(np.int64)
    return np.zeros(0, np.int64)


def _array(value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    raw = _bytes(value)
    if len(raw) % dtype.itemsize:
        raise WireError(f"{len(raw)} bytes are no whole number of {dtype}")
    return np.frombuffer(raw, dtype)


def read_tensor(message: bytes, most: int = _MOST_NUMBERS) -> np.ndarray:
    """Read a tensor of up to `most` numbers. Entries that a sparse tensor does not list are zero."""
    dense, sparse, kind = b"", None, 0
    shape: list[int] = []
    for number, value in fields_of(message):
        if number == 1:
            dense = _bytes(value)
        elif number == 2:
            sparse = dict(fields_of(_bytes(value)))
        elif number == 3:
            kind = _number(value)
        elif number == 4:  # packed into bytes, or one number per field
            shape += _packed(value) if isinstance(value, bytes) else [_number(value)]
    if kind not in _DTYPES:
        raise WireError(f"a tensor is of type {kind}; float32 and int64 are served")
    size = 1
    for side in shape:
        size *= side
        if side < 0 or size > most:
            raise WireError(f"a tensor of shape {shape[:4]} has a negative side, or more than {most} numbers")
    if sparse is not None:
        return _dense(sparse, shape, _DTYPES[kind])
    values = _array(dense, _DTYPES[kind])
    if values.size > most:
        raise WireError(f"the tensors of a request have more than {_MOST_NUMBERS} numbers")
    if shape and values.size != size:
        raise WireError(f"a tensor of shape {shape[:4]} needs {size} numbers and has {values.size}")
    return values.reshape(shape) if shape else values


def _packed(message: bytes) -> list[int]:
    found, at = [], 0
    while at < len(message):
        value, at = _varint(message, at)
        found.append(_number(value))
    return found


def _dense(sparse: Mapping[int, Any], shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    values = _array(sparse.get(1, b""), dtype)
    ends, columns = (_array(sparse.get(number, b""), np.dtype("<i8")) for number in (2, 3))
    rows = np.diff(ends)
    if (
        len(shape) != 2
        or len(ends) != shape[0] + 1
        or ends[0] != 0
        or (rows < 0).any()
        or not ends[-1] == len(values) == len(columns)
        or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1])
    ):
        raise WireError("a sparse tensor's rows and columns do not fit its shape")
    dense = np.zeros(tuple(shape), dtype)
    dense[np.repeat(np.arange(shape[0]), rows), columns] = values
    return dense


# Functions that write fields as bytes. Concatenated fields are a message.


def number_field(number: int, value: int) -> bytes:
    return _key(number, _NUMBER) + _written(value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return _key(number, _BYTES) + _written(len(raw)) + raw


def double_field(number: int, value: float) -> bytes:
    return _key(number, _EIGHT) + struct.pack("<d", value)


def entry(number: int, key: str, value: bytes) -> bytes:
    """Write an entry of a map. `value` must be a field with number 2."""
    return bytes_field(number, bytes_field(1, key) + value)


def _key(number: int, kind: int) -> bytes:
    return _written(number << 3 | kind)


def _written(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def tensor(values: np.ndarray) -> bytes:
    kind = _FLOAT32 if values.dtype.kind == "f" else _INT64
    shape = b"".join(_written(side) for side in values.shape)
    raw = np.ascontiguousarray(values, _DTYPES[kind]).tobytes()
    return bytes_field(1, raw) + number_field(3, kind) + bytes_field(4, shape)


def forward_backward_output(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """Write the outputs of each datum, float32 arrays [N, ...] by name, and the metrics."""
    out = bytes_field(1, "ArrayRecord")
    first = 0
    # a record has consecutive data whose arrays have the same shapes except for the first dimension
    while first < len(outputs):
        sides = {name: array.shape[1:] for name, array in outputs[first].items()}
        last = first + 1
        while last < len(outputs) and {name: array.shape[1:] for name, array in outputs[last].items()} == sides:
            last += 1
        out += bytes_field(2, _record(outputs[first:last]))
        first = last
    return out + b"".join(entry(3, name, double_field(2, value)) for name, value in metrics.items())


def _record(outputs: Sequence[Mapping[str, np.ndarray]]) -> bytes:
    record = b""
    for name in outputs[0]:
        arrays = [np.ascontiguousarray(output[name], "<f4") for output in outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
        sides = b"".join(_written(side) for side in arrays[0].shape[1:])
        batched = bytes_field(1, b"".join(array.tobytes() for array in arrays)) + bytes_field(2, offsets.tobytes())
        record += entry(2, name, bytes_field(2, batched + number_field(3, _FLOAT32) + bytes_field(4, sides)))
    return record + number_field(3, len(outputs))


@dataclass(frozen=True)
class Completed:
    """A completion."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: tuple[np.ndarray, np.ndarray] | None = None  # ids and log-probs of the most likely tokens, [tokens, k]


@dataclass(frozen=True)
class Sampled:
    """The response to a request for samples."""

    sequences: Sequence[Completed]
    prompt_logprobs: np.ndarray | None = None  # NaN if unknown
    top: tuple[np.ndarray, np.ndarray] | None = None
    targets: np.ndarray | None = None
    alternatives: tuple[np.ndarray, np.ndarray] | None = None


def sample_response(sampled: Sampled) -> bytes:
    out = b""
    for one in sampled.sequences:
        sequence = number_field(1, 0 if one.stopped else 1) + bytes_field(2, np.asarray(one.tokens, "<i4").tobytes())
        sequence += bytes_field(3, np.asarray(one.logprobs, "<f4").tobytes())
        out += bytes_field(1, sequence + (b"" if one.top is None else bytes_field(4, _top(*one.top))))
    if sampled.prompt_logprobs is not None:
        out += bytes_field(2, np.asarray(sampled.prompt_logprobs, "<f4").tobytes())
    if sampled.top is not None:
        out += bytes_field(3, _top(*sampled.top))
    if sampled.targets is not None:
        out += bytes_field(5, tensor(sampled.targets))
    if sampled.alternatives is not None:
        tokens, logprobs = sampled.alternatives
        out += bytes_field(6, bytes_field(1, tensor(tokens)) + bytes_field(2, tensor(logprobs)))
    return out


def _top(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    raw = bytes_field(1, np.ascontiguousarray(ids, "<i4").tobytes())
    raw += bytes_field(2, np.ascontiguousarray(logprobs, "<f4").tobytes())
    return raw + number_field(3, ids.shape[1]) + number_field(4, ids.shape[0])
