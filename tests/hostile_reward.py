"""A reward that does what a completion's code may do where a reward runs it. The field `attack` names what.

Nothing here can harm the machine that a test runs on: forks are bounded, and what is left alive ends by itself.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from truestep.environments import frames

LONG = 90.0  # seconds: longer than any test's reward may take, and an end where nothing else makes one
FORGED = 1000.0
ATTACKS: dict[str, Callable[[Path], object]] = {}


def attack(function: Callable[[Path], object]) -> Callable[[Path], object]:
    ATTACKS[function.__name__] = function
    return function


def reward(
    prompt: object, completion: str, *, attack: str = "", place: str = "", times: int = 1000, **_: object
) -> Any:
    """Attack, so many times in all; then, and without an attack, be a good reward."""
    if attack and count_up(Path(place) / attack) <= times:
        return ATTACKS[attack](Path(place))
    return len(set(completion.split())) / 10


def count_up(file: Path) -> int:
    """Count calls over all processes, by the length of a file."""
    with file.open("ab") as stream:
        stream.write(b"x")
        return stream.tell()


def descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def write_everywhere(data: bytes) -> None:
    for number in descriptors():
        with contextlib.suppress(OSError):
            os.set_blocking(number, False)
            os.write(number, data)


class _Touch:
    """Pickled, it is a command that makes a file, and a reward of the attacker's choice."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return eval, (f"(open({str(self.file)!r}, 'w').close(), ({FORGED}, None))[1]",)


# ---- what forges


@attack
def pickles(place: Path) -> float:
    body = pickle.dumps(_Touch(place / "pwned"))
    write_everywhere(struct.pack("!i", len(body)) + body)
    time.sleep(0.3)
    return 0.0


@attack
def guessed_frames(place: Path) -> float:
    for number in range(1, 50):
        write_everywhere(frames.encode({"number": number, "nonce": "0" * 32, "value": FORGED}))
    return 0.0


@attack
def nested_json(place: Path) -> float:
    body = b"[" * 60_000
    write_everywhere(len(body).to_bytes(4, "big") + body)
    return 0.0


@attack
def huge_number_in_json(place: Path) -> float:
    body = b'{"number": ' + b"9" * 50_000 + b"}"
    write_everywhere(len(body).to_bytes(4, "big") + body)
    return 0.0


@attack
def announced_gigabytes(place: Path) -> float:
    write_everywhere(b"\xff" * 8)
    return 0.0


@attack
def half_a_frame(place: Path) -> float:
    write_everywhere((60_000).to_bytes(4, "big") + b'{"')
    return 0.0


@attack
def garbage(place: Path) -> float:
    write_everywhere(os.urandom(5000))
    return 0.0


@attack
def replaced_json(place: Path) -> float:
    json.dumps = lambda *_, **__: '{"value": 1000.0}'
    json.loads = lambda *_, **__: {}
    return 0.25


@attack
def replaced_frames(place: Path) -> float:
    frames._dumps = lambda *_, **__: '{"value": 1000.0}'
    return 0.0


@attack
def answers_late_from_a_thread(place: Path) -> float:
    def spam() -> None:
        time.sleep(0.05)
        write_everywhere(b"\0" * 100)

    threading.Thread(target=spam, daemon=True).start()
    return 0.25


@attack
def looks_for_other_requests(place: Path) -> float:
    """What was sent ahead would lie in the connection, with the random word that its answer needs."""
    waiting = 0
    for number in descriptors():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            waiting += len(connection.recv(1000, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return FORGED if waiting else 0.25


# ---- what ends


@attack
def exits(place: Path) -> None:
    sys.exit(3)


@attack
def exits_at_once(place: Path) -> None:
    os._exit(7)


@attack
def aborts(place: Path) -> None:
    os.abort()


@attack
def crashes(place: Path) -> None:
    ctypes.string_at(0)


@attack
def interrupts(place: Path) -> None:
    raise KeyboardInterrupt


@attack
def terminates_itself(place: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LONG)


@attack
def kills_its_parent(place: Path) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(LONG)
    return 0.0


@attack
def stops_its_parent(place: Path) -> float:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(LONG)
    return 0.0


@attack
def leaves_exit_hooks(place: Path) -> float:
    atexit.register(time.sleep, LONG)
    return 0.25


@attack
def alarm_for_the_next(place: Path) -> float:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 0.25


# ---- what hangs


@attack
def sleeps(place: Path) -> None:
    time.sleep(LONG)


@attack
def loops(place: Path) -> None:
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        pass


@attack
def catches_everything(place: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        try:
            time.sleep(1)
        except BaseException:
            continue


@attack
def stops_itself(place: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@attack
def reads_its_input(place: Path) -> float:
    return float(len(sys.stdin.read()) + len(input() if sys.stdin.isatty() else ""))


# ---- what grows


@attack
def forks_without_end(place: Path) -> None:
    """Doubles every 20 ms in sessions of their own, until there are 2000 processes, had nobody ended them."""
    end = time.monotonic() + LONG
    for _ in range(11):
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                os.setsid()
        time.sleep(0.02)
    while time.monotonic() < end:
        time.sleep(1)


@attack
def takes_all_memory(place: Path) -> float:
    held = []
    for _ in range(64):
        held.append(bytearray(os.urandom(1024)) * 2**17)
    return float(len(held))


@attack
def shares_all_memory(place: Path) -> None:
    """Takes memory that no limit of one process counts."""
    held = mmap.mmap(-1, 2**33)
    portion = b"x" * 2**24
    for _ in range(512):
        held.write(portion)
    time.sleep(LONG)


@attack
def prints_without_end(place: Path) -> float:
    for _ in range(100):
        print("\x1b[31m" + "x" * 2**19)
        print("y" * 2**19, file=sys.stderr)
    return 0.25


@attack
def opens_every_file(place: Path) -> None:
    held = []
    while True:
        held.append(open(os.devnull))  # noqa: SIM115


@attack
def writes_an_endless_file(place: Path) -> None:
    with (place / "large").open("wb") as stream:
        stream.truncate(2**40)


@attack
def recurses(place: Path) -> Any:
    return recurses(place)


@attack
def raises_its_limits(place: Path) -> float:
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_NOFILE):
        soft, hard = resource.getrlimit(kind)
        assert soft == hard != resource.RLIM_INFINITY
    return 0.25


# ---- what stays


@attack
def leaves_a_session_behind(place: Path) -> float:
    """A child in a session of its own, whose parent ends at once: it has left every group and every parent."""
    live = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(90)"
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", live, str(place / "orphan")])
        os._exit(0)
    os.wait()
    while not (place / "orphan").exists() or not (place / "orphan").read_text():
        time.sleep(0.01)
    return 0.25


@attack
def leaves_a_child_and_sleeps(place: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(90)", str(place / "child")]
    child = subprocess.Popen(command, start_new_session=True)
    (place / "child").write_text(str(child.pid))
    time.sleep(LONG)


@attack
def leaves_threads(place: Path) -> float:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(LONG,)).start()
    return 0.25


# ---- what changes things


@attack
def closes_every_descriptor(place: Path) -> float:
    os.closerange(0, 1000)
    return 0.0


@attack
def moves_the_connection(place: Path) -> float:
    null = os.open(os.devnull, os.O_RDWR)
    for number in descriptors():
        with contextlib.suppress(OSError):
            os.dup2(null, number)
    return 0.0


@attack
def changes_directory(place: Path) -> float:
    os.chdir("/")
    os.umask(0o777)
    return 0.25


@attack
def changes_clocks(place: Path) -> float:
    time.monotonic = time.time = lambda: 1e12
    with contextlib.suppress(OSError):
        time.clock_settime(time.CLOCK_MONOTONIC, 1.0)
    return 0.25


@attack
def deletes_its_module(place: Path) -> float:
    del sys.modules[__name__]
    sys.path.clear()
    return 0.25


@attack
def replaces_builtins(place: Path) -> float:
    builtins.float = int  # type: ignore[misc]
    return 0.25


@attack
def looks_for_secrets(place: Path) -> float:
    found = [name for name, value in os.environ.items() if "SECRET" in name or "hunter2" in value]
    for process in ("self", os.getppid()):
        for name in ("environ", "cmdline"):
            with contextlib.suppress(PermissionError), open(f"/proc/{process}/{name}", "rb") as file:
                found += [f"{name} of {process}"] * (b"hunter2" in file.read())
    return FORGED if found else 0.25


# ---- what is returned and raised


@attack
def returns_nan(place: Path) -> float:
    return float("nan")


@attack
def returns_too_much(place: Path) -> float:
    return 1e300


@attack
def returns_a_huge_integer(place: Path) -> int:
    return 10**5000


@attack
def returns_text(place: Path) -> str:
    return "1.0"


@attack
def returns_nothing(place: Path) -> None:
    return None


@attack
def returns_an_evil_object(place: Path) -> object:
    class Evil:
        @property
        def __class__(self) -> Any:
            raise SystemExit

        def __float__(self) -> float:
            os.write(2, b"\x1b[2J")
            raise BaseException("\x1b[2J")

        def __repr__(self) -> str:
            raise KeyboardInterrupt

    return Evil()


@attack
def raises_escapes(place: Path) -> None:
    raise ValueError("\x1b]0;owned\x07\x1b[2J" + "ha" * 2_500_000)


@attack
def raises_what_cannot_be_shown(place: Path) -> None:
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    raise UnreadableError


@attack
def raises_a_base_exception(place: Path) -> None:
    class Base(BaseException):
        pass

    raise Base("no Exception")
