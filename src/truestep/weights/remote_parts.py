"""Parts of a checkpoint that are in the memory of other machines. A rank reads the bytes it needs from a keeper."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from truestep.process import progress
from truestep.ranks.keeper import Key
from truestep.ranks.keeper_client import RemoteKeeper

_MOST = 2**26  # bytes of an answer
_remote: dict[Path, dict[str, "RemotePart"]] = {}  # by the directory of a checkpoint that keepers hold


@dataclass(frozen=True)
class RemotePart:
    """A file of a checkpoint that a keeper of another machine holds."""

    keeper: RemoteKeeper
    key: Key
    name: str

    def read(self, start: int, count: int) -> bytearray:
        content = bytearray()
        with progress.waiting_for(f"the keeper of {self.keeper.host}"), self.keeper.connected() as connection:
            while len(content) < count:
                piece = connection.read(self.key, self.name, start + len(content), min(_MOST, count - len(content)))
                if not piece:
                    raise ValueError(f"{self.name} ends at its byte {start + len(content)}")
                content += piece
                progress.made("bytes read from other machines", len(piece))
        return content


def note_remote(checkpoint: Path, parts: Mapping[str, RemotePart]) -> None:
    """Record, for this process, that keepers hold a checkpoint, and which of its parts are on other machines."""
    _remote[checkpoint.resolve()] = dict(parts)


def forget_remote(checkpoint: Path) -> None:
    _remote.pop(checkpoint.resolve(), None)


def remote_parts(checkpoint: Path) -> Mapping[str, RemotePart]:
    """Return the parts of a checkpoint that are on other machines, by the names of their files."""
    return _remote.get(checkpoint.resolve(), {})


def from_keepers(checkpoint: Path) -> bool:
    """Tell whether keepers hold the files of a checkpoint."""
    return checkpoint.resolve() in _remote
