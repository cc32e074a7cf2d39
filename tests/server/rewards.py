"""Rewards for tests, by import path: they run in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path


def word_reward(prompt: object, completion: str, **_: object) -> float:
    """Differs between most completions."""
    return len(set(completion.split())) / 10


def difficult_reward(prompt: object, completion: str, **_: object) -> float:
    """Some completions hang it, some end its process, some raise."""
    kind = zlib.crc32(completion.encode()) % 24
    if kind == 0:
        time.sleep(600)
    if kind == 1:
        os._exit(7)
    if kind == 2:
        raise ValueError("no such answer")
    return len(set(completion.split())) / 10


def process_id(prompt: object, completion: str, **_: object) -> float:
    return float(os.getpid())


def choosy(prompt: object, completion: str, **_: object) -> object:
    """By what it is asked to rate."""
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os._exit(7)
    if completion == "raise":
        raise ValueError("no such answer")
    return "1.0" if completion == "text" else len(completion)


def what_it_holds(prompt: object, completion: str, *, secret: str, port: int, **_: object) -> float:
    """How many of its descriptors are the run's file or listen at its port, and how many threads it has beside one."""
    held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    listens = 0
    for name in map(int, os.listdir("/proc/self/fd")):
        try:
            one = socket.socket(fileno=os.dup(name))
        except OSError:
            continue
        with one:
            address = one.getsockname()
            listens += isinstance(address, tuple) and address[1] == port
    return float(held.count(secret) + listens + len(os.listdir("/proc/self/task")) - 1)


def in_parts(prompt: object, completion: str, **_: object) -> dict[str, float | None]:
    return {"letters": len(completion), "begins with t": 0.5 * completion.startswith("t"), "not here": None}


def meets_another(prompt: object, completion: str, *, names: list[str], place: str, **_: object) -> float:
    """Waits until the others are being rated too."""
    (Path(place) / completion).touch()
    for _ in range(6000):
        if all((Path(place) / other).exists() for other in names):
            return 1.0
        time.sleep(0.01)
    return 0.0


def count_variables(prompt: object, completion: str, **_: object) -> float:
    """How many of the variables that the completion names are in the environment."""
    return float(sum(name in os.environ for name in completion.split()))


def connects(prompt: object, completion: str, *, port: int, **_: object) -> float:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return 0.0
    return 1.0


def uses_the_machine(prompt: object, completion: str, **_: object) -> float:
    """Counts what works of what rewards use."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squared = pool.map(abs, [-1, -2])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file").write_text("x")
        read = (Path(folder) / "file").read_text()
    program = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=False)
    terminal = os.openpty()
    locked = multiprocessing.get_context("spawn").Lock().acquire()
    return float(sum([squared == [1, 2], read == "x", program.stdout == b"1\n", len(terminal) == 2, locked]))


def prints(prompt: object, completion: str, **_: object) -> float:
    print(completion)
    print("to the other stream", file=sys.stderr)
    return 1.0


def writes_here(prompt: object, completion: str, **_: object) -> float:
    Path("written_by_a_reward").touch()
    return 1.0


def never_works(prompt: object, completion: str, **_: object) -> None:
    return None


def works_late(prompt: object, completion: str, **_: object) -> float | None:
    return None if int(completion) < 15 else 1.0
