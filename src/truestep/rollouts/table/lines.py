"""Fast parsing of JSON lines: Arrow parses the lists of numbers of many lines at once, Python's parser the rest.

Only the usual formatting is supported. Any deviation in a line (other spaces, nested lists, a repeated key, text among
numbers, an infinity) makes the line doubtful: the caller then parses it with `parse_json`, which reports errors.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from truestep.rollouts.fields import Field, number_lists
from truestep.rollouts.files import parse_json

_AFTER_ZERO = np.isin(np.arange(256), list(b".eE"))
_CUT = "<a list of numbers>"  # placeholder for a list that was cut out of a line
_CUT_TEXT = f'"{_CUT}"'.encode()


def read_lines(lines: Sequence[bytes], declared: Sequence[Field] = ()) -> list[dict[str, Any] | None]:
    """Return the record of each line as `parse_json` would, or None for a doubtful line.

    Lists of numbers become arrays, with NaN for null. `declared` are the user's fields.
    """
    kinds = number_lists(declared)
    found_list = re.compile(rb'"(%s)"\s*:\s*\[' % "|".join(kinds).encode())
    records: list[dict[str, Any] | None] = []
    lists: dict[str, list[tuple[int, bytes]]] = {name: [] for name in kinds}
    for number, line in enumerate(lines):
        record, texts = _cut(line, found_list)
        records.append(record)
        for name, text in texts.items():
            lists[name].append((number, text))
    for name, found in lists.items():
        arrays = _arrays([text for _, text in found], kinds[name])
        for (number, _), array in zip(found, arrays, strict=True):
            if array is None:
                records[number] = None
            elif (record := records[number]) is not None:
                record[name] = array
    return records


def _cut(line: bytes, a_list: "re.Pattern[bytes]") -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """Cut the lists of numbers out of a line. Returns the parsed rest, and the text inside the brackets by name."""
    texts: dict[str, bytes] = {}
    pieces: list[bytes] = []
    place = 0
    while found := a_list.search(line, place):
        name, end = found[1].decode(), line.find(b"]", found.end())
        if end < 0:
            return None, {}
        texts[name] = line[found.end() : end]
        pieces += line[place : found.end() - 1], _CUT_TEXT
        place = end + 1
    rest = b"".join((*pieces, line[place:]))
    if not texts or rest.count(_CUT_TEXT) != len(texts):
        return None, {}
    record = parse_json(rest)
    # A cut list may have been nested inside another value, where it is not a field of the record.
    if not isinstance(record, dict) or any(record.get(name) != _CUT for name in texts):
        return None, {}
    return record, texts


def _arrays(texts: Sequence[bytes], kind: Any) -> list[np.ndarray | None]:
    """Parse lists of numbers together; if any is doubtful, parse each separately."""
    if not texts:
        return []
    separator = b", " if b", " in texts[0] else b","
    joined = separator.join(texts)
    if kind is np.bool_:
        joined = joined.replace(b"false", b"0").replace(b"true", b"1")
    if b"n" in joined:
        joined = joined.replace(b"null", b"NaN")
    numbers = _numbers(joined, separator, pa.float64() if issubclass(kind, np.floating) else pa.int64())
    if numbers is None:
        return [None] if len(texts) == 1 else [array for text in texts for array in _arrays([text], kind)]
    sizes = [np.count_nonzero(np.frombuffer(text, np.uint8) == ord(",")) + 1 for text in texts]
    return list(np.split(numbers, np.cumsum(sizes)[:-1]))


def _numbers(text: bytes, separator: bytes, kind: pa.DataType) -> np.ndarray | None:
    """Parse numbers with a separator between them. Returns None unless each is a JSON number or NaN.

    Arrow parses numbers bit-exactly like Python, but also accepts forms that JSON forbids (01, .5, 1., 0x1, words), so
    the characters are checked first.
    """
    written = np.frombuffer(text + b"    ", np.uint8)  # padded: an empty last number starts beyond the text
    commas = np.flatnonzero(written == ord(","))
    starts = np.append(0, commas + len(separator))
    ends = np.append(commas, len(text))
    if separator == b", " and (written[commas + 1] != ord(" ")).any():
        return None
    negative = written[starts] == ord("-")
    first, second = written[starts + negative], written[starts + negative + 1]
    good = _digits(first) & _digits(written[ends - 1])
    good &= (first != ord("0")) | _AFTER_ZERO[second] | (ends - starts == 1)  # -0 is the integer 0, not -0.0
    if b"N" in text:
        good |= (first == ord("N")) & (second == ord("a")) & (written[starts + 2] == ord("N")) & (ends - starts == 3)
    exponents = np.flatnonzero((written | 32) == ord("e"))
    if not (good.all() and _digits(written[exponents - 1]).all()):
        return None
    # An Arrow string array over the text: numbers alternate with separators, which the bitmap 0x55 marks as null.
    bounds = np.stack([starts, ends], 1)
    present = pa.py_buffer(b"\x55" * (len(starts) // 4 + 1))
    texts = pa.LargeStringArray.from_buffers(2 * len(starts) - 1, pa.py_buffer(bounds), pa.py_buffer(text), present)
    try:
        _, values = texts.cast(kind).buffers()
    except pa.ArrowInvalid:
        return None
    numbers = np.frombuffer(values, kind.to_pandas_dtype(), len(texts))[::2]
    return None if np.isinf(numbers).any() else numbers


def _digits(characters: np.ndarray) -> np.ndarray:
    found: np.ndarray = characters - np.uint8(ord("0")) < 10  # uint8: characters below "0" wrap around
    return found
