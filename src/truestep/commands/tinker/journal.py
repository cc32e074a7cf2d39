"""Keeps sessions, models and accepted requests on disk, so that a server that was killed goes on where it was.

DIRECTORY/SESSION/session.jsonl has what was made in a session: models and samplers. DIRECTORY/SESSION/MODEL/N is a
state of a model with the requests since: `state.json`, a checkpoint (none for a new model), and `requests`, a file of
records. A request is written before its promise is given, and its result before it is told. After a restart the
requests are computed again, from the state on, which gives the same weights. From time to time a newer state takes the
place of the old one: it is written to a temporary directory and renamed.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any

from truestep.errors import TruestepError
from truestep.files.whole import write_json

_SESSION, _STATE, _REQUESTS = "session.jsonl", "state.json", "requests"
_GONE = ".gone-"
_LARGEST_HEAD = 2**16  # bytes of a record's first line


class JournalError(TruestepError):
    pass


@dataclass(frozen=True)
class Record:
    """A request of a model, or a result."""

    head: dict[str, Any]
    body: bytes

    @property
    def seq(self) -> int:
        return int(self.head["seq"])

    @property
    def is_request(self) -> bool:
        return self.head["kind"] == "request"


@dataclass(frozen=True)
class Kept:
    """The last state of a model."""

    next_seq: int
    version: int
    checkpoint: Path | None  # None: the model as it was created


class Journal:
    def __init__(self, directory: Path):
        self._directory = directory
        self._grown: dict[str, int] = {}  # bytes of requests and results since each model's last state
        self._sizes: dict[str, int] = {}  # bytes of each model's last state
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)  # tenants' requests are for nobody else
        self._lock = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalError(f"another server uses {directory.parent}: give it another directory") from None

    def close(self) -> None:
        self._lock.close()

    # Sessions

    def note(self, session: str, event: Mapping[str, Any]) -> None:
        """Write what was made in a session. The first note begins it."""
        place = self._directory / session
        if event["kind"] == "session":
            place.mkdir(exist_ok=True)
        _append(place / _SESSION, json.dumps(event).encode() + b"\n")

    def place(self, session: str) -> Path:
        return self._directory / session

    def events(self, session: str) -> list[dict[str, Any]]:
        file = self._directory / session / _SESSION
        lines = file.read_bytes() if file.exists() else b""
        whole = lines[: lines.rfind(b"\n") + 1]
        if len(whole) < len(lines):  # the server was killed while it wrote
            os.truncate(file, len(whole))
        return [json.loads(line) for line in whole.splitlines()]

    def sessions(self) -> list[str]:
        """Return the sessions that have not ended, after a restart."""
        for gone in self._directory.glob(f"{_GONE}*"):
            shutil.rmtree(gone, ignore_errors=True)
        return sorted(one.name for one in self._directory.iterdir() if one.is_dir())

    def forget(self, session: str) -> None:
        """Forget a session that has ended, and its models. Its files are removed by `clean`."""
        place = self._directory / session
        if place.exists():
            place.rename(self._directory / f"{_GONE}{session}")

    def clean(self, session: str) -> None:
        """Remove the files of a forgotten session. A state that is being written makes its directory again: then
        call this again when the write has ended."""
        shutil.rmtree(self._directory / f"{_GONE}{session}", ignore_errors=True)
        if not (self._directory / session / _SESSION).exists():
            shutil.rmtree(self._directory / session, ignore_errors=True)
        for counted in (self._grown, self._sizes):
            for model in [model for model in list(counted) if model.startswith(f"{session}:")]:
                counted.pop(model, None)

    # Models

    def _of(self, model: str) -> Path:
        session, _, number = model.rpartition(":train:")
        return self._directory / session / number

    def begin(self, model: str) -> None:
        """Begin the requests of a new model."""
        place = self._of(model) / "0"
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / _STATE, {"next_seq": 1, "version": 0, "checkpoint": None})

    def _complete(self, model: str) -> list[Path]:
        """Return the directories of a model's states that were written whole."""
        return [one for one in self._of(model).glob("[0-9]*") if (one / _STATE).is_file()]

    def _last(self, model: str) -> Path:
        complete = self._complete(model)
        if not complete:
            raise FileNotFoundError(ENOENT, "the model's session has finished", str(self._of(model)))
        return max(complete, key=lambda one: int(one.name))

    def kept(self, model: str) -> Kept:
        """Return the last state of a model. Remove what is older or incomplete."""
        begun = self._complete(model) or any(self._of(model).glob(f"*/{_REQUESTS}"))
        if not begun:  # the server was killed, or its disk was full, before the first state was there
            self.begin(model)
        last = self._last(model)
        for other in self._of(model).iterdir():
            if other != last:
                shutil.rmtree(other, ignore_errors=True)
        state = json.loads((last / _STATE).read_text(encoding="utf-8"))
        self._sizes[model] = _bytes(last)
        self._grown[model] = (last / _REQUESTS).stat().st_size if (last / _REQUESTS).exists() else 0
        name = state["checkpoint"]
        return Kept(state["next_seq"], state["version"], None if name is None else last / name)

    def request(self, model: str, seq: int, path: str, body: bytes) -> None:
        """Write a request that is accepted."""
        self._write(model, {"kind": "request", "seq": seq, "path": path}, body)

    def result(self, model: str, seq: int, told: dict[str, Any], body: bytes) -> None:
        """Write a request's result or error."""
        self._write(model, {"kind": "result", "seq": seq, **told}, body)

    def _write(self, model: str, head: dict[str, Any], body: bytes) -> None:
        line = json.dumps({**head, "size": len(body)}).encode()
        if len(line) > _LARGEST_HEAD:
            raise JournalError(f"a record of {len(line)} bytes is too large")
        record = line + b"\n" + body
        _append(self._last(model) / _REQUESTS, record)
        self._grown[model] = self._grown.get(model, 0) + len(record)

    def grown(self, model: str) -> int:
        """Return the bytes of requests and results since the last state, or since one could not be written."""
        return self._grown.get(model, 0)

    def size(self, model: str) -> int:
        """Return the bytes of the last state."""
        return self._sizes.get(model, 0)

    def bytes(self, session: str) -> int:
        """Return the bytes of a session on disk."""
        return _bytes(self._directory / session)

    def records(self, model: str) -> Iterator[Record]:
        """Yield the records of a model, in the order in which they were written. Cut off one that is incomplete."""
        file = self._last(model) / _REQUESTS
        if file.exists():
            yield from _read(file)

    def keep(self, model: str, next_seq: int, version: int, save: Callable[[Path], Path]) -> Callable[..., None]:
        """Save a model's state as it is before the request `next_seq`. Return a function that makes it the last one: it
        is called with a test of the results that are still wanted, while no request is written. If the state cannot be
        written, the bytes are counted anew, so that it is not tried again after each request."""
        self._grown[model] = 0
        last = self._last(model)
        partial = last.parent / f".{int(last.name) + 1}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            name = str(save(partial).relative_to(partial))
            write_json(partial / _STATE, {"next_seq": next_seq, "version": version, "checkpoint": name})
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

        def switch(wanted: Callable[[int], bool]) -> None:
            try:
                with open(partial / _REQUESTS, "wb", opener=_own) as file:
                    for record in _read(last / _REQUESTS) if (last / _REQUESTS).exists() else ():
                        if record.seq >= next_seq if record.is_request else wanted(record.seq):
                            file.write(json.dumps(record.head).encode() + b"\n" + record.body)
                size = _bytes(partial)
                partial.rename(last.parent / partial.name[1:])
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            self._sizes[model] = size
            shutil.rmtree(last, ignore_errors=True)

        return switch


def _bytes(directory: Path) -> int:
    found = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # it was removed in the meantime
                found += (Path(folder) / name).stat().st_size
    return found


def _own(file: str, flags: int) -> int:
    """Open a file that no other user reads."""
    return os.open(file, flags, 0o600)


def _append(file: Path, raw: bytes) -> None:
    """Append to a file, all or nothing as long as this process lives."""
    with open(file, "ab", buffering=0, opener=_own) as opened:
        before = opened.tell()
        try:
            view = memoryview(raw)
            while view:
                view = view[opened.write(view) :]
        except OSError:
            os.truncate(file, before)
            raise


def _read(file: Path) -> Iterator[Record]:
    size, at = file.stat().st_size, 0
    with file.open("rb") as opened:
        while at < size:
            line = opened.readline(_LARGEST_HEAD + 1)
            head: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
            end = opened.tell() + head.get("size", size)
            if end > size:  # the server was killed while it wrote
                os.truncate(file, at)
                return
            yield Record(head, opened.read(head["size"]))
            at = end
