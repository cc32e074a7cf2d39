"""Saved weights on disk: DIRECTORY/TENANT/RUN/KIND/NAME, each with `saved.json` and the checkpoint itself.

A tenant's directory is named by a hash of the tenant's name. A checkpoint is written to a temporary directory and
renamed, so it is either complete or absent.
"""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from truestep.commands.tinker.errors import ApiError, JobError, unknown
from truestep.files.whole import write_json

WEIGHTS, SAMPLER = "weights", "sampler_weights"
_TYPES = {WEIGHTS: "training", SAMPLER: "sampler"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,199}")
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
_TENANT = re.compile(r"[0-9a-f]{32}")
_SHORTEST, _LONGEST = 3600, 10 * 366 * 86400  # limits of a time to live, in seconds


@dataclass(frozen=True)
class Adapted:
    """How a model's adapter was made."""

    rank: int
    seed: int
    targets: list[str]
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint's `saved.json`."""

    run: str
    kind: str
    name: str
    time: float
    adapted: dict[str, Any]
    steps: int
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None
    hidden: bool = False  # saved for a sampler without a name; it is not listed
    checkpoint: str = ""  # name of the subdirectory that `Session.save` wrote
    size: int = field(default=0)
    request: str = ""  # the id of the request that saved it

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def shown(self) -> dict[str, Any]:
        """Return the description for clients."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": _TYPES[self.kind],
            "time": stamp(self.time),
            "tinker_path": self.path,
            "size_bytes": self.size,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires_at is None else stamp(self.expires_at),
        }


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def named(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError("path: a checkpoint's name has up to 200 letters, digits, dots, hyphens and underscores")
    return name


def time_to_live(seconds: Any) -> float | None:
    if seconds is None:
        return None
    if type(seconds) is not int or not _SHORTEST <= seconds <= _LONGEST:
        raise ApiError(f"ttl_seconds: a whole number from {_SHORTEST} to {_LONGEST}, or none, is expected")
    return float(seconds)


class Checkpoints:
    """The checkpoints of all tenants. Expired ones are removed when they are looked up, and by `sweep`."""

    def __init__(self, directory: Path, now: Callable[[], float] = time.time):
        self._directory, self.now = directory, now

    def _of(self, tenant: str) -> Path:
        return self._directory / sha256(tenant.encode(errors="surrogateescape")).hexdigest()[:32]

    def rename_tenant(self, before: str, tenant: str) -> None:
        """Give a tenant the checkpoints that it has under an older name."""
        old, new = self._of(before), self._of(tenant)
        if not old.is_dir():
            return
        new.mkdir(parents=True, exist_ok=True)
        for run in old.iterdir():
            if not (new / run.name).exists():
                run.rename(new / run.name)
        with suppress(OSError):  # runs that both directories have stay in the old one
            old.rmdir()

    def place(self, tenant: str, run: str, kind: str, name: str) -> Path:
        return self._of(tenant) / run.replace(":", "_") / kind / name

    def write(
        self,
        tenant: str,
        saved: Saved,
        save: Callable[[Path], Path],
        *,
        overwrite: bool,
        room: Callable[[], None] = lambda: None,
    ) -> Saved:
        """Write a checkpoint. `save` writes it into a given directory, and returns its path there. `room` raises if
        there is no room for it."""
        place = self.place(tenant, saved.run, saved.kind, saved.name)
        there = self.find_here(place)
        if there is not None and there.request and there.request == saved.request:
            return there  # the same request wrote it, before the server was restarted
        if there is not None and not overwrite:
            raise JobError(f"{saved.path} exists already: give another name, or overwrite it")
        room()
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=place.parent, prefix="."))
        try:
            written = save(partial)
            size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
            saved = replace(saved, checkpoint=written.name, size=size)
            write_json(partial / "saved.json", asdict(saved))
            if place.exists():
                shutil.rmtree(place)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return saved

    def check_room(self, tenant: str, most: int, live: int) -> None:
        """Raise if a tenant has used its quota of `most` bytes: for checkpoints, for samplers without names, and for
        the `live` bytes of its models in the journal."""
        own = self._of(tenant)
        hidden = [saved for run in (own.iterdir() if own.is_dir() else ()) for saved in self._all(run, hidden=True)]
        there = [sum(saved.size for saved in some) for some in (self.of_tenant(tenant), hidden)]
        if sum(there) + live >= most:
            parts = f"{there[0]} bytes, samplers without names {there[1]} and models {live}"
            raise JobError(f"your checkpoints have {parts}, and {most} is your quota: remove some, or finish sessions")

    def recover(self, sessions: Collection[str] = ()) -> None:
        """Clean up after a process that was killed: remove incomplete checkpoints, and checkpoints of samplers without
        names, except those of `sessions`, which continue. Rename a complete checkpoint that was not yet renamed."""
        for kind in self._kinds():
            for partial in sorted(kind.glob(".*")):
                saved = self.find_here(partial)
                if saved is not None and saved.kind == kind.name and not (kind / saved.name).exists():
                    partial.rename(kind / saved.name)
                else:
                    shutil.rmtree(partial, ignore_errors=True)
            for place in sorted(kind.glob("[!.]*")):
                saved = self.find_here(place)
                if saved is not None and saved.hidden and saved.run.partition(":")[0] not in sessions:
                    shutil.rmtree(place, ignore_errors=True)

    def sweep(self) -> None:
        """Remove expired checkpoints."""
        for kind in self._kinds():
            for place in sorted(kind.glob("[!.]*")):
                self.find_here(place)

    def _kinds(self) -> list[Path]:
        """Return the directories that contain checkpoints."""
        tenants = [one for one in self._directory.glob("*") if _TENANT.fullmatch(one.name)]
        return [kind for one in tenants for name in (WEIGHTS, SAMPLER) for kind in sorted(one.glob(f"*/{name}"))]

    def find_here(self, place: Path) -> Saved | None:
        """Return the checkpoint in a directory; None if there is none. An expired one is removed."""
        try:
            saved = Saved(**json.loads((place / "saved.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        if saved.expires_at is not None and saved.expires_at <= self.now():
            shutil.rmtree(place, ignore_errors=True)
            return None
        return saved

    def find(self, tenant: str, path: Any) -> tuple[Saved, Path]:
        """Return a tenant's checkpoint with this tinker path, and its directory."""
        met = _PATH.fullmatch(path) if isinstance(path, str) else None
        if met is None:
            raise ApiError("a path tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME is expected")
        run, kind, name = met.groups()
        if not _RUN.fullmatch(run) or not _NAME.fullmatch(name):
            raise unknown("checkpoint")
        place = self.place(tenant, run, kind, name)
        saved = self.find_here(place)
        # colons in a run's name are underscores in its directory's name, so another run may be found
        if saved is None or saved.path != path:
            raise unknown("checkpoint")
        return saved, place / saved.checkpoint

    def of_run(self, tenant: str, run: str) -> list[Saved]:
        """Return the listed checkpoints of a run, newest first."""
        if not _RUN.fullmatch(run):
            return []
        return self._sorted(self._all(self._of(tenant) / run.replace(":", "_")))

    def of_tenant(self, tenant: str) -> list[Saved]:
        own = self._of(tenant)
        runs = sorted(own.iterdir()) if own.is_dir() else []
        return self._sorted(saved for run in runs for saved in self._all(run))

    def hidden(self, tenant: str, run: str) -> list[Saved]:
        """Return a run's checkpoints for samplers without names, oldest first."""
        found = self._all(self._of(tenant) / run.replace(":", "_"), hidden=True)
        return sorted(found, key=lambda saved: (saved.time, saved.name))

    def _all(self, run: Path, *, hidden: bool = False) -> Iterator[Saved]:
        for kind in (WEIGHTS, SAMPLER):
            for place in sorted((run / kind).glob("[!.]*")):
                saved = self.find_here(place)
                if saved is not None and saved.hidden == hidden:
                    yield saved

    def _sorted(self, found: Iterator[Saved]) -> list[Saved]:
        return sorted(found, key=lambda saved: (-saved.time, saved.path))

    def remove(self, tenant: str, path: str) -> None:
        self.discard(tenant, self.find(tenant, path)[0])

    def discard(self, tenant: str, saved: Saved) -> None:
        """Remove a checkpoint. It may already be removed."""
        shutil.rmtree(self.place(tenant, saved.run, saved.kind, saved.name), ignore_errors=True)

    def set_expiry(self, tenant: str, path: str, seconds: float | None) -> Saved:
        saved, directory = self.find(tenant, path)
        saved = replace(saved, expires_at=None if seconds is None else self.now() + seconds)
        write_json(directory.parent / "saved.json", asdict(saved))
        return saved
