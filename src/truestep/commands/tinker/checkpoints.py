"""Saved weights on the disk: DIRECTORY/TENANT/RUN/KIND/NAME, each with `saved.json` beside the checkpoint itself.

A tenant's directory is named after a hash of its name. A checkpoint is complete, or not there: it is written beside its
place and moved.
"""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
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
_SHORTEST, _LONGEST = 3600, 10 * 366 * 86400  # seconds of a time to live


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
    """A checkpoint, as `saved.json` says."""

    run: str
    kind: str
    name: str
    time: float
    adapted: dict[str, Any]
    steps: int
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None
    hidden: bool = False  # of a sampler without a name: it is not listed
    checkpoint: str = ""  # the directory within, as `Session.save` named it
    size: int = field(default=0)

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def shown(self) -> dict[str, Any]:
        """Return what the client is told."""
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
    """The checkpoints of all tenants. Expired ones are removed when anyone looks, and by `sweep`."""

    def __init__(self, directory: Path, now: Callable[[], float] = time.time):
        self._directory, self.now = directory, now

    def _of(self, tenant: str) -> Path:
        return self._directory / sha256(tenant.encode()).hexdigest()[:32]

    def place(self, tenant: str, run: str, kind: str, name: str) -> Path:
        return self._of(tenant) / run.replace(":", "_") / kind / name

    def write(self, tenant: str, saved: Saved, save: Callable[[Path], Path], *, overwrite: bool) -> Saved:
        """Write a checkpoint by `save`, which writes into a directory and returns what it wrote."""
        place = self.place(tenant, saved.run, saved.kind, saved.name)
        if place.exists() and not overwrite and self.find_here(place) is not None:
            raise JobError(f"{saved.path} exists already: give another name, or overwrite it")
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

    def recover(self) -> None:
        """Remove what a process has left that was ended: the checkpoints of samplers without names, and what was being
        written. A checkpoint that was written and not moved to its place yet is moved."""
        for kind in self._kinds():
            for partial in sorted(kind.glob(".*")):
                saved = self.find_here(partial)
                if saved is not None and saved.kind == kind.name and not (kind / saved.name).exists():
                    partial.rename(kind / saved.name)
                else:
                    shutil.rmtree(partial, ignore_errors=True)
            for place in sorted(kind.glob("[!.]*")):
                if (saved := self.find_here(place)) is not None and saved.hidden:
                    shutil.rmtree(place, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the checkpoints that have expired."""
        for kind in self._kinds():
            for place in sorted(kind.glob("[!.]*")):
                self.find_here(place)

    def _kinds(self) -> list[Path]:
        """Return the directories that checkpoints lie in."""
        tenants = [one for one in self._directory.glob("*") if _TENANT.fullmatch(one.name)]
        return [kind for one in tenants for name in (WEIGHTS, SAMPLER) for kind in sorted(one.glob(f"*/{name}"))]

    def find_here(self, place: Path) -> Saved | None:
        """Return the checkpoint at a place; None if there is none. An expired one is removed."""
        try:
            saved = Saved(**json.loads((place / "saved.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        if saved.expires_at is not None and saved.expires_at <= self.now():
            shutil.rmtree(place, ignore_errors=True)
            return None
        return saved

    def find(self, tenant: str, path: Any) -> tuple[Saved, Path]:
        """Return a tenant's checkpoint by its tinker path, and its directory."""
        met = _PATH.fullmatch(path) if isinstance(path, str) else None
        if met is None:
            raise ApiError("a path tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME is expected")
        run, kind, name = met.groups()
        if not _RUN.fullmatch(run) or not _NAME.fullmatch(name):
            raise unknown("checkpoint")
        place = self.place(tenant, run, kind, name)
        saved = self.find_here(place)
        if saved is None or saved.path != path:  # a run's colons are no colons in the name of its directory
            raise unknown("checkpoint")
        return saved, place / saved.checkpoint

    def of_run(self, tenant: str, run: str) -> list[Saved]:
        """Return the checkpoints of a run that are listed, newest first."""
        if not _RUN.fullmatch(run):
            return []
        return self._sorted(self._all(self._of(tenant) / run.replace(":", "_")))

    def of_tenant(self, tenant: str) -> list[Saved]:
        own = self._of(tenant)
        runs = sorted(own.iterdir()) if own.is_dir() else []
        return self._sorted(saved for run in runs for saved in self._all(run))

    def hidden(self, tenant: str, run: str) -> list[Saved]:
        """Return the checkpoints of a run that have no names of their own, the oldest first."""
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
        """Remove a checkpoint, which may be gone already."""
        shutil.rmtree(self.place(tenant, saved.run, saved.kind, saved.name), ignore_errors=True)

    def set_expiry(self, tenant: str, path: str, seconds: float | None) -> Saved:
        saved, directory = self.find(tenant, path)
        saved = replace(saved, expires_at=None if seconds is None else self.now() + seconds)
        write_json(directory.parent / "saved.json", asdict(saved))
        return saved
