"""safetensors files, written and read in pieces: each piece reports progress, so an error message can name a disk that
hangs.

safetensors' own writer is one call that holds the GIL until the last byte is written. Our files are byte-identical to
its files.
"""

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from truestep.files.bounded import TooLargeError, load_json
from truestep.files.disks import writing
from truestep.process import progress

_LONGEST_HEADER = 100_000_000  # bytes; the limit of safetensors' own reader

_PIECE = 2**24  # most bytes per write
# Bytes between two syncs: a single sync of a whole model would be one long wait without progress, and is no faster.
_SYNCED = 2**26
# Alignment of direct I/O, in memory and in the file.
_PAGE = 2**12
# Names of dtypes in a file, in the order in which tensors are stored. In this order each tensor is aligned to its item
# size.
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


@dataclass(frozen=True)
class Layout:
    """The layout of a safetensors file: its header, followed by the tensors in the order of `starts`."""

    header: bytes
    starts: Mapping[str, int]  # the first byte of each tensor
    size: int


def lay_out(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Layout:
    unknown = {tensor.dtype for tensor in tensors.values()} - set(_TYPES)
    if unknown:
        raise TypeError(f"tensors of {min(map(str, unknown))} cannot be saved")
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name.encode()))
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end, starts = 0, {}
    for name in names:
        tensor, starts[name] = tensors[name], end
        end += tensor.nbytes
        entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    file: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file, and sync it."""
    layout = lay_out(tensors, metadata)
    waiting = progress.waiting_for(f"the disk to write {file}")
    with waiting, writing(file), open(file, "wb", buffering=0) as stream:
        written = _Written(stream.fileno())
        written.add(layout.header)
        for name in layout.starts:
            written.add(bytes_of(tensors[name]))
        written.sync()


def write_image(
    image: torch.Tensor, file: str | os.PathLike[str], watch: Callable[[memoryview], None] | None = None
) -> None:
    """Write a file from its complete image in memory, and sync it. `watch` is called with its bytes in order.

    Direct I/O is used where the file system supports it: no copies in the page cache.
    """
    content = bytes_of(image)
    whole_pages = len(content) // _PAGE * _PAGE if image.data_ptr() % _PAGE == 0 else 0
    waiting = progress.waiting_for(f"the disk to write {file}")
    with waiting, writing(file), open(file, "wb", buffering=0) as stream:
        written = _Written(stream.fileno(), watch)
        written.add_straight(content[:whole_pages])
        written.add(content[whole_pages:])
        written.sync()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


class _Written:
    """Writes to a file, with a sync after every `_SYNCED` bytes."""

    def __init__(self, handle: int, watch: Callable[[memoryview], None] | None = None):
        self._handle, self._waiting, self._watch = handle, 0, watch

    def add(self, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        while rest:
            rest = self._write(rest)

    def add_straight(self, content: memoryview) -> None:
        """Add page-aligned content, by direct I/O where the file system supports it."""
        rest = content
        with _direct(self._handle) as goes:
            try:
                while goes and rest:
                    rest = self._write(rest)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # direct I/O is not supported
                    raise
        self.add(rest)

    def _write(self, content: memoryview) -> memoryview:
        """Write up to `_PIECE` bytes. Return the rest."""
        count = os.write(self._handle, content[:_PIECE])
        if self._watch is not None:
            self._watch(content[:count])
        progress.made("bytes written", count)
        self._waiting += count
        if self._waiting >= _SYNCED:
            self.sync()
        return content[count:]

    def sync(self) -> None:
        os.fdatasync(self._handle) if hasattr(os, "fdatasync") else os.fsync(self._handle)
        progress.made("bytes on the disk", self._waiting)
        self._waiting = 0


@contextmanager
def _direct(handle: int) -> Iterator[bool]:
    """Switch a file to direct I/O within the block. Yield False if the system or file system does not support it."""
    flag = getattr(os, "O_DIRECT", 0)
    before = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        if flag:
            fcntl.fcntl(handle, fcntl.F_SETFL, before | flag)
    except OSError:
        flag = 0
    try:
        yield bool(flag)
    finally:
        if flag:
            fcntl.fcntl(handle, fcntl.F_SETFL, before)


def _read_header(file: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the byte at which its tensors begin."""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > min(_LONGEST_HEADER, os.fstat(stream.fileno()).st_size - 8):
            raise TooLargeError(f"{file} has a header of {size:,} bytes: more than the file or {_LONGEST_HEADER:,}")
        header = load_json(stream.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def tensor_sizes(file: str | os.PathLike[str]) -> dict[str, int]:
    """Return the bytes of each tensor of a safetensors file. Only the header is read."""
    offsets = {name: entry["data_offsets"] for name, entry in _read_header(file)[0].items()}
    return {name: end - start for name, (start, end) in offsets.items()}


def tensor_places(file: str | os.PathLike[str]) -> dict[str, tuple[str, int, list[int]]]:
    """Return the dtype, first byte and shape of each tensor of a safetensors file. Only the header is read."""
    header, begin = _read_header(file)
    return {name: (entry["dtype"], begin + entry["data_offsets"][0], entry["shape"]) for name, entry in header.items()}


@contextmanager
def transformers_write_tensors(write: Callable[..., None] = write_tensors) -> Iterator[None]:
    """Make transformers write its safetensors files with `write_tensors`, or another function, within the block. This
    replaces its `safe_save_file`. If a version of transformers does not call that, the files are the same."""
    from transformers import modeling_utils

    module: Any = modeling_utils
    honest = getattr(module, "safe_save_file", None)
    module.safe_save_file = write
    try:
        yield
    finally:
        module.safe_save_file = honest
