"""The process that imports a user's reward and calls it, one completion at a time.

It has an environment, a session and limits of its own, and one connection, over which frames go (`frames`). It is
forked by its keeper, and ends with it.
"""

import contextlib
import ctypes
import os
import random
import resource
import signal
import sys
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

from truestep.environments import frames, isolation
from truestep.environments.rewards import Reward, RewardError, call, check_signature, load_reward

_OPEN_FILES = 1024
_LONGEST_FILE = 2**30
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def work(channel: int, keeper: int, start: dict[str, Any]) -> NoReturn:
    """Serve until the connection ends. Nothing of this process's own is left to do then, and nothing of the user's."""
    code = 1
    try:
        os.setsid()
        die_with_parent(keeper)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _limit(start["memory"])
        isolation.limit_worker(isolated=start["room"] is not None)
        sys.path.extend(start["directories"])  # last: a user's own modules replace no other, as in the run
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
        _serve(frames.from_descriptor(channel, frames.LARGEST_REQUEST), start)
    except frames.EndOfFramesError:
        code = 0
    except BaseException:  # printed for the run, which says what a process that ended printed last
        import traceback  # late: it takes longer to import than all else here

        traceback.print_exc()
    finally:
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process once its parent is gone, however that ended."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux can
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit(memory: int) -> None:
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, _LONGEST_FILE),
        (resource.RLIMIT_DATA, memory),  # what is written to; address space alone costs nothing
    ]
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # a machine that runs out of memory ends this first, and not the trainer


def _serve(channel: frames.Frames, start: dict[str, Any]) -> None:
    try:
        reward = load_reward(start["reward"])
        check_signature(start["reward"], reward, start["fields"])
    except RewardError as error:
        problem = {"problem": str(error)[:4000], "traceback": None}
        channel.send(frames.encode({"number": 0, "nonce": start["nonce"], **problem}))
        return
    channel.send(frames.encode({"number": 0, "nonce": start["nonce"], "value": 0.0, "parts": {}}))
    put_back = _keep_state()
    while True:
        request = channel.receive()
        _seed(request["seed"])
        answer = _rate(reward, request)
        channel.send(frames.encode(answer))
        put_back()


def _rate(reward: Reward, request: dict[str, Any]) -> dict[str, Any]:
    known = {"number": request["number"], "nonce": request["nonce"]}
    try:
        rating = call(reward, request["prompt"], request["completion"], request["fields"])
    except RewardError as error:
        return {**known, "problem": str(error), "traceback": error.traceback}
    return {**known, "value": float(rating), "parts": dict(rating.parts)}


def _seed(seed: str) -> None:
    """Make what a reward draws depend on its completion alone, whichever process rates it and whatever came before."""
    random.seed(seed)
    number = zlib.crc32(seed.encode())
    with contextlib.suppress(Exception):  # a completion that was run may have left anything in these
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(number)


def _keep_state() -> Callable[[], None]:
    """Give a function that puts back what one completion's code could leave changed for the next."""
    directory, mask = os.getcwd(), os.umask(0)
    os.umask(mask)

    def put_back() -> None:
        with contextlib.suppress(OSError):
            os.chdir(directory)
        os.umask(mask)
        signal.setitimer(signal.ITIMER_REAL, 0)

    return put_back
