"""Files of tensors, written and read piece by piece: each piece is progress, and a disk that stands still is named.

safetensors' own writer is one call that holds up every thread of the process until the last byte is written. The files
are the same, byte for byte.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open

from truestep import progress

_PIECE = 2**24  # bytes that are written at a time
# Bytes after which what was written goes to the disk: one sync of a whole model would be one wait without a sign of
# life. Its pieces take as long as it does.
_SYNCED = 2**26
# Names of types in a file, in the order in which their tensors stand there: each lies at a multiple of its size.
_TYPES = {
    getattr(torch, name): stored
    for name, stored in (
        ("uint64", "U64"),
        ("int64", "I64"),
        ("float64", "F64"),
        ("complex64", "C64"),
        ("float32", "F32"),
        ("uint32", "U32"),
        ("int32", "I32"),
        ("bfloat16", "BF16"),
        ("float16", "F16"),
        ("uint16", "U16"),
        ("int16", "I16"),
        ("float8_e5m2fnuz", "F8_E5M2FNUZ"),
        ("float8_e4m3fnuz", "F8_E4M3FNUZ"),
        ("float8_e8m0fnu", "F8_E8M0"),
        ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"),
        ("int8", "I8"),
        ("uint8", "U8"),
        ("bool", "BOOL"),
    )
}
_ORDER = {dtype: place for place, dtype in enumerate(_TYPES)}
TYPES_BY_NAME = {name: dtype for dtype, name in _TYPES.items()}


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    file: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    watch: Callable[[memoryview], None] | None = None,
) -> None:
    """Write a safetensors file, and put it on the disk. `watch` is shown the bytes as they are written, in order."""
    unknown = {tensor.dtype for tensor in tensors.values()} - set(_TYPES)
    if unknown:
        raise TypeError(f"tensors of {min(map(str, unknown))} cannot be saved")
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name.encode()))
    with progress.waiting_for(f"the disk to write {file}"), open(file, "wb", buffering=0) as stream:
        written = _Written(stream.fileno(), watch)
        written.add(_header(tensors, names, metadata))
        for name in names:
            written.add(_bytes_of(tensors[name]))
        written.sync()


def _header(tensors: Mapping[str, torch.Tensor], names: list[str], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


class _Written:
    """What was written to a file, and what of it is not on the disk yet."""

    def __init__(self, handle: int, watch: Callable[[memoryview], None] | None):
        self._handle, self._waiting, self._watch = handle, 0, watch

    def add(self, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        while rest:
            count = os.write(self._handle, rest[:_PIECE])
            if self._watch is not None:
                self._watch(rest[:count])
            progress.made("bytes written", count)
            rest, self._waiting = rest[count:], self._waiting + count
            if self._waiting >= _SYNCED:
                self.sync()

    def sync(self) -> None:
        os.fdatasync(self._handle) if hasattr(os, "fdatasync") else os.fsync(self._handle)
        progress.made("bytes on the disk", self._waiting)
        self._waiting = 0


def read_tensors(file: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read a safetensors file into memory."""
    found = {}
    with progress.waiting_for(f"the disk to read {file}"), safe_open(file, "pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - it is no dictionary
            found[name] = stored.get_tensor(name).clone()  # which reads it: until then the file is only mapped
            progress.made("bytes read", found[name].nbytes)
    return found


def _read_header(file: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file, and where its tensors begin."""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def tensor_sizes(file: str | os.PathLike[str]) -> dict[str, int]:
    """Read the names of a safetensors file's tensors, and the bytes of each, from its header alone."""
    offsets = {name: entry["data_offsets"] for name, entry in _read_header(file)[0].items()}
    return {name: end - start for name, (start, end) in offsets.items()}


def tensor_places(file: str | os.PathLike[str]) -> dict[str, tuple[str, int, list[int]]]:
    """Read, from its header alone, the type of each tensor of a safetensors file, the byte it begins at, its shape."""
    header, begin = _read_header(file)
    return {name: (entry["dtype"], begin + entry["data_offsets"][0], entry["shape"]) for name, entry in header.items()}


@contextmanager
def transformers_write_tensors(write: Callable[..., None] = write_tensors) -> Iterator[None]:
    """Have transformers write its files of tensors by `write_tensors`, or by another function. It is assumed to call
    `safe_save_file`; if it wrote in another way, the files would be the same."""
    from transformers import modeling_utils

    module: Any = modeling_utils
    honest = getattr(module, "safe_save_file", None)
    module.safe_save_file = write
    try:
        yield
    finally:
        module.safe_save_file = honest
