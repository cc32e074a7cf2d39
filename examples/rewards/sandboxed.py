"""A reward that runs the code in a completion, inside a sandbox (bubblewrap: `apt install bubblewrap`).

    sampler: {reward: sandboxed:reward, reward_timeout: 30, prompts: prompts.jsonl}     # in this directory
    a prompt: {"prompt": "Write a function add(a, b).", "tests": "assert add(1, 2) == 3"}

The code sees the machine's programs and libraries, read-only, and nothing else: no home directory, no run directory, no
network, no process of anybody's, no environment. What it writes is in memory and gone with it, and so is all that it
started, when it ends or its time is over. Exiting with 0 earns nothing: behind the tests a word is printed that is
drawn anew each time. Code that was written against this file could still find that word in its own process.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

SECONDS = 10
MEGABYTES = 512

_SEEN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", sys.base_prefix)
_CODE = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def reward(prompt: object, completion: str, *, tests: str, **_: object) -> float:
    """Give 1 where the code in the completion passes the tests, and 0 where it does not."""
    blocks = _CODE.findall(completion)
    return float(passes(blocks[-1] if blocks else completion, tests))


def passes(code: str, tests: str) -> bool:
    word = secrets.token_hex(16)
    program = f"{code}\n\n{tests}\n\nprint({word!r})\n"
    return run(program).rstrip("\n").endswith(word)


def run(program: str, seconds: float = SECONDS) -> str:
    """Run a program in a sandbox; give the end of what it printed, and nothing where it was too slow or failed."""
    with subprocess.Popen(
        command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}
    ) as process:
        try:
            printed, _ = process.communicate(program.encode(errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # the whole sandbox dies with its first process
            return ""
    return printed[-1000:].decode(errors="replace") if process.returncode == 0 else ""


def command() -> list[str]:
    """Make the command of a sandbox in which Python runs what it reads from its standard input."""
    seen = [word for place in _SEEN if Path(place).exists() for word in ("--ro-bind", place, place)]
    limits = f"ulimit -v {MEGABYTES * 1024} -u 64 -f 65536 -c 0 2>/dev/null; ulimit -v {MEGABYTES * 1024}; "
    python = os.path.realpath(sys.executable)
    return [
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
        *seen,
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
        *("/bin/sh", "-c", f'{limits} exec "$0" -I -', python),
    ]
