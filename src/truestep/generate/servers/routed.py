"""Reads the experts in vLLM's and SGLang's answers: those of all tokens but the last, in all hidden layers.

An answer also has values for layers that do not route; `Completion.routes` does not. An answer is base64 of a `.npy`
file (vLLM), or of plain integers (SGLang). This module checks that the layers are the model's; `check_answer` checks
the rest.

Dimensions: R rows, one for each token but the last; H hidden layers, L of them that route; k experts of a token.
"""

import base64
import re

import numpy as np

from truestep.files.bounded import MIB, too_long
from truestep.generate.errors import BadAnswerError
from truestep.types import ROUTES, RouteShape

_WIDEST = 4  # bytes of a number
# The start of a file that `numpy.save` writes, in version 1.0 of the format. The two bytes with the header's length are
# not checked, since the header's end shows its length.
_START = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(\|u1|<u2|<i4)', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)


def bytes_of_routes(shape: RouteShape | None, tokens: int) -> int:
    """Return the most bytes that the experts of `tokens` tokens take in an answer."""
    return 0 if shape is None else (4 * _WIDEST * shape.layers * shape.chosen // 3 + 4) * tokens


def read_npy(text: object, shape: RouteShape | None, tokens: int) -> np.ndarray | None:  # [R, L, k]
    """Read base64 of a `.npy` file [R, H, k]. None: the answer has no experts, or they were not requested."""
    if shape is None or not text:
        return None
    data = _decode(text, shape, tokens)
    start = _START.match(data)
    if start is None:
        raise BadAnswerError(f"{ROUTES} is no .npy file of uint8, uint16 or int32 in three dimensions, row by row")
    head = int.from_bytes(data[8:10], "little")
    size = tuple(map(int, start.groups()[1:]))
    dtype, (rows, layers, chosen) = np.dtype(start[1].decode()), size
    if start.end() != 10 + head or len(data) - start.end() != rows * layers * chosen * dtype.itemsize:
        raise BadAnswerError(f"{ROUTES} has {len(data):,} bytes, and its header says {size} of {dtype}")
    return _of_layers(np.frombuffer(data, dtype, offset=start.end()).reshape(size), shape)


def read_integers(text: object, shape: RouteShape | None, tokens: int) -> np.ndarray | None:  # [R, L, k]
    """Read base64 of int32 [R, H, k], little-endian. None: the answer has no experts, or they were not requested."""
    if shape is None or not text:
        return None
    data = _decode(text, shape, tokens)
    row = _WIDEST * shape.layers * shape.chosen
    if len(data) % row or len(data) < row:
        raise BadAnswerError(
            f"{ROUTES} has {len(data):,} bytes, which are not whole rows of int32 [{shape.layers}, {shape.chosen}]: "
            f"its layers or its number of experts are not those of {shape.name}"
        )
    return _of_layers(np.frombuffer(data, "<i4").reshape(-1, shape.layers, shape.chosen), shape)


def _decode(text: object, shape: RouteShape, tokens: int) -> bytes:
    most = MIB + bytes_of_routes(shape, tokens)
    if not isinstance(text, str):
        raise BadAnswerError(f"{ROUTES} is no base64 text")
    if len(text) > most:
        raise BadAnswerError(f"{ROUTES} is not read: {too_long(most)}, more than the experts of {tokens} tokens take")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise BadAnswerError(f"{ROUTES} is no base64 text") from error


def _of_layers(values: np.ndarray, shape: RouteShape) -> np.ndarray:  # [R, H, k] -> [R, L, k]
    """Select the layers that route. Numbers that are not expert ids are kept, so that the check reports them."""
    if values.shape[1] != shape.layers:
        raise BadAnswerError(
            f"{ROUTES} has {values.shape[1]} layers: {shape.name} has {shape.layers}, including layers without experts"
        )
    own = values[:, list(shape.numbers)]
    dtype = np.uint8 if max(shape.experts) <= 2**8 else np.uint16
    fits = own.min(initial=0) >= 0 and own.max(initial=0) <= np.iinfo(dtype).max
    return own.astype(dtype, copy=False) if fits else own
