"""A checkpoint's tensors in parts: each rank writes its parts, and a rank of any layout reads its own.

A part is a box: a start and a length in each dimension of the whole tensor. A checkpoint's `truestep/tensors.json`
lists the boxes of each tensor with file and byte offset, so that a rank reads only the values that it needs. With a
thousand ranks there are a million boxes, so the boxes of a tensor are stored as a compressed table of numbers.
"""

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from truestep.files.tensors import TYPES_BY_NAME, tensor_places
from truestep.files.whole import exact_object
from truestep.process import progress
from truestep.ranks.group import divide
from truestep.weights.lazy import Unread
from truestep.weights.protocol import Weights
from truestep.weights.remote_parts import remote_parts

FOLDER = "truestep"
INDEX = "tensors.json"
WEIGHT, BUFFER, STATE = "weight/", "buffer/", "optimizer/"  # prefixes of keys in a checkpoint


@dataclass(frozen=True)
class Box:
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds the box `outer`."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.shape, strict=True))

    @staticmethod
    def of_view(view: torch.Tensor, whole: Sequence[int]) -> "Box | None":
        """Return the box of a contiguous tensor of shape `whole` that a view covers; None if the view is not a box."""
        strides = torch.empty(tuple(whole), device="meta").stride()
        if view.stride() != strides or view.ndim != len(whole):
            return None
        start, rest = [], int(view.storage_offset())
        for stride in strides:
            place, rest = divmod(rest, max(1, stride))
            start.append(place)
        return Box(tuple(start), tuple(view.shape))


NUMBER = Box((), ())  # the box of a scalar


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor, with its values. Scalars are tensors without dimensions."""

    key: str
    whole: tuple[int, ...]  # the shape of the whole tensor
    start: tuple[int, ...]
    values: torch.Tensor


class Tensors(Protocol):
    """Tensors by key. Any box of a tensor can be read."""

    def keys(self) -> Iterable[str]: ...

    def shape(self, key: str) -> torch.Size: ...

    def read(self, key: str, box: Box) -> torch.Tensor:
        """Read a box into new host memory."""
        ...


class _Places:
    """The weights and boxes that this rank writes to checkpoints; computed once per policy."""

    def __init__(self, weights: Weights):
        self.boxes: dict[tuple[str, tuple[int, ...]], Box] = {}
        ranks, parts = weights.ranks, {**weights.frozen, **weights.master}
        own = [name for name, piece in weights.pieces.items() if name in parts and piece.counted_on(ranks)]
        shares = divide([float(parts[name].numel()) for name in own], ranks.size_of("data_replicate"))
        self.names = [own[index] for index in shares[ranks.place_on("data_replicate")]]


_PLACES: WeakKeyDictionary[Weights, _Places] = WeakKeyDictionary()


def _places_of(weights: Weights) -> _Places:
    return _PLACES.get(weights) or _PLACES.setdefault(weights, _Places(weights))


def own_box(weights: Weights, name: str, shape: Sequence[int]) -> Box:
    """Return this rank's box of a tensor that is cut like the weight `name`. The box may be empty."""
    boxes, key = _places_of(weights).boxes, (name, tuple(shape))
    if key not in boxes:
        box = Box.of_view(weights.part_of(name, torch.empty(key[1], device="meta")), shape)
        assert box is not None, f"this rank's part of {name} is no box"
        boxes[key] = box
    return boxes[key]


def written_here(weights: Weights) -> list[str]:
    """Return the names of weights whose parts this rank writes. If several ranks have the same part, one of them writes
    it."""
    return _places_of(weights).names


def weight_parts(weights: Weights) -> Iterator[TensorPart]:
    """Yield the parts of weights that this rank writes."""
    parts = {**weights.frozen, **weights.master}
    for name in written_here(weights):
        shape = weights.pieces[name].shape
        box = own_box(weights, name, shape)
        if box.numbers:
            yield TensorPart(WEIGHT + name, tuple(shape), box.start, parts[name].detach())


def part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def describe_parts(file: Path, parts: Iterable[TensorPart], name: str | None = None) -> bytes:
    """Describe a file of parts for `write_index`. The description is compressed, because every rank gets those of all
    ranks. `name`: the file's name in the checkpoint."""
    places = tensor_places(file)
    described = {
        part.key: {"type": places[part.key][0], "whole": list(part.whole), "start": list(part.start)}
        | {"shape": list(part.values.shape), "file": name or file.name, "byte": places[part.key][1]}
        for part in parts
    }
    return zlib.compress(json.dumps(described).encode(), 1)


def write_index(folder: Path, described: Iterable[bytes]) -> None:
    (folder / INDEX).write_bytes(index_of(described))


def index_of(described: Iterable[bytes]) -> bytes:
    """Make the index of all parts of all tensors. If several ranks wrote a scalar, the first entry is kept."""
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, int] = {}
    for content in described:
        for key, part in json.loads(zlib.decompress(content)).items():
            entry = tensors.setdefault(key, {"type": part["type"], "shape": part["whole"], "parts": []})
            if part["whole"] or not entry["parts"]:
                file = files.setdefault(part["file"], len(files))
                entry["parts"].append([file, part["byte"], *part["start"], *part["shape"]])
    packed = {key: entry | {"parts": _packed(entry["parts"])} for key, entry in tensors.items()}
    return json.dumps({"files": list(files), "tensors": packed}).encode()


def _packed(rows: Sequence[Sequence[int]]) -> str:
    """Write a table of numbers as text. The differences of a column are alike, so they compress well."""
    differences = np.diff(np.array(rows, "<i8"), axis=0, prepend=0)
    return base64.b64encode(zlib.compress(np.ascontiguousarray(differences.T).tobytes(), 1)).decode()


def _unpacked(text: str, columns: int) -> np.ndarray:  # [rows, columns]
    try:
        content = zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as error:
        raise ValueError(f"a table of parts is damaged: {error}") from error
    rows: np.ndarray = np.frombuffer(content, "<i8").reshape(columns, -1).cumsum(1).T
    return rows


@dataclass(frozen=True)
class _Place:
    file: Path
    byte: int
    box: Box


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: torch.Size
    files: Sequence[Path]  # of the checkpoint
    parts: Any  # as in the index: a packed table, or a list as earlier versions wrote it

    def rows(self) -> np.ndarray:
        """Return a row for each part: file, byte, start and shape."""
        columns = 2 + 2 * len(self.shape)
        if isinstance(self.parts, str):
            return _unpacked(self.parts, columns)
        numbers = {file.name: number for number, file in enumerate(self.files)}
        rows = [[numbers[file], byte, *start, *shape] for file, byte, start, shape in self.parts]
        return np.array(rows, np.int64).reshape(-1, columns)

    def common(self, box: Box) -> Iterator[tuple[_Place, Box]]:
        """Yield each part that has values of a box, with the box of these values."""
        rows, ndim = self.rows(), len(self.shape)
        starts, ends = rows[:, 2 : 2 + ndim], rows[:, 2 : 2 + ndim] + rows[:, 2 + ndim :]
        begins = np.maximum(starts, np.array(box.start, np.int64))
        lengths = np.minimum(ends, np.add(box.start, box.shape).astype(np.int64)) - begins
        for number in np.flatnonzero((lengths > 0).all(1)).tolist():
            file, byte, *rest = rows[number].tolist()
            place = _Place(self.files[file], byte, Box(tuple(rest[:ndim]), tuple(rest[ndim:])))
            yield place, Box(tuple(begins[number].tolist()), tuple(lengths[number].tolist()))


# A choice of rows of each tensor: part `a` of `b`, then of these rows part `c` of `d`, and so on, as FSDP divides rows.
# If there are fewer rows than parts, as for stacked experts, the bytes of each row are divided.
Shares = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class IndexSpans:
    """The places of all tensors' rows in the files of a checkpoint."""

    files: Mapping[str, int]  # numbers by name
    # [spans, 6], by file and byte: the file's number, first byte, first row, rows, bytes of a row, the tensor's rows
    table: np.ndarray

    def rows(self, shares: Shares) -> dict[str, list[tuple[int, int]]]:
        """Return the spans of a rank's share of each tensor, by file."""
        file, byte, first, count, width, size = self.table.T
        low, high = np.zeros_like(size), size
        # This rank's number among the ranks that divide the bytes of these rows, and their number.
        place, places = np.zeros_like(size), np.ones_like(size)
        for part, parts in shares:
            rows = high - low
            enough, each = rows >= parts, -(-rows // parts)
            begin, end = (np.minimum(low + each * number, high) for number in (part, part + 1))
            low, high = np.where(enough, begin, low), np.where(enough, end, high)
            place, places = np.where(enough, place, place * parts + part), np.where(enough, places, places * parts)
        size = (high - low) * width  # bytes
        begin, end = (low * width + size * number // places for number in (place, place + 1))
        begin, end = np.maximum(first * width, begin), np.minimum((first + count) * width, end)
        starts, stops = byte - first * width + begin, byte - first * width + end
        names, found = list(self.files), dict[str, list[tuple[int, int]]]()
        for number in np.flatnonzero(begin < end).tolist():
            found.setdefault(names[file[number]], []).append((int(starts[number]), int(stops[number])))
        return found

    def whole(self, name: str) -> np.ndarray:  # [spans, 2]
        """Return the spans of all rows in a file, in order."""
        first, last = np.searchsorted(self.table[:, 0], self.files.get(name, -1) + np.arange(2))
        _, byte, _, count, width, _ = self.table[first:last].T
        return np.stack([byte, byte + count * width], 1)


def spans_of(index: bytes) -> IndexSpans:
    """Return the places of all tensors' rows, from the content of a checkpoint's `INDEX`. Scalars have no rows."""
    entries = _entries(index, Path(FOLDER))
    files: Sequence[Path] = next((entry.files for entry in entries.values()), ())
    tables = [np.zeros((0, 6), np.int64)]
    for entry in entries.values():
        rows, ndim = entry.rows(), len(entry.shape)
        if (rows < 0).any() or (rows[:, 0] >= len(files)).any():
            raise ValueError("its parts have places that do not exist")
        if ndim:
            width = rows[:, 3 + ndim :].prod(1) * entry.dtype.itemsize
            size = np.full(len(rows), entry.shape[0], np.int64)
            tables.append(np.stack([rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 2 + ndim], width, size], 1))
    table = np.concatenate(tables)
    table = table[(table[:, 3] * table[:, 4]) > 0]
    return IndexSpans(
        {str(file): number for number, file in enumerate(files)}, table[np.lexsort((table[:, 1], table[:, 0]))]
    )


class StoredTensors(Tensors):
    """The tensors of a checkpoint. Only requested boxes are read."""

    def __init__(self, checkpoint: Path):
        self._folder = checkpoint / FOLDER
        self._entries = _entries((self._folder / INDEX).read_bytes(), self._folder)
        self._remote = remote_parts(checkpoint)

    @staticmethod
    def has_weights(directory: Path) -> bool:
        """Tell whether a directory is a checkpoint with weights in parts."""
        return (directory / FOLDER / INDEX).is_file()

    def keys(self) -> list[str]:
        return list(self._entries)

    def named(self, prefix: str) -> dict[str, str]:
        """Return the keys that begin with a prefix, by their names without the prefix."""
        return {key.removeprefix(prefix): key for key in self._entries if key.startswith(prefix)}

    def shape(self, key: str) -> torch.Size:
        return self._entries[key].shape

    def dtype(self, key: str) -> torch.dtype:
        return self._entries[key].dtype

    def read(self, key: str, box: Box) -> torch.Tensor:
        entry = self._entries[key]
        result = torch.empty(box.shape, dtype=entry.dtype)
        found = 0
        for place, common in entry.common(box):
            result[common.inside(box)].copy_(self._values(place, common, entry.dtype))
            found += common.numbers
            progress.made("bytes read", common.numbers * entry.dtype.itemsize)
        if found != box.numbers:
            raise ValueError(f"{key} has {found:,} of the {box.numbers:,} numbers that are asked for")
        return result

    def _values(self, place: _Place, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of a box of a place, from its file or from another machine."""
        remote = self._remote.get(place.file.name)
        if remote is None:
            return _mapped(place, dtype)[box.inside(place.box)]
        outer, start = place.box, 0
        if outer.shape:  # whole rows
            rows = math.prod(outer.shape[1:]) * dtype.itemsize
            start = (box.start[0] - outer.start[0]) * rows
            outer = Box((box.start[0], *outer.start[1:]), (box.shape[0], *outer.shape[1:]))
        content = remote.read(place.byte + start, outer.numbers * dtype.itemsize)
        return torch.frombuffer(content, dtype=dtype).view(outer.shape)[box.inside(outer)]

    def read_whole(self, key: str) -> torch.Tensor:
        shape = self.shape(key)
        return self.read(key, Box((0,) * len(shape), tuple(shape)))


def unread_weight(stored: StoredTensors, key: str, looks: torch.Tensor) -> Unread:
    """Return an unread tensor of a checkpoint. Reading a view of it reads only the view's values."""
    whole = stored.shape(key)

    def narrower(view: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        box = Box.of_view(view, whole)
        return None if box is None else partial(stored.read, key, box)

    return Unread.of(looks, partial(stored.read_whole, key), narrower)


def _mapped(place: _Place, dtype: torch.dtype) -> torch.Tensor:
    """Map a part's file into memory. Only accessed pages are read; the map is freed with the tensor."""
    size = place.box.numbers * dtype.itemsize
    with progress.waiting_for(f"the disk to read {place.file}"):
        content = np.memmap(place.file, dtype=np.uint8, mode="c", offset=place.byte, shape=(size,))
    return torch.from_numpy(content).view(dtype).view(place.box.shape)


def _entries(index: bytes, folder: Path) -> dict[str, _Entry]:
    content = exact_object(index)
    tensors = content["tensors"]
    named = content.get("files") or dict.fromkeys(part[0] for entry in tensors.values() for part in entry["parts"])
    files = [folder / name for name in named]
    return {
        key: _Entry(TYPES_BY_NAME[entry["type"]], torch.Size(entry["shape"]), files, entry["parts"])
        for key, entry in tensors.items()
    }
