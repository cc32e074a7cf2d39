"""The documents of rollout files too large for memory, kept in a file that all ranks and runs of a host map.

The first process that opens rollout files reads and checks them, under a lock, and writes their documents one after
another; others wait for it. The written copy is either complete or absent. It is valid only for these files and these
checks.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from zlib_ng.zlib_ng import crc32

from truestep.files.whole import sync_directory, sync_tree
from truestep.process import progress
from truestep.rollouts.advantages import as_rule, groups_of, with_group_advantages
from truestep.rollouts.documents import arrays, document_bytes, read_document_bytes
from truestep.rollouts.files import DataError, Documents, collect, load_documents
from truestep.rollouts.record import Checks
from truestep.text import printable
from truestep.types import Rejected, Rollout

LARGE_BYTES = 1 << 24  # total size from which documents are kept in a file; less is read in under a second
_FORMAT = 1
_KEPT = 4096  # documents in the cache of groups with advantages
_DOCUMENTS, _INDEX, _FACTS = "documents", "index", "facts.json"
_ENTRY = np.dtype([("end", np.int64), ("checksum", np.uint32), ("group", np.int64), ("digest", "V16")])
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_SECONDS = 0.1
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def open_documents(paths: Sequence[Path], checks: Checks, cache: Path | None = None) -> Documents:
    """Read small files into memory, and large ones through a copy in `cache` (default: the user's cache directory).

    Runs that tokenize chat messages, or mask or drop truncated documents, read files of any size into memory.
    """
    if can_be_stored(checks):
        with contextlib.suppress(OSError):  # reading the files below reports the error
            if sum(path.stat().st_size for path in paths) >= LARGE_BYTES:
                return load_stored(paths, checks, cache or _default_directory())
    return load_documents(paths, checks)


def can_be_stored(checks: Checks) -> bool:
    """Return whether a run takes documents exactly as they are in its files."""
    return checks.chat is None and checks.truncated == "keep"


def load_stored(paths: Sequence[Path], checks: Checks, cache: Path) -> Documents:
    """Return the same documents as `load_documents`, without holding them in memory."""
    try:
        facts: dict[str, Any] = {
            "format": _FORMAT,
            "files": [_identity_of(path) for path in paths],
            "checks": _demands(checks),
        }
    except OSError as error:
        raise DataError(f"{printable(error.filename)} cannot be read: {printable(error.strerror or error)}") from error
    directory = cache / hashlib.sha256(json.dumps([file["path"] for file in facts["files"]]).encode()).hexdigest()[:24]
    with _told(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_suffix(".lock")):
            documents = _open(directory, facts, checks)
            if documents is None:
                _make(paths, checks, directory, facts)
                documents = _open(directory, facts, checks)
    if documents is None:
        raise DataError(f"data.cache_directory: what was written to {printable(cache)} cannot be read back")
    return documents


def _default_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "truestep" / "data"


def _identity_of(path: Path) -> dict[str, Any]:
    """Return a file's identity: its path, size, inode and times, and a digest of sampled blocks.

    Only a change that keeps the size, the ctime and every sampled block goes unnoticed, which does not happen by
    accident.
    """
    state = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in sorted({round(number * state.st_size / _SAMPLES) for number in range(_SAMPLES)}):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(state.st_size - 16 * _SAMPLE_BYTES, 0))
        digest.update(file.read())
    found = {"path": os.fsencode(path.resolve()).hex(), "given": os.fsencode(path).hex(), "samples": digest.hexdigest()}
    return found | {name: getattr(state, f"st_{name}") for name in ("size", "mtime_ns", "ctime_ns", "ino")}


def _demands(checks: Checks) -> list[Any]:
    """Return everything that decides which records become documents and how these are grouped, as JSON values."""
    fields = [(field.name, field.level, str(field.dtype), field.required, field.default) for field in checks.fields]
    needs = checks.needs
    demands = (
        *(needs.logprobs, needs.advantages, needs.reference_logprobs, as_rule(needs.advantage_rule).from_rewards),
        *(checks.vocabulary_size, checks.default_temperature, checks.max_tokens, checks.group_size),
        None if checks.routes is None else dataclasses.astuple(checks.routes),
        *(checks.stop_at_rejected, fields, list(arrays()), [item.name for item in dataclasses.fields(Rollout)]),
    )
    made: list[Any] = json.loads(json.dumps(demands))
    return made


@contextlib.contextmanager
def _told(cache: Path) -> Iterator[None]:
    """Convert an OSError of the cache's file system to a `DataError`."""
    try:
        yield
    except OSError as error:
        where = printable(cache)
        if error.errno in _FULL:
            raise DataError(
                f"data.cache_directory: the disk of {where} is full. The documents of large rollout files are written "
                "to it once and take about half of the files' size: name a directory with more room"
            ) from error
        raise DataError(f"data.cache_directory: {where} cannot be used: {printable(error)}") from error


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    with lock.open("a") as handle:
        with progress.waiting_for("another process that reads the same rollout files"):
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in _HELD:
                        break  # this file system has no locks: two processes may read the files, and one result is kept
                progress.made("waits for a process that lives, since its lock ends with it")
                time.sleep(_POLL_SECONDS)
        yield


def _make(paths: Sequence[Path], checks: Checks, directory: Path, facts: dict[str, Any]) -> None:
    """Write the documents to a temporary directory, sync it, and rename it to `directory`."""
    for leftover in directory.parent.glob(f".{directory.name}.*"):  # left by killed processes
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        content = _write_documents(paths, checks, work)
        if facts["files"] != [_identity_of(path) for path in paths]:
            raise DataError(
                f"{printable(', '.join(map(str, paths)), 300)}: changed while it was read: start again when it is "
                "complete"
            )
        sizes = {file.name: file.stat().st_size for file in work.iterdir()}
        (work / _FACTS).write_text(json.dumps({"facts": facts, "sizes": sizes, **content}), encoding="utf-8")
        sync_tree(work)
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(work, directory)
        sync_directory(directory.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Written:
    """The data of a written document that stays in memory."""

    id: str
    group_id: str | None
    reward: float | None
    advantages: bool | None  # True if the record has its own advantages, else None
    end: int  # the end of its bytes in the file
    checksum: int
    digest: bytes


def _write_documents(paths: Sequence[Path], checks: Checks, work: Path) -> dict[str, Any]:
    with (work / _DOCUMENTS).open("wb") as file:
        items = collect(paths, checks, lambda document: _write(document, file))
    kept = [item for item in items if isinstance(item, _Written)]
    group = np.full(len(kept), -1)
    if checks.needs.advantages and as_rule(checks.needs.advantage_rule).from_rewards:
        for number, members in enumerate(groups_of(items, checks.group_size)):
            group[members] = number
    rows = [(one.end, one.checksum, place, one.digest) for one, place in zip(kept, group, strict=True)]
    (work / _INDEX).write_bytes(np.array(rows, _ENTRY).tobytes())
    rejected = [dataclasses.astuple(item) for item in items if isinstance(item, Rejected)]
    sizes = Counter(item.group_id for item in items if item.group_id is not None)
    return {"ids": [one.id for one in kept], "rejected": rejected, "group_members": list(sizes.values())}


def _write(document: Rollout, file: BinaryIO) -> _Written:
    """Append a document, and return its entry of the index."""
    content = document_bytes(document)
    file.write(content)
    own = None if document.advantages is None else True
    digest = content_digest(document.input_ids, document.loss_mask)
    return _Written(document.id, document.group_id, document.reward, own, file.tell(), crc32(content), digest)


def content_digest(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """Return the digest of a document's tokens and labels."""
    digest = hashlib.blake2b(input_ids.tobytes(), digest_size=16)
    digest.update(loss_mask.tobytes())
    return digest.digest()


def _open(directory: Path, facts: dict[str, Any], checks: Checks) -> Documents | None:
    """Open the written copy. Return None if it is absent, damaged, or made from other files or with other checks."""
    try:
        content = json.loads((directory / _FACTS).read_bytes())
        if content["facts"] != facts:
            return None
        if any((directory / name).stat().st_size != size for name, size in content["sizes"].items()):
            return None
        rejected = tuple(Rejected(*one) for one in content["rejected"])
        index = np.fromfile(directory / _INDEX, _ENTRY)
        documents = StoredDocuments(directory, checks, index, content["ids"], content["group_members"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Documents(documents, rejected)


class StoredDocuments(Sequence[Rollout]):
    """A sequence of documents. Each is read from the mapped file when it is indexed."""

    def __init__(
        self, directory: Path, checks: Checks, index: np.ndarray, ids: Sequence[str], group_members: list[int]
    ):
        self._directory, self._ids, self._index = directory, ids, index
        self._rule = as_rule(checks.needs.advantage_rule)
        self.group_members = group_members  # records per group id
        groups = index["group"]
        self._order = np.argsort(groups, kind="stable")
        self._starts = np.searchsorted(groups[self._order], np.arange(-1, groups.max(initial=-1) + 2))
        self._kept: OrderedDict[int, dict[int, Rollout]] = OrderedDict()  # LRU cache of groups with advantages
        with (directory / _DOCUMENTS).open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(index) else b""

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        group = int(self._index["group"][number])
        return self._read(number) if group < 0 else self._group(group)[number]

    def _group(self, group: int) -> dict[int, Rollout]:
        """Return a group's documents with advantages, by document number."""
        if group not in self._kept:
            numbers = self._order[self._starts[group + 1] : self._starts[group + 2]].tolist()
            rollouts = with_group_advantages([self._read(number) for number in numbers], self._rule)
            self._kept[group] = dict(zip(numbers, rollouts, strict=True))
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]

    def _read(self, number: int) -> Rollout:
        start = int(self._index["end"][number - 1]) if number else 0
        content = self._content[start : int(self._index["end"][number])]
        if crc32(content) != self._index["checksum"][number]:
            with contextlib.suppress(OSError):
                (self._directory / _FACTS).unlink()  # so that the next start reads the files again
            raise DataError(
                f"data.cache_directory: the copy of rollout files in {printable(self._directory)} is damaged (document "
                f"{self._ids[number]}); start again, and it is written again"
            )
        return read_document_bytes(content)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Return the ids of documents without reading the documents."""
        return list(self._ids[start:stop])

    def digests(self, start: int, stop: int) -> list[bytes]:
        """Return the digests of tokens and labels that were written."""
        return [digest.tobytes() for digest in self._index["digest"][start:stop]]
