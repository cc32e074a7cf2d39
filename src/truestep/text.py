"""Text that others wrote, made safe to show: completions, exceptions of a user's reward, answers of servers, addresses.

Two functions are for what is shown: `printable` for one foreign value inside a sentence, `shown` for a whole message
before it is printed. Both leave out secrets, as `redacted` does.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

HIDDEN = "***"
"""The text that stands where a secret was."""

_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]{0,30}://[^\s\"'<>]{0,4000}")
_ASSIGNED = re.compile(
    r"(?i)(?<![\w-])(?P<name>[\w-]{0,60}?(?:password|passwd|passphrase|secret|key|credentials?|token|auth|authorization))"
    r"(?P<between>[\"']?\s{0,3}[:=]\s{0,3})(?P<value>\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',;&#)\]}]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
# The last word of an option's name that holds a secret. `tokens`, and `key_env` with the name of a variable, hold none.
_SECRET = frozenset({"password", "passwd", "secret", "apikey", "credential", "credentials", "passphrase"})
_SECRET_TEXT = frozenset({"key", "token", "auth", "authorization"})
_NO_SECRET = frozenset({"", "null", "none", "~", "true", "false", HIDDEN})
# Prose says "token: 5" and "key: 'id'"; only a word before them makes a name of these (api_key, hf_token).
_IN_PROSE = re.compile(r"(?i)^(key|token|auth)$")
_known: set[str] = set()
_SHORTEST_KNOWN = 8  # a shorter text would blank out words that are no secret


def keep_secret(value: str | None) -> None:
    """Remember a secret of this process, such as the key to a server: no text that is shown will hold it."""
    if value is not None and len(value) >= _SHORTEST_KNOWN:
        _known.add(value)


def printable(text: object, limit: int = 300) -> str:
    """Show foreign text on one line, without secrets, control characters or escapes, in at most `limit` characters."""
    whole = _text_of(text)
    # Redacted with some room behind the cut, so that a secret which lies across it is still seen whole.
    shown = redacted(whole[: limit + 4000])
    safe = "".join(letter if letter.isprintable() else _escaped(letter) for letter in shown[: limit + 1])
    cut = len(shown) > limit or len(whole) > limit + 4000
    return (safe[: limit - 1] + "…") if cut or len(safe) > limit else safe


def shown(message: object, limit: int = 10_000) -> str:
    """Make a message of several lines safe to print: each line as `printable` shows it, at most `limit` in all."""
    lines = _text_of(message)[: limit + 4000].split("\n")
    safe = "\n".join(printable(line, limit) for line in lines)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def _text_of(value: object) -> str:
    """Turn any object into text, also one whose own conversion fails."""
    try:
        return value.decode("utf-8", errors="replace") if isinstance(value, bytes | bytearray) else str(value)
    except Exception:  # whatever a foreign object raises, a message is being written
        return f"<{type(value).__name__} that cannot be shown>"


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def redacted(text: str) -> str:
    """Replace what is secret in a text by ***: passwords in addresses, values of options named so, known secrets."""
    for secret in _known:
        text = text.replace(secret, HIDDEN)
    return _without_forms(text)


def _without_forms(text: str) -> str:
    """Hide what looks like a secret by where it stands."""
    if "://" in text:
        text = _URL.sub(lambda found: _without_password(found.group()), text)
    text = _BEARER.sub(lambda found: f"{found[1]} {HIDDEN}", text)
    return _ASSIGNED.sub(_without_value, text) if "=" in text or ":" in text else text


def _without_password(url: str) -> str:
    """Hide the user and password of an address; its parameters are found as assignments."""
    if "@" not in url:
        return url
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            return urlunsplit(parts._replace(netloc=f"{HIDDEN}@{parts.netloc.rpartition('@')[2]}"))
    except ValueError:
        pass
    # A password with a slash or a # in it ends the host's part too early: all up to the last @ may be secret.
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
    """Tell by the name of an option whether its value is a secret: a password, a token, a key."""
    last = re.split(r"[_.\-\s]", name.lower())[-1]
    return last in _SECRET or last in _SECRET_TEXT or last.endswith(("password", "apikey"))


def redacted_options(value: Any, name: str = "") -> Any:
    """Replace what is secret in a tree of options, at any depth. The tree itself stays as it is."""
    if isinstance(value, Mapping):
        return {inner: redacted_options(item, str(inner)) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_options(item, name) for item in value]
    if names_secret(name) and value is not None and not isinstance(value, bool):
        last = re.split(r"[_.\-\s]", name.lower())[-1]
        # A number named `token` or `key` is an id or a count; one named `password` is a password.
        if isinstance(value, str) or last not in _SECRET_TEXT:
            return value if str(value).lower() in _NO_SECRET else HIDDEN
    # A dummy key to a server, remembered as a secret, must not blank out a part of a path here.
    return _without_forms(value) if isinstance(value, str) else value


def keep_secrets_of(options: Any) -> None:
    """Remember the passwords in the addresses of a tree of options: an exception of a client may quote one alone."""
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, list | tuple):
        for item in options:
            keep_secrets_of(item)
    elif isinstance(options, str) and "://" in options and "@" in options:
        user, _, password = options.partition("://")[2].rpartition("@")[0].partition(":")
        keep_secret(password or user)


def hidden_options(value: Any, name: str = "") -> list[str]:
    """Name the options that hold *** where a secret was, as a run's own config.yaml has them."""
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
