"""The scripts and style sheets of a page, from the files of `static`, and the encoding of data for the scripts."""

import base64
import hashlib
import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from truestep.report.style import palette_css

_FOLDER = Path(__file__).parent / "static"
_SCRIPTS = ("uPlot.iife.min.js", "common.js", "charts.js", "conversation.js", "rollouts.js")
_STYLES = ("uPlot.min.css", "page.css")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def packed(value: Any) -> str:
    """Encode a value as compressed JSON in base64, which is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


@cache
def script() -> str:
    """Join the scripts: uPlot first, with its license."""
    return f"/* uPlot:\n{_read('uPlot.LICENSE.txt')}*/\n" + "\n".join(_read(name) for name in _SCRIPTS)


@cache
def style() -> str:
    """Join the style sheets."""
    return palette_css() + "\n".join(_read(name) for name in _STYLES)


def policy() -> str:
    """Return the page's content security policy: the page loads nothing, and runs only the script with this hash."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
