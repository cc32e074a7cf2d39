"""Finds the tenant of an API key. A tenant is a name, and cannot see other tenants' objects."""

import hmac
import re
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

from truestep.commands.tinker.errors import ApiError
from truestep.commands.tinker.usage import Quota
from truestep.errors import TruestepError

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})\s+(?P<key>\S{1,512})(?P<quotas>(\s+\S+)*)")
_QUOTA = re.compile(r"(?P<name>[^=]+)=(?P<number>[0-9][0-9_]{0,19})")
_FEWEST = 16  # fewest characters of a key
METRICS = "metrics"  # the name of the tenant whose key reads only /metrics


class TenantsError(TruestepError):
    pass


class Tenants:
    """The tenants in a file of lines `NAME KEY QUOTAS`. Without a file, every key is a separate tenant."""

    def __init__(self, file: Path | None):
        self._keys: dict[str, str] | None = None
        self._quotas: dict[str, Quota] = {}
        if file is not None:
            self._keys, self._quotas = _read(file)

    @property
    def by_keys(self) -> bool:
        """Tell whether every key is a tenant of its own."""
        return self._keys is None

    def quota(self, tenant: str) -> Quota:
        return self._quotas.get(tenant, Quota())

    def check_metrics(self, key: str | None) -> None:
        """Raise if this key may not read the metrics of all tenants."""
        if self._keys is None:
            return
        if not key or METRICS not in self._keys or not hmac.compare_digest(self._keys[METRICS].encode(), key.encode()):
            raise ApiError(f"metrics are read with the key of the line {METRICS} of the file of keys", 401)

    def of(self, key: str | None) -> str:
        """Return the tenant with this key."""
        if not key or len(key) > 4096:
            raise ApiError("the request has no API key", 401)
        if self._keys is None:
            return f"key-{sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}"
        found = [name for name, own in self._keys.items() if hmac.compare_digest(own.encode(), key.encode())]
        if not found or found[0] == METRICS:
            raise ApiError("the API key is of no tenant", 401)
        return found[0]


def older_name(key: str) -> str:
    """Return the name that a key's tenant had, without a file of keys, before names were digests."""
    return f"key {key}"


def _read(file: Path) -> tuple[dict[str, str], dict[str, Quota]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TenantsError(f"--tinker-keys: {file} cannot be read: {error}") from error
    keys: dict[str, str] = {}
    quotas: dict[str, Quota] = {}
    for place, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        met = _LINE.fullmatch(line.strip())
        if met is None or len(met["key"]) < _FEWEST:
            raise TenantsError(
                f"--tinker-keys: line {place} of {file}: a name and a key of {_FEWEST} characters or more"
            )
        if met["name"] in keys or met["key"] in keys.values():
            raise TenantsError(f"--tinker-keys: line {place} of {file}: the name or the key was there before")
        keys[met["name"]] = met["key"]
        try:
            quotas[met["name"]] = _quota(met["name"], met["quotas"].split())
        except ValueError as error:
            raise TenantsError(f"--tinker-keys: line {place} of {file}: {error}") from None
    if not keys:
        raise TenantsError(f"--tinker-keys: {file} has no tenant")
    return keys, quotas


def _quota(tenant: str, words: list[str]) -> Quota:
    names = [one.name for one in fields(Quota)]
    given: dict[str, int] = {}
    for word in words:
        met = _QUOTA.fullmatch(word)
        if met is None or not met["number"].replace("_", "").isdecimal():
            raise ValueError(f"{word[:60]} is no quota: one is NAME=NUMBER, and the number is written in digits")
        if met["name"] not in names:
            raise ValueError(f"{met['name'][:60]} is unknown: quotas are {', '.join(names)}")
        if met["name"] in given:
            raise ValueError(f"{met['name']} is given twice")
        given[met["name"]] = int(met["number"].replace("_", ""))
        if not given[met["name"]]:
            raise ValueError("a quota is 1 or more")
    if given and tenant == METRICS:
        raise ValueError(f"{METRICS} reads metrics alone, and has no quota")
    return Quota(**given)
