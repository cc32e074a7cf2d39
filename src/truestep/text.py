"""Text that others wrote, made safe to show: completions, exceptions, answers of servers, addresses."""

import re
from urllib.parse import urlsplit, urlunsplit

_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s\"'<>]*@[^\s\"'<>]*")


def printable(text: object, limit: int = 300) -> str:
    """Show foreign text on one line, without control characters or escapes, in at most `limit` characters."""
    shown = str(text)
    cut = len(shown) > limit
    safe = "".join(letter if letter.isprintable() else _escaped(letter) for letter in shown[:limit])
    return (safe[: limit - 1] + "…") if cut or len(safe) > limit else safe


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def redacted(text: str) -> str:
    """Replace the user and password of each address in a text by ***."""
    return _URL.sub(lambda found: _without_password(found.group()), text)


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"***@{host}"))
    except ValueError:
        return "***"
