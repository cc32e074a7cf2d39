"""The scripts and the style of a page, which stand in files of their own, and are put into it."""

import base64
import hashlib
from functools import cache
from pathlib import Path

from truestep.report.style import palette_css

_FOLDER = Path(__file__).parent / "static"
_SCRIPTS = ("uPlot.iife.min.js", "common.js", "charts.js", "rollouts.js", "live.js")
_STYLES = ("uPlot.min.css", "page.css")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """Put the scripts together, the library's first, with its license."""
    return f"/* uPlot:\n{_read('uPlot.LICENSE.txt')}*/\n" + "\n".join(_read(name) for name in _SCRIPTS)


@cache
def style() -> str:
    """Put the style sheets together."""
    return palette_css() + "\n".join(_read(name) for name in _STYLES)


def policy(*, live: bool) -> str:
    """Write the page's content security policy: it loads nothing, and runs its own script alone, by its hash."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    parts = [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        # A page that is served asks its server, and nobody else, whether there is news.
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(parts)
