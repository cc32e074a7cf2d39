"""Compares a checkpoint with its checksums. The ranks divide the work.

Each checksum covers a long stretch of a file, and a sharded rank loads only some rows of each tensor, which are spans
of a stretch. So each rank computes the CRC-32 of the spans that it reads. CRC-32 is linear: if the checksum of each
span is shifted by the number of bytes after the span, they add up (XOR) to the checksum of the stretch. Every rank
reads the manifest and the index. Each other byte is read by one rank: rows of tensors as FSDP shards them, the rest in
equal parts.
"""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32, crc32_combine

from truestep.files.bounded import MALFORMED
from truestep.files.whole import LineError, exact_object
from truestep.process import progress
from truestep.ranks.elastic import RankLostError
from truestep.ranks.group import Ranks
from truestep.run.checkpoint.checksums import MANIFEST, READ, read_span, threads
from truestep.text import printable
from truestep.weights.tensor_parts import FOLDER, INDEX, IndexSpans, Shares, spans_of

_INDEX = f"{FOLDER}/{INDEX}"
# Seconds before each further attempt to read a manifest that some ranks do not see: on a network disk, a machine may
# see another machine's files late.
_LOOKS = (1.0, 2.0, 4.0, 8.0, 16.0)


def find_damage(checkpoint: Path) -> str | None:
    """Compare the files with their checksums; describe the first damage found, or return None. A directory without
    checksums is not checked."""
    comparison = Comparison(checkpoint)
    return next(iter(comparison.damages([comparison.read()]).values()), None)


def find_damage_together(checkpoint: Path, ranks: Ranks) -> str | None:
    """Do what `find_damage` does; each rank reads a part. Raise on all ranks if they do not see the same manifest.
    Every rank calls this."""
    comparison = _seen_by_all(checkpoint, ranks)
    return next(iter(comparison.damages(ranks.gather(comparison.read(shares_of(ranks)))).values()), None)


def _seen_by_all(checkpoint: Path, ranks: Ranks) -> "Comparison":
    for seconds in (0.0, *_LOOKS):
        with progress.waiting_for(f"all ranks to see {checkpoint / MANIFEST}"):
            time.sleep(seconds)
        comparison = Comparison(checkpoint)
        seen = ranks.gather(comparison.seen)
        if len(set(seen)) == 1:
            return comparison
    most = Counter(each for each in seen if each is not None).most_common(1)[0][0]
    others = [str(rank) for rank, each in enumerate(seen) if each != most]
    named = f"rank {others[0]} does" if len(others) == 1 else f"ranks {', '.join(others)} do"
    raise RankLostError(
        f"{named} not see {MANIFEST} of the checkpoint {checkpoint} as others of the {len(seen)} ranks do. If the "
        "network disk shows it late, start again. Otherwise compare the file on their machines"
    )


def shares_of(ranks: Ranks) -> Shares:
    """Return which rows of tensors a rank compares: less than twice an equal share. If weights are only sharded, these
    are the rows that the rank loads; replicas divide them. With tensor, pipeline or expert parallelism it loads other
    rows."""
    layout, others = ranks.layout, ("pipeline", "data_replicate")
    copies = layout.number(ranks.rank, others), layout.count(others)
    return (ranks.place_on("tensor"), ranks.tensor), (ranks.shard, ranks.shards), copies


@dataclass(frozen=True)
class Told:
    """The results of a rank for the bytes that it read."""

    seen: int | None  # the checksum of the manifest that the rank read; None: it found none
    sums: Mapping[int, int] = field(default_factory=dict)  # XOR of its spans' shifted checksums, by stretch
    problems: Mapping[str, str] = field(default_factory=dict)  # by file


@dataclass(frozen=True)
class Piece:
    """Bytes that a rank reads: a part of one stretch of a file."""

    name: str
    stretch: int  # the number of the stretch among those of all files
    start: int
    stop: int
    after: int  # the number of bytes of the stretch after this piece


@dataclass(frozen=True)
class _File:
    name: str
    bytes: int
    checksums: Sequence[int]  # of its stretches
    first: int  # the number of its first stretch


class Comparison:
    """A checkpoint's files and checksums, of which ranks read parts."""

    def __init__(self, checkpoint: Path, only: Collection[str] | None = None):
        self._checkpoint = checkpoint
        self._files: dict[str, _File] = {}
        self._length = READ
        self._spans: IndexSpans | None = None
        self._problems: dict[str, str] = {}
        self.seen: int | None = None
        try:
            content = (checkpoint / MANIFEST).read_bytes()
            self.seen = crc32(content)
            self._list(exact_object(content), only)
        except FileNotFoundError:
            return
        except (LineError, *MALFORMED) as error:
            self._problems[MANIFEST] = printable(f"{MANIFEST} is damaged: {error!r}")
        except OSError as error:
            self._problems[MANIFEST] = _unreadable(MANIFEST, error)
        if only is None and _INDEX in self._files and not self._problems:
            self._read_index()

    def _list(self, content: dict[str, Any], only: Collection[str] | None) -> None:
        length, files, stretches = content["bytes_per_checksum"], {}, 0
        if content.keys() != {"bytes_per_checksum", "files"} or type(length) is not int or length < READ:
            raise ValueError("its fields are not bytes_per_checksum and files")
        for name, facts in content["files"].items():
            size, checksums = facts["bytes"], facts["crc32"]
            if type(size) is not int or not 0 <= size <= sys.maxsize or len(checksums) != -(-size // length):
                raise ValueError(f"the size of {name} or its number of checksums is malformed")
            if b"\0" in os.fsencode(name):  # `fsencode` raises for other characters that no name can have
                raise ValueError(f"{name!r} is no name of a file")
            if only is None or name in only:
                files[name] = _File(name, size, checksums, stretches)
                stretches += len(checksums)
        self._files, self._length = files, length

    def _read_index(self) -> None:
        """Read the places of tensors' rows from the index. Each rank checks the index first, because the index decides
        what each rank reads."""
        file, size = self._files[_INDEX], self._size(_INDEX)
        if isinstance(size, str):
            self._problems[_INDEX] = size
        else:
            self._problems |= self.damages([self._told(self._pieces(file, [(0, file.bytes)]))], [file])
        if not self._problems:
            try:
                self._spans = spans_of((self._checkpoint / _INDEX).read_bytes())
            except (LineError, OSError, *MALFORMED) as error:
                self._problems[_INDEX] = printable(f"{_INDEX} is damaged: {error!r}")

    def read(self, shares: Shares = ()) -> Told:
        """Read a part of the files: the bytes that belong to one of the ranks. Without shares, read all."""
        if self._problems:
            return Told(self.seen, {}, self._problems)
        sizes = {name: self._size(name) for name in self._files}
        problems = {name: size for name, size in sizes.items() if isinstance(size, str)}
        told = self._told([piece for piece in self.pieces(shares) if piece.name not in problems])
        return Told(self.seen, told.sums, {**problems, **told.problems})

    def _size(self, name: str) -> int | str:
        """Return a file's size, or a sentence if it is not the size that was written."""
        try:
            there, written = (self._checkpoint / name).stat().st_size, self._files[name].bytes
        except FileNotFoundError:
            return printable(f"{name} is missing")
        except OSError as error:
            return _unreadable(name, error)
        return there if there == written else printable(f"{name} has {there} bytes, and {written} were written")

    def pieces(self, shares: Shares) -> list[Piece]:
        """Return what a rank reads: its rows of tensors, and its part of all other bytes."""
        rows, others = self._rows(shares)
        part, parts = 0, math.prod(count for _, count in shares)
        for place, count in shares:
            part = part * count + place
        total = sum(stop - start for spans in others.values() for start, stop in spans)
        begin, end, done = total * part // parts, total * (part + 1) // parts, 0
        found = []
        for name, file in self._files.items():
            own = list(rows.get(name, ()))
            for start, stop in others[name]:
                low, high = max(begin - done, 0), min(end - done, stop - start)
                own += [(start + low, start + high)] if low < high else []
                done += stop - start
            found += self._pieces(file, own)
        return found

    def _rows(self, shares: Shares) -> tuple[Mapping[str, Sequence[Any]], Mapping[str, Sequence[Any]]]:
        """Return by file the spans of a rank's rows, and the spans of all bytes that are in no row."""
        if self._spans is None:
            return {}, {name: [(0, file.bytes)] for name, file in self._files.items()}
        own = self._spans.rows(shares)
        others = {}
        for name, file in self._files.items():
            whole = self._spans.whole(name)
            ends = np.concatenate([[0], whole[:, 1]])
            starts = np.concatenate([whole[:, 0], [file.bytes]])
            others[name] = [(a, b) for a, b in zip(ends.tolist(), starts.tolist(), strict=True) if a < b]
        return own, others

    def _pieces(self, file: _File, spans: Iterable[tuple[int, int]]) -> list[Piece]:
        found = []
        for start, stop in joined(spans):
            while start < min(stop, file.bytes):  # an index of other files may name bytes after the end
                number = start // self._length
                end = min((number + 1) * self._length, file.bytes)
                until = min(stop, end)
                found.append(Piece(file.name, file.first + number, start, until, end - until))
                start = until
        return found

    def _told(self, pieces: Sequence[Piece]) -> Told:
        """Read pieces, which come file by file."""
        together: dict[tuple[str, int], list[Piece]] = {}
        for piece in pieces:
            together.setdefault((piece.name, piece.stretch), []).append(piece)
        size = sum(piece.stop - piece.start for piece in pieces)
        sums, problems = dict[int, int](), dict[str, str]()
        reading = progress.working("comparing the checkpoint with its checksums", "bytes read", size)
        with reading, ThreadPoolExecutor(threads()) as pool:
            for (name, number), found in zip(together, pool.map(self._sum, together.values()), strict=True):
                if isinstance(found, str):
                    problems.setdefault(name, found)
                else:
                    sums[number] = found
        return Told(self.seen, sums, problems)

    def _sum(self, pieces: Sequence[Piece]) -> int | str:
        """Return the contribution of one stretch's pieces to its checksum, or a sentence if they cannot be read."""
        total = 0
        try:
            with (self._checkpoint / pieces[0].name).open("rb", buffering=0) as file:
                for piece in pieces:
                    total ^= crc32_combine(read_span(file, piece.start, piece.stop - piece.start), 0, piece.after)
        except OSError as error:
            return _unreadable(pieces[0].name, error)
        return total

    def damages(self, told: Sequence[Told], files: Iterable[_File] | None = None) -> dict[str, str]:
        """Return a sentence for each damaged file, by its name. `told`: the results of the ranks, which together read
        all bytes of `files`, or of all files if it is None."""
        found: dict[str, str] = {}
        for each in told:
            found |= {name: problem for name, problem in each.problems.items() if name not in found}
        if len({each.seen for each in told}) > 1:
            found.setdefault(MANIFEST, f"{MANIFEST} is not the same for all ranks")
        if MANIFEST in found or _INDEX in found:  # the ranks may have divided the bytes in different ways
            return dict(sorted(found.items(), key=lambda item: item[0] not in (MANIFEST, _INDEX)))
        sums: dict[int, int] = {}
        for each in told:
            for number, value in each.sums.items():
                sums[number] = sums.get(number, 0) ^ value
        for file in self._files.values() if files is None else files:
            for number, checksum in enumerate(file.checksums):
                if file.name not in found and sums.get(file.first + number) != checksum:
                    start = number * self._length
                    end = min(start + self._length, file.bytes)
                    found[file.name] = printable(f"{file.name} is damaged in its bytes {start} to {end}")
        return found


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, with adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _unreadable(name: str, error: OSError) -> str:
    return printable(f"{Path(name).name} cannot be read: {error.strerror or error}")
