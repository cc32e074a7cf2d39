"""Runs a page of the documentation as a reader would: its commands in one shell, its files written where it says so.

    python run_page.py docs/tutorial.md

A block of `bash` is typed line by line. A block whose first line has `title="NAME"` is written to that file,
in the directory that the shell is in by then. The shell stops at the first command that fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """List what a reader types, a line each; a line that ends in a backslash goes on in the next."""
    blocks = [text for language, title, text in BLOCK.findall(page) if language == "bash" and not title]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def files(page: str) -> dict[str, str]:
    return {title: text for _, title, text in BLOCK.findall(page) if title}


def shell_script(page: str) -> str:
    """Write a script that does what the page says, in its order, and shows each command before it is run."""
    lines = ["set -e"]
    for language, title, text in BLOCK.findall(page):
        if title:
            lines.append(f"cat > {title} <<'END-OF-THE-FILE'\n{text}END-OF-THE-FILE")
        elif language == "bash":
            for command in commands(f"```bash\n{text}```"):
                shown = command.replace("'", "'\\''")
                lines.append(f"printf '\\n[%s s] $ %s\\n' \"$SECONDS\" '{shown}'\n{command}")
    return "\n".join(lines) + "\n"


def main(path: Path) -> int:
    page = path.read_text(encoding="utf-8")
    began = time.monotonic()
    done = subprocess.run(["bash", "-c", shell_script(page)], check=False)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(f"\n{len(commands(page))} commands and {len(files(page))} files in {minutes} min {seconds} s")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
