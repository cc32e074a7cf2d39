"""Writes a file so that a reader never sees half of it."""

import os
import tempfile
from pathlib import Path


def write_atomically(output: Path, text: str) -> Path:
    """Writes `text` to a temporary file beside `output`, then renames it over `output`."""
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent)
    try:
        # A completion cut in the middle of a surrogate pair must not stop the report.
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="\n") as stream:
            stream.write(text)
        # `mkstemp` makes the file private; a report is meant to be read like any other file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, output)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return output
