"""Makes untrusted text safe to show: completions, exceptions of a user's reward, responses of servers, addresses.

Use `printable` for an untrusted value inside a sentence, and `shown` for a whole message before it is printed. Both
replace secrets, as `redacted` does.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

HIDDEN = "***"
"""The replacement of a secret."""

_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]{0,30}://[^\s\"'<>]{0,4000}")
_ASSIGNED = re.compile(
    r"(?i)(?<![\w-])(?P<name>[\w-]{0,60}?(?:password|passwd|passphrase|secret|key|credentials?|token|auth|authorization))"
    r"(?P<between>[\"']?\s{0,3}[:=]\s{0,3})(?P<value>\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',;&#)\]}]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
# An option holds a secret if the last word of its name is one of these; `tokens` and `key_env` do not match.
_SECRET = frozenset({"password", "passwd", "secret", "apikey", "credential", "credentials", "passphrase"})
_SECRET_TEXT = frozenset({"key", "token", "auth", "authorization"})
_NO_SECRET = frozenset({"", "null", "none", "~", "true", "false", HIDDEN})
# Prose contains "token: 5" and "key: 'id'". Before a colon, these words name a secret only at the end of a longer name
# (api_key, hf_token).
_IN_PROSE = re.compile(r"(?i)^(key|token|auth)$")
_known: set[str] = set()
_SHORTEST_KNOWN = 8  # characters; replacing a shorter secret would also replace ordinary words


def keep_secret(value: str | None) -> None:
    """Remember a secret of this process, such as the key to a server, so that `redacted` replaces it."""
    if value is not None and len(value) >= _SHORTEST_KNOWN:
        _known.add(value)


def printable(text: object, limit: int = 300) -> str:
    """Return untrusted text on one line, without secrets or control characters, in at most `limit` characters."""
    whole = _text_of(text)
    # Also redact some characters after the cut, so that a secret across the cut is found.
    shown = redacted(whole[: limit + 4000])
    safe = "".join(letter if letter.isprintable() else _escaped(letter) for letter in shown[: limit + 1])
    cut = len(shown) > limit or len(whole) > limit + 4000
    return (safe[: limit - 1] + "…") if cut or len(safe) > limit else safe


def shown(message: object, limit: int = 10_000) -> str:
    """Apply `printable` to each line of a message, and cut the message to `limit` characters."""
    lines = _text_of(message)[: limit + 4000].split("\n")
    safe = "\n".join(printable(line, limit) for line in lines)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def _text_of(value: object) -> str:
    """Convert any object to text, even if its own conversion raises."""
    try:
        return value.decode("utf-8", errors="replace") if isinstance(value, bytes | bytearray) else str(value)
    except Exception:  # `str` of an unknown object may raise any exception
        return f"<{type(value).__name__} that cannot be shown>"


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def redacted(text: str) -> str:
    """Replace the secrets in a text by ***: passwords in addresses, values of options such as api_key, and secrets
    given to `keep_secret`."""
    for secret in _known:
        text = text.replace(secret, HIDDEN)
    return _without_forms(text)


def _without_forms(text: str) -> str:
    """Replace text where a secret is expected: in an address, after `Bearer` or `Basic`, or after `api_key=`."""
    if "://" in text:
        text = _URL.sub(lambda found: _without_password(found.group()), text)
    text = _BEARER.sub(lambda found: f"{found[1]} {HIDDEN}", text)
    return _ASSIGNED.sub(_without_value, text) if "=" in text or ":" in text else text


def _without_password(url: str) -> str:
    """Replace the user and password of an address. Secrets in its query are replaced by `_without_value`."""
    if "@" not in url:
        return url
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            return urlunsplit(parts._replace(netloc=f"{HIDDEN}@{parts.netloc.rpartition('@')[2]}"))
    except ValueError:
        pass
    # urlsplit ends the host at a / or # in a password, so everything up to the last @ is replaced.
    scheme, _, rest = url.partition("://")
    authority, at, host = rest.rpartition("@")
    return f"{scheme}://{HIDDEN}@{host}" if at and ":" in authority else url


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    bare = value.strip("\"'")
    prose = _IN_PROSE.match(name) is not None and "=" not in found["between"]
    if prose or not names_secret(name) or bare.lower() in _NO_SECRET:
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{found['between']}{quote}{HIDDEN}{quote}"


def names_secret(name: str) -> bool:
    """Tell from the name of an option whether its value is a secret: a password, a token, a key."""
    last = re.split(r"[_.\-\s]", name.lower())[-1]
    return last in _SECRET or last in _SECRET_TEXT or last.endswith(("password", "apikey"))


def redacted_options(value: Any, name: str = "") -> Any:
    """Return a copy of a tree of options with *** for secrets at any depth."""
    if isinstance(value, Mapping):
        return {inner: redacted_options(item, str(inner)) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_options(item, name) for item in value]
    if names_secret(name) and value is not None and not isinstance(value, bool):
        last = re.split(r"[_.\-\s]", name.lower())[-1]
        # A number named `token` or `key` is an id or a count; one named `password` is a password.
        if isinstance(value, str) or last not in _SECRET_TEXT:
            return value if str(value).lower() in _NO_SECRET else HIDDEN
    # Not `redacted`: that would replace a dummy key inside a path.
    return _without_forms(value) if isinstance(value, str) else value


def keep_secrets_of(options: Any) -> None:
    """Remember the passwords in the addresses of a tree of options: a client's exception may quote a password without
    its address."""
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, list | tuple):
        for item in options:
            keep_secrets_of(item)
    elif isinstance(options, str) and "://" in options and "@" in options:
        user, _, password = options.partition("://")[2].rpartition("@")[0].partition(":")
        keep_secret(password or user)


def hidden_options(value: Any, name: str = "") -> list[str]:
    """Return the names of options that hold *** instead of a secret, as in a run's config.yaml."""
    if isinstance(value, Mapping):
        return [
            found
            for inner, item in value.items()
            for found in hidden_options(item, f"{name}.{inner}" if name else str(inner))
        ]
    if isinstance(value, list | tuple):
        return [name] if any(hidden_options(item, name) for item in value) else []
    hidden = isinstance(value, str) and (value == HIDDEN or re.search(rf"://{re.escape(HIDDEN)}@", value) is not None)
    return [name] if hidden else []


def discard(text: str) -> None:
    """Discard a message. For use where no message should be shown."""
