"""Finds the tenant of an API key. A tenant is a name, and cannot see other tenants' objects."""

import hmac
import re
from hashlib import sha256
from pathlib import Path

from truestep.commands.tinker.errors import ApiError
from truestep.errors import TruestepError

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?P<key>\S{1,512})")
_FEWEST = 16  # fewest characters of a key


class TenantsError(TruestepError):
    pass


class Tenants:
    """The tenants in a file of lines `NAME KEY`. Without a file, every key is a separate tenant."""

    def __init__(self, file: Path | None):
        self._keys = None if file is None else _read(file)

    def of(self, key: str | None) -> str:
        """Return the tenant with this key."""
        if not key or len(key) > 4096:
            raise ApiError("the request has no API key", 401)
        if self._keys is None:
            return f"key-{sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}"
        found = [name for name, own in self._keys.items() if hmac.compare_digest(own.encode(), key.encode())]
        if not found:
            raise ApiError("the API key is of no tenant", 401)
        return found[0]


def _read(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TenantsError(f"--tinker-keys: {file} cannot be read: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        met = _LINE.fullmatch(line.strip())
        if met is None or len(met["key"]) < _FEWEST:
            raise TenantsError(
                f"--tinker-keys: line {number} of {file}: a name and a key of {_FEWEST} characters or more"
            )
        if met["name"] in keys or met["key"] in keys.values():
            raise TenantsError(f"--tinker-keys: line {number} of {file}: the name or the key was there before")
        keys[met["name"]] = met["key"]
    if not keys:
        raise TenantsError(f"--tinker-keys: {file} has no tenant")
    return keys
