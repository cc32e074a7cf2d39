"""Hosts of a network, on this machine: namespaces of users and networks, joined by a bridge.

Each host has an interface `eth0` of its own, whose link can be cut or made slow. Nothing outside the namespaces is
changed, and they end with the processes that hold them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_NEW_USERS, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
INTERFACE = "eth0"
_HOLD = ["sh", "-c", "echo there; exec cat"]  # ends when its standard input closes, so also with this process


@dataclass(frozen=True)
class Host:
    number: int
    holder: int  # a process in its namespaces

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    def enter(self) -> None:
        """Let this process, which must have one thread, be on this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        for name, kind in (("user", _NEW_USERS), ("net", _NEW_NETWORK)):
            with open(f"/proc/{self.holder}/ns/{name}", "rb") as namespace:
                if libc.setns(namespace.fileno(), kind) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def processes(self) -> list[int]:
        """The processes on this host, but the one that holds it."""
        own, found = os.readlink(f"/proc/{self.holder}/ns/net"), []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if int(folder.name) != self.holder and state != "Z" and os.readlink(folder / "ns/net") == own:
                    found.append(int(folder.name))
        return found

    def signal(self, kind: signal.Signals) -> None:
        """Send a signal to all processes on this host."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, kind)


class Hosts:
    """Some hosts of one network. `with` ends all that is left on them."""

    def __init__(self, count: int):
        self._held: list[subprocess.Popen[bytes]] = []
        self._bridge = self._hold(["unshare", "--user", "--map-root-user", "--net"])
        self._there("ip", "link", "add", "name", "bridge", "type", "bridge")
        self._there("ip", "link", "set", "bridge", "up")
        self._hosts = {number: self._make(number) for number in range(1, count + 1)}

    def __getitem__(self, number: int) -> Host:
        """Hosts have the numbers from 1 on."""
        return self._hosts[number]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():
            host.signal(signal.SIGKILL)
        for holder in reversed(self._held):
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.close()
            holder.wait(timeout=20)
            holder.stdout.close()

    def left(self) -> dict[int, list[bytes]]:
        """The command lines of the processes that are left on each host."""
        found = {number: host.processes() for number, host in self._hosts.items()}
        return {number: [_command_line(one) for one in several] for number, several in found.items() if several}

    def cut(self, number: int) -> None:
        """Let a host and the others no longer reach each other. No side is told of it."""
        self._there("ip", "link", "set", f"port{number}", "nomaster")

    def mend(self, number: int) -> None:
        self._there("ip", "link", "set", f"port{number}", "master", "bridge")

    def lose(self, number: int) -> None:
        """End all processes of a host at once, without a word to the others, as if its power failed."""
        self.cut(number)
        deadline = time.monotonic() + 20
        while self[number].processes() and time.monotonic() < deadline:
            self[number].signal(signal.SIGKILL)
            time.sleep(0.01)

    def slow(self, number: int, rate: str) -> None:
        """Limit what goes to a host and comes from it; `rate` as tc has it, such as 1mbit."""
        limit = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        self._there("tc", "qdisc", "add", "dev", f"port{number}", *limit)
        _run(self[number].holder, "tc", "qdisc", "add", "dev", INTERFACE, *limit)

    def _make(self, number: int) -> Host:
        host = Host(number, self._hold([*_inside(self._bridge), "unshare", "--net"]))
        port = f"port{number}"
        peer = ["type", "veth", "peer", "name", INTERFACE, "netns", str(host.holder)]
        self._there("ip", "link", "add", "name", port, *peer)
        self._there("ip", "link", "set", port, "master", "bridge", "up")
        for words in (["link", "set", "lo", "up"], ["addr", "add", f"{host.address}/24", "dev", INTERFACE]):
            _run(host.holder, "ip", *words)
        _run(host.holder, "ip", "link", "set", INTERFACE, "up")
        return host

    def _hold(self, command: list[str]) -> int:
        """Start a process in namespaces of its own; return its id."""
        holder = subprocess.Popen(
            [*command, *_HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._held.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"there\n":
            raise OSError(f"{command[0]} failed")
        return holder.pid

    def _there(self, *words: str) -> None:
        _run(self._bridge, *words)


def _command_line(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
    return b"ended"


def _inside(process: int) -> list[str]:
    return ["nsenter", "--target", str(process), "--user", "--net", "--preserve-credentials"]


def _run(holder: int, *words: str) -> None:
    done = subprocess.run([*_inside(holder), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr}")


@cache
def _why_none() -> str | None:
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    try:
        with Hosts(1) as hosts:
            hosts.slow(1, "1gbit")
    except OSError as error:
        return f"this machine gives no namespaces of users and networks: {error}"
    return None


def make_hosts(count: int) -> Hosts:
    """Make hosts. Where that cannot be done, fail the test: nothing else shows what hosts show."""
    why = _why_none()
    if why is not None:
        pytest.fail(f"no hosts can be made, so that nothing shows what docs/machines.md says of them: {why}")
    return Hosts(count)
