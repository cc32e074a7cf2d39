"""The run's handle of a worker process: starts it with its supervisor, requests ratings, and ends its process tree."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from truestep.config.custom import user_directories
from truestep.environments import frames, isolation
from truestep.environments.descendants import kill_below, started
from truestep.environments.rewards import LONGEST_TRACEBACK, Rating, RewardError
from truestep.process import progress
from truestep.text import printable
from truestep.types import LARGEST_REWARD

# Seconds to start the process and import the user's module. They do not count towards the reward's time limit.
_START_SECONDS = 180.0
_END_SECONDS = 6.0
_HEALTHY_SECONDS = 0.2  # longest single wait; each wait is reported as progress, so that the run is not seen as stalled
# Variables that a process needs to find programs, files and its language. None is secret; see `reward_environment`.
_PASSED_ON = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME"),
        *("PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NLTK_DATA"),
        *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    }
)

# A value of `reward_isolation`: the trainer's own process calls the reward (`same_process`).
SAME_PROCESS = "same_process"

_Begun = TypeVar("_Begun")


class LostError(Exception):
    """The worker has exited or was given up. The message says why."""


class LateRewardError(LostError):
    """The worker exceeded the time limit of a completion."""


@dataclass(frozen=True)
class WorkerOptions:
    reward: str  # package.module:function
    timeout: float  # seconds for one completion
    memory: int  # bytes, for the worker and its descendants
    environment: tuple[str, ...] = ()  # names of variables to pass on, in addition to `_PASSED_ON`
    section: str = "sampler"  # section of the configuration, for messages
    isolation: Literal["auto", "require", "off", "same_process"] = "auto"
    writable: tuple[str, ...] = ()  # directories
    network: bool = True
    # If the name `reward` stands for an object of this program (`config.held`): the object as base64 text, by name.
    objects: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def room(self) -> dict[str, Any] | None:
        """The settings of an isolated worker, or None if it is not isolated."""
        if self.isolation == "off" or (self.isolation == "auto" and isolation_refused() is not None):
            return None
        return isolation.room(self.memory, self.writable, self.network, user_directories())


@cache
def isolation_refused() -> str | None:
    """Try isolation once in a subprocess. Returns the reason why it fails, or None if it works."""
    command = [sys.executable, "-P", "-m", "truestep.environments.isolation", json.dumps(isolation.room(2**20))]
    try:
        tried = subprocess.run(command, env=worker_environment(()), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return printable(error, 200)
    said = (tried.stdout or tried.stderr).strip().splitlines()
    return None if tried.returncode == 0 else printable(said[-1] if said else f"exit code {tried.returncode}", 200)


def worker_environment(wanted: Sequence[str]) -> dict[str, str]:
    """Return the environment of a worker: only known variables and the `wanted` ones, so no keys or passwords."""
    chosen = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith("LC_") or name in wanted
    }
    # The worker gets this process's sys.path, and a fixed hash seed for the same order of sets in every run.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"PYTHONHASHSEED": "0", **chosen, "PYTHONPATH": path}


def fit(value: Rating, what: str = "the reward") -> Rating:
    """Return a rating, or raise RewardError if it is too large or NaN for advantages in float32."""
    for number in (float(value), *value.parts.values()):
        if not abs(number) <= LARGEST_REWARD:
            raise RewardError(f"{what} returned {number}; at most {LARGEST_REWARD:g} in size is a reward")
    return value


def printable_traceback(traceback: Any) -> str | None:
    """Return a traceback sent by a worker as printable text, or None if it is not text."""
    if not isinstance(traceback, str):
        return None
    return "\n".join(printable(line, 300) for line in traceback[-LONGEST_TRACEBACK:].splitlines())


class Supervised:
    """The run's handle of a process and its supervisor. After a LostError of any method, both are unusable."""

    _what = "reward"  # what the process runs, for messages

    def __init__(
        self,
        options: WorkerOptions,
        printed: Callable[[str], None] | None = None,
        largest_answer: int = frames.LARGEST_ANSWER,
    ):
        """`printed` is called with the user's output."""
        self._options, self._print = options, printed
        self._worker: tuple[int, str | None] | None = None  # PID and start time
        self._ended: dict[str, Any] | None = None  # the supervisor's last message
        control, kept = frames.connected()
        channel, works = frames.connected()
        self._control = frames.Frames(control, frames.LARGEST_ANSWER)
        self._channel = frames.Frames(channel, largest_answer)
        try:
            # A new program, since the trainer's threads and CUDA state do not survive a fork. Settings are sent over
            # the socket and not as arguments.
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "truestep.environments.supervisor"],
                stdin=kept.fileno(),
                stdout=works.fileno(),
                stderr=subprocess.PIPE,
                env=worker_environment(options.environment),
                start_new_session=True,
            )
        except BaseException:
            control.close()
            channel.close()
            raise
        finally:
            kept.close()
            works.close()

    def _begin(self, settings: dict[str, Any], answer: Callable[[str, float], _Begun]) -> _Begun:
        """Send the settings, and return the result of `answer(nonce, deadline)`, which waits for the answer. Raises
        LostError."""
        nonce = secrets.token_hex(16)
        deadline = time.monotonic() + _START_SECONDS
        start = {"what": self._what, "memory": self._options.memory, "nonce": nonce, **settings}
        start |= {"room": self._options.room, "directories": user_directories(), "objects": dict(self._options.objects)}
        try:
            frame = frames.encode(start)
        except frames.FrameError as error:
            what = f"the {self._what} and what it holds"
            raise LostError(f"{what} cannot be sent to its process: {error}") from None
        try:
            self._control.send(frame, deadline)
            return answer(nonce, deadline)
        except frames.LateError:
            raise LostError(f"the {self._what} was not imported within {_START_SECONDS:g} s") from None
        except frames.EndOfFramesError:
            raise self._lost("could not be started") from None
        except frames.FrameError as error:
            raise LostError(
                f"the {self._what} wrote to the connection of its process while it was imported: {error}"
            ) from None

    def _wait(self, deadline: float) -> None:
        """Wait for input, and read it."""
        if self._ended is not None:
            raise frames.EndOfFramesError
        left = deadline - time.monotonic()
        if left <= 0:
            raise frames.LateError
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(min(left, _HEALTHY_SECONDS) * 1000 + 1)}
        progress.made(f"waits for {self._what}s")  # every request has a deadline, so waiting is not a stall
        if self._control.fileno() in ready:
            self._hear()
        self._channel.fill()

    def _hear(self) -> None:
        """Read and apply the supervisor's messages."""
        self._control.fill()
        while (message := self._control.take()) is not None:
            if self._print is not None and isinstance(printed := message.get("new"), str):
                self._print(printed)
            if "ended" in message:
                self._ended = message
            elif isinstance(number := message.get("worker"), int):
                self._worker = number, started(number)
            else:
                self._heard(message)

    def _heard(self, message: dict[str, Any]) -> None:
        """Handle a message that only a subclass knows."""

    def _lost(self, what: str) -> LostError:
        """End the worker, and return the error with the exceeded limit, or with the exit code and last output."""
        self.end()
        ended = self._ended or {}
        if isinstance(breach := ended.get("breach"), str):
            return LostError(f"{printable(breach)}{self._of_memory(breach)}")
        code, printed = ended.get("ended"), ended.get("printed", "").strip() or self._complaint
        how = "no exit code is known" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        last = f"; last it printed: {printable(printed[-200:])}" if printed else ""
        return LostError(f"the {self._what} {what} ({how}){last}")

    def _of_memory(self, breach: str) -> str:
        return f" ({self._options.section}.reward_memory)" if "GiB of memory" in breach else ""

    def ask_to_end(self) -> None:
        """Tell the supervisor to end the worker. May be called from any thread."""
        with contextlib.suppress(frames.EndOfFramesError, frames.LateError):
            self._control.send(frames.encode({"end": True}), time.monotonic() + 1.0)

    def end(self) -> None:
        """End the worker, its supervisor and all descendants, and wait until they have exited."""
        if self._supervisor.returncode is not None:
            return
        self.ask_to_end()
        deadline = time.monotonic() + _END_SECONDS
        try:
            while self._ended is None:
                self._wait_for_supervisor(deadline)
                self._hear()
        except (frames.EndOfFramesError, frames.FrameError, frames.LateError):
            self._end_without_supervisor()
        self._channel.close()
        self._control.close()
        self._complaint = self._read_complaint()
        try:
            self._supervisor.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    _complaint = ""  # stderr of the supervisor, such as the interpreter's error if it could not start

    def _wait_for_supervisor(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise frames.LateError
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.poll(left * 1000 + 1)

    def _end_without_supervisor(self) -> None:
        """Kill the supervisor, its descendants and the worker. A reward may have stopped or killed the supervisor."""
        if self._supervisor.poll() is None:
            kill_below(self._supervisor.pid)
            self._supervisor.kill()
        if self._worker is not None and started(self._worker[0]) == self._worker[1] is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._worker[0], signal.SIGKILL)  # the worker leads its process group

    def _read_complaint(self) -> str:
        stream = self._supervisor.stderr
        if stream is None:
            return ""
        with stream:
            os.set_blocking(stream.fileno(), False)
            try:
                return (stream.read(10_000) or b"").decode(errors="replace").strip()
            except OSError:
                return ""


class Worker(Supervised):
    """A worker process and its supervisor. After a LostError of any method both are unusable."""

    num_rated = 0
    _number = 0  # the number of the last request

    def start(self, fields: Sequence[tuple[str, Sequence[str]]] | None = None) -> None:
        """Wait until the reward is imported. Raises RewardError if the import fails."""
        self._begin({"reward": self._options.reward, "fields": fields}, self._answer)

    def rate(self, request: dict[str, Any]) -> Rating:
        """Rate a completion. Raises RewardError; an error of `json` if JSON cannot hold the request; LostError if the
        worker is lost."""
        nonce = secrets.token_hex(16)
        try:
            frame = frames.encode({"number": self._number + 1, "nonce": nonce, **request})
        except frames.FrameError as error:
            raise RewardError(f"the prompt and its completion are too long for a reward: {error}") from None
        self._number += 1
        deadline = time.monotonic() + self._options.timeout
        try:
            self._channel.send(frame, deadline)
            return fit(self._answer(nonce, deadline))
        except frames.LateError:
            option = f"{self._options.section}.reward_timeout: {self._options.timeout:g} s"
            raise LateRewardError(f"the reward took longer than {option}") from None
        except frames.EndOfFramesError:
            raise self._lost("ended its process") from None
        except frames.FrameError as error:
            raise LostError(f"the reward wrote to the connection that carries rewards: {error}") from None

    def usable(self) -> bool:
        """Return whether the worker is alive and idle, without unexpected messages."""
        try:
            self._hear()
            return self._ended is None and self._channel.silent()
        except (frames.EndOfFramesError, frames.FrameError):
            return False

    def _answer(self, nonce: str, deadline: float) -> Rating:
        """Wait for the answer to the current request. Raises FrameError for an answer with another number or nonce."""
        while (answer := self._channel.take()) is None:
            self._wait(deadline)
        return self._read(answer, self._number, nonce)

    def _read(self, answer: dict[str, Any], number: int, nonce: str) -> Rating:
        if answer.get("number") != number or answer.get("nonce") != nonce or len(answer) != 4:
            raise frames.FrameError("not the answer to what was asked")
        if isinstance(problem := answer.get("problem"), str):
            self.num_rated += 1
            raise RewardError(printable(problem), printable_traceback(answer.get("traceback")))
        value, parts = answer.get("value"), answer.get("parts")
        if not isinstance(value, float) or not isinstance(parts, dict):
            raise frames.FrameError("neither a number nor a problem")
        if not all(isinstance(part, float) and name.isprintable() for name, part in parts.items()):
            raise frames.FrameError("a part that is not a number")
        self.num_rated += number > 0
        return Rating.of(value, parts)
