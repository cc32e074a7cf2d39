"""A worker as the run sees it: started with its keeper, asked for rewards, and ended with all below it."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from truestep.config.custom import user_directories
from truestep.environments import frames, isolation
from truestep.environments.batch_size import Pace
from truestep.environments.descendants import kill_below, started
from truestep.environments.rewards import LONGEST_TRACEBACK, Rating, RewardError
from truestep.process import progress
from truestep.text import printable
from truestep.types import LARGEST_REWARD

# Starting a process and importing the user's module is not the reward's own time.
_START_SECONDS = 180.0
_END_SECONDS = 6.0
_HEALTHY_SECONDS = 0.2  # a reward that takes longer is waited for again, and the run says that it goes on
# What a process needs to find its programs, files and language. Nothing here is a secret; see `reward_environment`.
_PASSED_ON = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME"),
        *("PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NLTK_DATA"),
        *("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    }
)


class LostError(Exception):
    """The worker is gone or was given up, and says no more. The message says why."""


class LateRewardError(LostError):
    """The worker took longer than its completion may take."""


@dataclass(frozen=True)
class _Asked:
    index: int
    number: int
    nonce: str


@dataclass(frozen=True)
class WorkerOptions:
    reward: str  # package.module:function
    timeout: float  # seconds for one completion
    memory: int  # bytes, for the worker and all below it
    environment: tuple[str, ...] = ()  # variables that are passed on beside the usual ones
    section: str = "sampler"  # of the configuration, for messages
    isolation: Literal["auto", "require", "off"] = "auto"
    writable: tuple[str, ...] = ()  # directories
    network: bool = True

    @property
    def room(self) -> dict[str, Any] | None:
        """Describe what an isolated worker gets; None: it is not isolated."""
        if self.isolation == "off" or (self.isolation == "auto" and isolation_refused() is not None):
            return None
        return isolation.room(self.memory, self.writable, self.network, user_directories())


@cache
def isolation_refused() -> str | None:
    """Try isolation once, in a process of its own; say why it cannot be had here, or None where it can."""
    command = [sys.executable, "-P", "-m", "truestep.environments.isolation", json.dumps(isolation.room(2**20))]
    try:
        tried = subprocess.run(command, env=worker_environment(()), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return printable(error, 200)
    said = (tried.stdout or tried.stderr).strip().splitlines()
    return None if tried.returncode == 0 else printable(said[-1] if said else f"exit code {tried.returncode}", 200)


def worker_environment(wanted: Sequence[str]) -> dict[str, str]:
    """Choose the environment of a worker, in which no key or password of the run's own stands."""
    chosen = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith("LC_") or name in wanted
    }
    # What is found here is found there. The order of a set of words is then the same in every worker and every run.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"PYTHONHASHSEED": "0", **chosen, "PYTHONPATH": path}


def fit(value: Rating) -> Rating:
    """Pass a reward on; a RewardError where advantages cannot be made of it."""
    for number in (float(value), *value.parts.values()):
        if not abs(number) <= LARGEST_REWARD:
            raise RewardError(f"the reward returned {number}; at most {LARGEST_REWARD:g} in size is a reward")
    return value


def _lines(traceback: Any) -> str | None:
    """Read a traceback, as which a reward may have sent anything."""
    if not isinstance(traceback, str):
        return None
    return "\n".join(printable(line, 300) for line in traceback[-LONGEST_TRACEBACK:].splitlines())


class Worker:
    """One process that rates, and its keeper. A LostError from any method is the end of both."""

    def __init__(self, options: WorkerOptions, pace: Pace | None = None, printed: Callable[[str], None] | None = None):
        """Take the pace that workers share, and whom to give what the reward prints."""
        self._options, self._pace, self._print = options, pace or Pace(), printed
        self.num_rated = 0
        self._number = 0
        self._worker: tuple[int, str | None] | None = None  # its process, and when that started
        self._ended: dict[str, Any] | None = None  # what the keeper said last
        self._returned: list[tuple[int, int]] = []  # first and last of requests that the worker was not given
        control, kept = frames.connected()
        channel, works = frames.connected()
        self._control, self._channel = (frames.Frames(end, frames.LARGEST_ANSWER) for end in (control, channel))
        try:
            # Not forked from the trainer, whose threads and GPU do not survive it. Nothing is in its arguments.
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "truestep.environments.keeper"],
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

    def start(self, fields: Sequence[tuple[str, Sequence[str]]] | None = None) -> None:
        """Wait until the reward is imported; a RewardError says why it cannot be."""
        nonce = secrets.token_hex(16)
        deadline = time.monotonic() + _START_SECONDS
        start: dict[str, Any] = {"reward": self._options.reward, "memory": self._options.memory, "nonce": nonce}
        start["fields"] = fields
        start |= {"room": self._options.room, "directories": user_directories()}
        try:
            self._control.send(frames.encode(start), deadline)
            self._answer(nonce, deadline)
        except frames.LateError:
            raise LostError(f"the reward was not imported within {_START_SECONDS:g} s") from None
        except frames.EndOfFramesError:
            raise self._lost("could not be started") from None
        except frames.FrameError as error:
            raise LostError(
                f"the reward wrote to the connection of its process while it was imported: {error}"
            ) from None

    def rate(self, requests: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Rating | Exception | None]]:
        """Have completions rated, one after another; give each one's number among them with its reward as it comes, or
        with the exception that says why it has none. None: it was not begun, since one before it takes long.

        A LostError is of the first that was not given yet; those behind it were not begun either."""
        asked: deque[_Asked] = deque()
        sent = bytearray()
        for index, request in enumerate(requests):
            question = _Asked(index, self._number + 1, secrets.token_hex(16))
            try:
                sent += frames.encode({"number": question.number, "nonce": question.nonce, **request})
            except frames.FrameError as error:
                yield index, RewardError(f"the prompt and its completion are too long for a reward: {error}")
            except (TypeError, ValueError, RecursionError) as error:  # a field that JSON does not have
                yield index, error
            else:
                self._number += 1
                asked.append(question)
        try:
            yield from self._answers(asked, memoryview(sent))
        except frames.LateError:
            option = f"{self._options.section}.reward_timeout: {self._options.timeout:g} s"
            raise LateRewardError(f"the reward took longer than {option}") from None
        except frames.EndOfFramesError:
            raise self._lost("ended its process") from None
        except frames.FrameError as error:
            raise LostError(f"the reward wrote to the connection that carries rewards: {error}") from None

    def _answers(self, asked: deque["_Asked"], unsent: memoryview) -> Iterator[tuple[int, Rating | Exception | None]]:
        """Send what is asked and take the answers, each of which has the whole time of a completion."""
        deadline = time.monotonic() + self._options.timeout
        while asked:
            unsent = self._channel.send_some(unsent)
            answer = self._take_or_wait(deadline, bool(unsent))
            while self._returned:
                first, last = self._returned.pop()
                yield from ((one.index, None) for one in reversed(asked) if first <= one.number <= last)
                asked = deque(one for one in asked if not first <= one.number <= last)
            if answer is None:
                continue
            try:
                value: Rating | Exception = fit(self._read(answer, asked[0].number, asked[0].nonce))
            except RewardError as error:
                value = error
            deadline = time.monotonic() + self._options.timeout
            yield asked.popleft().index, value

    def usable(self) -> bool:
        """True where the worker waits for a completion: it has said nothing out of turn, and is there."""
        try:
            self._hear()
            return self._ended is None and self._channel.silent()
        except (frames.EndOfFramesError, frames.FrameError):
            return False

    def _answer(self, nonce: str, deadline: float) -> Rating:
        """Wait for the answer to the request of this number and nonce. Anything else in its place is an error."""
        while (answer := self._take_or_wait(deadline)) is None:
            pass
        return self._read(answer, self._number, nonce)

    def _take_or_wait(self, deadline: float, sends: bool = False) -> dict[str, Any] | None:
        """Take an answer that has come, or else wait until something comes or, if it `sends`, can be sent."""
        if (answer := self._channel.take()) is not None:
            return answer
        if self._ended is not None:
            raise frames.EndOfFramesError
        left = deadline - time.monotonic()
        if left <= 0:
            raise frames.LateError
        poll = select.poll()
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if sends else 0))
        poll.register(self._control, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(min(left, _HEALTHY_SECONDS) * 1000 + 1)}
        progress.made("waits for rewards")  # each has an end of its own: no run stands still for it
        if self._control.fileno() in ready:
            self._hear()
        self._channel.fill()
        return self._channel.take()

    def _read(self, answer: dict[str, Any], number: int, nonce: str) -> Rating:
        if answer.get("number") != number or answer.get("nonce") != nonce or len(answer) != 4:
            raise frames.FrameError("not the answer to what was asked")
        if isinstance(problem := answer.get("problem"), str):
            self.num_rated += 1
            raise RewardError(printable(problem), _lines(answer.get("traceback")))
        value, parts = answer.get("value"), answer.get("parts")
        if not isinstance(value, float) or not isinstance(parts, dict):
            raise frames.FrameError("neither a number nor a problem")
        if not all(isinstance(part, float) and name.isprintable() for name, part in parts.items()):
            raise frames.FrameError("a part that is not a number")
        self.num_rated += number > 0
        return Rating.of(value, parts)

    def _hear(self) -> None:
        """Take note of what the keeper has said."""
        self._control.fill()
        while (message := self._control.take()) is not None:
            if self._print is not None and isinstance(printed := message.get("new"), str):
                self._print(printed)
            if "ended" in message:
                self._ended = message
            elif "returned" in message:
                first, last = message["returned"]
                self._returned.append((first, last))
            elif "rated" in message:
                self._pace.note(message["rated"], message["seconds"])
            elif isinstance(number := message.get("worker"), int):
                self._worker = number, started(number)

    def _lost(self, what: str) -> LostError:
        """Word the end of a worker: its limits, its exit code and what it printed last."""
        self.end()
        ended = self._ended or {}
        if isinstance(breach := ended.get("breach"), str):
            return LostError(f"{printable(breach)}{self._of_memory(breach)}")
        code, printed = ended.get("ended"), ended.get("printed", "").strip() or self._complaint
        how = "no exit code is known" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        last = f"; last it printed: {printable(printed[-200:])}" if printed else ""
        return LostError(f"the reward {what} ({how}){last}")

    def _of_memory(self, breach: str) -> str:
        return f" ({self._options.section}.reward_memory)" if "GiB of memory" in breach else ""

    def ask_to_end(self) -> None:
        """Tell the keeper to end everything; any thread may."""
        with contextlib.suppress(frames.EndOfFramesError, frames.LateError):
            self._control.send(frames.encode({"end": True}), time.monotonic() + 1.0)

    def end(self) -> None:
        """End the worker, its keeper and everything below it; return when they are gone."""
        if self._keeper.returncode is not None:
            return
        self.ask_to_end()
        deadline = time.monotonic() + _END_SECONDS
        try:
            while self._ended is None:
                self._wait_for_keeper(deadline)
                self._hear()
        except (frames.EndOfFramesError, frames.FrameError, frames.LateError):
            self._end_without_keeper()
        self._channel.close()
        self._control.close()
        self._complaint = self._read_complaint()
        try:
            self._keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    _complaint = ""  # what the interpreter itself wrote where the keeper could not be started

    def _wait_for_keeper(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise frames.LateError
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.poll(left * 1000 + 1)

    def _end_without_keeper(self) -> None:
        """End what the keeper cannot: a reward may have stopped or killed it."""
        if self._keeper.poll() is None:
            kill_below(self._keeper.pid)
            self._keeper.kill()
        if self._worker is not None and started(self._worker[0]) == self._worker[1] is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._worker[0], signal.SIGKILL)  # it leads its group

    def _read_complaint(self) -> str:
        stream = self._keeper.stderr
        if stream is None:
            return ""
        with stream:
            os.set_blocking(stream.fileno(), False)
            try:
                return (stream.read(10_000) or b"").decode(errors="replace").strip()
            except OSError:
                return ""
