"""The agent of torch's elastic launcher (`torchrun --nnodes MIN:MAX`) that started this process.

An agent starts its worker processes anew, in another generation of the run, when one of them has failed, when the
workers of another agent have ended, and when an agent joins. If its workers fail too often, or one ends successfully,
the agent closes the run for all agents. An agent that a signal ends does not close the run, so a rank that must leave
ends its agent by SIGTERM.
"""

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from truestep.ranks.axes import RankError

_REACHES = 10.0  # seconds for a connection to the rendezvous
_ATTEMPTS, _BETWEEN = 2, 5.0  # attempts to connect, and seconds between them
SECONDS_TO_LEAVE = _ATTEMPTS * _REACHES + (_ATTEMPTS - 1) * _BETWEEN  # most that `leave_if_cut_off` takes
_NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
_RENDEZVOUS_PORT = 29400  # torch's default
_ANCESTORS = 3  # ancestors that may be the agent, which may start a worker through numactl or a shell
MAX_RESTARTS = 1000  # for --max-restarts: an agent uses one for each rank that is lost or joins
# When an agent starts its workers anew, it kills those that have not ended after 30 s.
SECONDS_TO_STOP = 25.0
SHARES_STORE = "TORCHELASTIC_USE_AGENT_STORE"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class RankLostError(RankError):
    """The ranks cannot go on, because of another rank or the connection to it; the message names the cause."""

    def __init__(self, cause: str, what_next: str = ""):
        super().__init__(cause + what_next)
        self.cause = cause


@dataclass(frozen=True)
class Agent:
    """The agent of this process, in a run whose number of agents may change."""

    number: int  # the id of its process
    least: int  # agents of a generation
    most: int
    processes: int = 1  # worker processes of an agent
    last_start: bool = False  # True: one more failure of this agent would close the run for all agents
    restarts: int = MAX_RESTARTS  # restarts that the agent may make
    rendezvous: str = ""  # host:port where agents find one another; "" if unknown
    addresses: tuple[tuple[str, int], ...] = ()  # of the rendezvous

    @property
    def name(self) -> str:
        return f"{socket.gethostname()}/{self.number}"

    @property
    def gone(self) -> bool:
        """True if the agent has ended. Then nothing would end this process."""
        return not any(number == self.number for number in _ancestors())

    def leave(self) -> None:
        """End the agent, and ignore the SIGTERM that it sends to its workers in turn."""
        ignore_end()
        self.end()

    def leave_if_cut_off(self) -> None:
        """Kill the agent if this machine no longer reaches the rendezvous. Otherwise the agent would wait for a quarter
        of an hour and, if it then reached the other agents again, close the run for them."""
        if self.addresses and _is_silent(self.addresses):
            print(f"error: {self.name} ends: it does not reach the rendezvous {self.rendezvous}", file=sys.stderr)
            sys.stderr.flush()
            self.end(signal.SIGKILL)  # the agent may be inside a call that never returns

    def end(self, kind: signal.Signals = signal.SIGTERM) -> None:
        """End the agent by a signal, so that the other agents go on with the run. Only one of the agent's workers sends
        the signal, because a second one would keep the agent from ending the other workers."""
        if not self.gone and _first_to_take(f"truestep ends agent {self.number}"):
            os.kill(self.number, kind)


def _addresses_of(endpoint: str) -> tuple[tuple[str, int], ...]:
    """Return the addresses of a rendezvous; () if they are not known. The name is resolved once, at the start, because
    it cannot be resolved when the network is gone."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        host, port = parse_rendezvous_endpoint(endpoint, _RENDEZVOUS_PORT)
        if not endpoint or not port:  # port 0: any that is free
            return ()
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (ValueError, OSError):
        return ()
    return tuple(dict.fromkeys((str(address[0]), int(address[1])) for *_, address in found))


def _is_silent(addresses: Sequence[tuple[str, int]]) -> bool:
    """Tell whether a rendezvous does not answer: all attempts at all of its addresses fail."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_BETWEEN)
        if not all(_no_answer(address, _REACHES / len(addresses)) for address in addresses):
            return False
    return True


def _no_answer(address: tuple[str, int], seconds: float) -> bool:
    """Tell whether an address does not answer. A refused connection counts as an answer. Other errors, such as too many
    open files, do not show that there is no answer."""
    try:
        with socket.create_connection(address, seconds):
            return False
    except OSError as error:
        return isinstance(error, TimeoutError) or error.errno in _NO_WAY


_taken: dict[str, socket.socket] = {}


def _first_to_take(name: str) -> bool:
    """Take a name for this process until it ends. Return False if a living process of this machine has taken it."""
    taken = socket.socket(socket.AF_UNIX)
    try:
        taken.bind(f"\0{name}")
    except OSError:
        taken.close()
        return False
    _taken[name] = taken
    return True


def leave_after_error() -> None:
    """End the agent of this process, if it has one, because an error of this machine's configuration would recur."""
    agent = find_agent()
    if agent is not None:
        agent.leave()


def ignore_end() -> None:
    """Ignore SIGTERM, which an agent that is ended sends to its workers in turn."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def find_agent() -> Agent | None:
    """Return the agent that started this process; None if the number of agents cannot change."""
    launcher = _launcher()
    return None if launcher is None else agent_of(*launcher)


def agent_of(number: int, least: int, most: int, rendezvous: str = "") -> Agent | None:
    """Return the agent with this process id, by the variables that it set; None if its run has a fixed size."""
    if least == most:
        return None
    count, limit = (
        int(os.environ.get(f"TORCHELASTIC_{name}", given))
        for name, given in (("RESTART_COUNT", "0"), ("MAX_RESTARTS", str(MAX_RESTARTS)))
    )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Agent(number, least, most, processes, count >= limit, limit, rendezvous, _addresses_of(rendezvous))


def unknown_launcher() -> bool:
    """Tell whether a torch launcher other than torchrun started this process, judging by its command line."""
    return "TORCHELASTIC_RUN_ID" in os.environ and _launcher() is None


def _launcher() -> tuple[int, int, int, str] | None:
    """Return facts about the torchrun that started this process: its process id, the least and the most agents, and the
    address where agents find one another."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    found = ((number, _nodes_of(_command_line(number))) for number in _ancestors())
    return next(((number, *nodes) for number, nodes in found if nodes is not None), None)


def generation_id() -> str:
    """Return an identifier of this generation of ranks: the address of its store."""
    return "-".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))


def _ancestors() -> list[int]:
    """Return the ids of the process's parents, nearest first."""
    found, number = [os.getppid()], os.getppid()
    while len(found) < _ANCESTORS:
        try:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        number = int(fields[1])
        if number < 1:
            break
        found.append(number)
    return found


def _command_line(number: int) -> list[str]:
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words[:-1]]


def _nodes_of(words: Sequence[str]) -> tuple[int, int, str] | None:
    """Return the least and the most agents, and the rendezvous, from an agent's command line; None if the command is
    not torchrun."""
    start = next((place for place, word in enumerate(words[:6]) if _is_torchrun(word)), None)
    if start is None:
        return None
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    try:
        given, _ = get_args_parser().parse_known_args(list(words[start + 1 :]))
        least, most = parse_min_max_nnodes(given.nnodes)
    except (SystemExit, RuntimeError, ValueError):
        return None
    return int(least), int(most), given.rdzv_endpoint if given.rdzv_backend == "c10d" else ""


def _is_torchrun(word: str) -> bool:
    return word == "torch.distributed.run" or word.endswith("torch/distributed/run.py") or Path(word).name == "torchrun"
