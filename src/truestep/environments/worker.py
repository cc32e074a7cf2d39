"""The process that imports a user's reward and calls it, one completion at a time.

If the settings name an environment instead, it forks a process for each of its episodes (`episodes.worker`).

The supervisor forks it, and it dies with the supervisor. It has its own environment, session and limits, and one
connection for frames (`frames`).
"""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from truestep.config import held
from truestep.environments import frames, isolation
from truestep.environments.forked import die_with_parent
from truestep.environments.forked import seed_all as _seed
from truestep.environments.rewards import Reward, RewardError, call, check_signature, load_reward

_OPEN_FILES = 1024
_LONGEST_FILE = 2**30


def work(channel: int, supervisor: int, start: dict[str, Any]) -> NoReturn:
    """Serve requests until the connection ends, then exit without running exit handlers."""
    code = 1
    try:
        os.setsid()
        die_with_parent(supervisor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _limit(start["memory"])
        isolation.limit_worker(isolated=start["room"] is not None)
        # Last, as in the run, so that a user's modules cannot replace other modules.
        sys.path.extend(start["directories"])
        held.receive(start["objects"])
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
        connection = frames.from_descriptor(channel, frames.LARGEST_REQUEST)
        if start.get("environment") is None:
            _serve(connection, start)
        else:
            from truestep.environments.episodes.worker import serve_episodes  # imported late: rewards do not need it

            serve_episodes(connection, start)
    except frames.EndOfFramesError:
        code = 0
    except BaseException:  # printed, because the run reports the last output of an exited worker
        import traceback  # imported late: slow to import

        traceback.print_exc()
    finally:
        os._exit(code)


def _limit(memory: int) -> None:
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, _LONGEST_FILE),
        (resource.RLIMIT_DATA, memory),  # limits writable memory but not reserved address space
    ]
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # if the host runs out of memory, the kernel kills this process first, not the trainer


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


def _keep_state() -> Callable[[], None]:
    """Return a function that restores the working directory, umask and timer, which a completion's code may change."""
    directory, mask = os.getcwd(), os.umask(0)
    os.umask(mask)

    def put_back() -> None:
        with contextlib.suppress(OSError):
            os.chdir(directory)
        os.umask(mask)
        signal.setitimer(signal.ITIMER_REAL, 0)

    return put_back
