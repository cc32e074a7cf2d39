"""Parts of a checkpoint that are in the memory of other machines: a rank reads what it needs of them from a keeper."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.files.whole import exact_object
from truestep.process import progress
from truestep.ranks.keeper import Key
from truestep.ranks.keeper_client import Elsewhere

_FILE = "elsewhere.json"
_MOST = 2**26  # bytes of an answer


@dataclass(frozen=True)
class FarPart:
    """A file of parts that a keeper holds."""

    keeper: Elsewhere
    key: Key
    name: str

    def read(self, start: int, count: int) -> bytearray:
        return read_far(self.keeper, self.key, self.name, start, count)


def read_far(keeper: Elsewhere, key: Key, name: str, start: int, count: int) -> bytearray:
    """Read bytes of a file that a keeper of another machine holds."""
    content = bytearray()
    with progress.waiting_for(f"the keeper of {keeper.host}"), keeper.connected() as connection:
        while len(content) < count:
            piece = connection.read(key, name, start + len(content), min(_MOST, count - len(content)))
            if not piece:
                raise ValueError(f"{name} ends at its byte {start + len(content)}")
            content += piece
            progress.made("bytes read from other machines", len(piece))
    return content


def write_elsewhere(folder: Path, parts: Mapping[str, Mapping[str, Any]], secret: bytes) -> None:
    """Write where parts are; only this user can read it, since it has the keepers' secret."""
    handle = os.open(folder / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"secret": secret.hex(), "parts": parts}, file)


def read_elsewhere(folder: Path) -> dict[str, FarPart]:
    """Return the parts of a checkpoint that are on other machines, by the names of their files."""
    if not (folder / _FILE).is_file():
        return {}
    told = exact_object((folder / _FILE).read_bytes())
    secret = bytes.fromhex(told["secret"])
    found = {}
    for name, part in told["parts"].items():
        generation, began, step = part["set"]
        keeper = Elsewhere(part["host"], part["port"], secret)
        found[name] = FarPart(keeper, (generation, began, step), part["name"])
    return found
