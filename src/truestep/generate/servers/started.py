"""Inference servers that the run starts on this machine, starts again when they end, and ends with itself."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from truestep.generate.errors import ServerError
from truestep.process import progress
from truestep.text import keep_secret, printable

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_STARTS, _WITHIN = 5, 900.0  # a server that was started this often within this many seconds is not started again
_FAILED = 3  # a server that ended this often in a row before it answered is not started again
# Seconds for a server to end by itself, and the most seconds that the run waits for that.
_GRACE_SECONDS, _CLOSE_SECONDS = 10.0, 20.0
_SHOWN = 15  # last lines of a log
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # allowed values of vLLM's --max-lora-rank
# Environment variables for the trainer's own processes.
_TRAINERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PYTHONPATH", "OMP_NUM_")
_KEEPER = Path(__file__).with_name("keeper.py")


@dataclass(frozen=True)
class Engine:
    """How to start servers of a kind."""

    python: str
    kind: str  # vllm or sglang
    model: str  # the directory of the weights that a server begins with
    name: str  # the name under which it serves the model
    dtype: str
    longest: int | None  # tokens of a document; None: what the model allows
    tensor: int = 1
    adapter_rank: int | None = None  # the rank of the adapter, if servers load only the adapter
    receives: bool = False  # it receives weights by NCCL
    returns_routes: bool = False
    options: tuple[str, ...] = ()

    def command(self, port: int, seed: int) -> list[str]:
        return [self.python, "-m", *(self._vllm(port, seed) if self.kind == "vllm" else self._sglang(port, seed))]

    def _vllm(self, port: int, seed: int) -> list[str]:
        made = ["vllm.entrypoints.openai.api_server", "--model", self.model, "--served-model-name", self.name]
        made += ["--host", "127.0.0.1", "--port", str(port), "--seed", str(seed), "--dtype", self.dtype]
        made += ["--logprobs-mode", "processed_logprobs", "--tensor-parallel-size", str(self.tensor)]
        made += [] if self.longest is None else ["--max-model-len", str(self.longest)]
        if self.adapter_rank is not None:  # the new version of an adapter is loaded before the old one is unloaded
            largest = next((rank for rank in _LORA_RANKS if rank >= self.adapter_rank), self.adapter_rank)
            made += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(largest)]
        made += ["--weight-transfer-config", '{"backend": "nccl"}'] if self.receives else []
        made += ["--enable-return-routed-experts"] if self.returns_routes else []
        return [*made, *self.options]

    def _sglang(self, port: int, seed: int) -> list[str]:
        made = ["sglang.launch_server", "--model-path", self.model, "--served-model-name", self.name]
        made += ["--host", "127.0.0.1", "--port", str(port), "--random-seed", str(seed), "--dtype", self.dtype]
        made += ["--tp", str(self.tensor)]
        made += [] if self.longest is None else ["--context-length", str(self.longest)]
        made += ["--enable-return-routed-experts"] if self.returns_routes else []
        return [*made, *self.options]

    def environment(self, gpus: Sequence[int], key: str | None) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if not name.startswith(_TRAINERS)}
        # The server calls tools of its environment, such as ninja, by name.
        given["PATH"] = os.pathsep.join([str(Path(self.python).parent), given.get("PATH", os.defpath)])
        given |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        given |= {} if key is None else {"VLLM_API_KEY": key}
        return given | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {})


@dataclass(eq=False)
class _Started:
    port: int
    gpus: tuple[int, ...]
    log: Path
    seed: int
    process: subprocess.Popen[bytes] | None = None
    begun: list[float] = field(default_factory=list)  # times of its starts
    failed: int = 0  # starts in a row that ended before it answered
    lived: bool = False  # it has answered since its last start
    given_up: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __str__(self) -> str:
        where = f" (GPU {', '.join(map(str, self.gpus))})" if self.gpus else ""
        return f"the server {self.url}{where}"


class StartedServers:
    """The servers of a run. Only the first rank has them."""

    def __init__(
        self,
        engine: Engine,
        gpus: Sequence[Sequence[int]],  # the GPUs of each server; empty: those that the engine finds
        logs: Path,
        say: Callable[[str], None],
        timeout: float,
    ):
        # SGLang takes its key as an argument, which everybody on the machine can read.
        self.key = secrets.token_urlsafe(24) if engine.kind == "vllm" else None
        if self.key is not None:
            keep_secret(self.key)
        self._engine, self._say, self._timeout = engine, say, timeout
        logs.mkdir(parents=True, exist_ok=True)
        self._servers = [
            _Started(port, tuple(own), logs / f"{number}.log", number + 1)
            for number, (own, port) in enumerate(zip(gpus, _free_ports(len(gpus)), strict=True))
        ]
        self._lives: Callable[[str], bool] = lambda url: True
        self._closed, self._lock = threading.Event(), threading.RLock()
        # Called by `close`, and when the interpreter exits.
        self._end = weakref.finalize(self, _end, self._servers, self._closed, self._lock)
        for server in self._servers:
            self._start(server)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def wait(self, lives: Callable[[str], bool]) -> None:
        """Wait until all servers answer, then start a thread that starts servers again when they end."""
        until = time.monotonic() + self._timeout
        self._lives, waiting = lives, list(self._servers)
        while waiting:
            with progress.waiting_for(f"{waiting[0]} to start (it writes {waiting[0].log})"):
                waiting = [server for server in waiting if not lives(server.url)]
                for server in self._servers:  # also those whose port answers: another program may answer there
                    assert server.process is not None
                    if (code := server.process.poll()) is not None:
                        raise ServerError(
                            f"sampler.start: {server} ended{_with(code)} as it started:\n{_last_of(server)}"
                        )
                if waiting and time.monotonic() > until:
                    raise ServerError(
                        f"sampler.start: {waiting[0]} does not answer after sampler.start.timeout: "
                        f"{self._timeout:g} seconds:\n{_last_of(waiting[0])}"
                    )
                progress.made("looks at servers that start")
                time.sleep(_POLL_SECONDS if waiting else 0.0)
        for server in self._servers:
            server.lived = True
        threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), name="servers", daemon=True).start()

    def _start(self, server: _Started) -> None:
        server.begun.append(time.monotonic())
        server.lived = False
        command = self._engine.command(server.port, server.seed)
        server.process = subprocess.Popen(
            [sys.executable, "-I", str(_KEEPER), str(os.getpid()), str(_GRACE_SECONDS), str(server.log), *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach a server: the trainer ends it after the last checkpoint
            env=self._engine.environment(server.gpus, self.key),
        )

    def look(self) -> None:
        """Restart the servers that have ended. The fleet gives them the current weights when they answer."""
        for server in self._servers:
            server.lived = server.lived or (not server.given_up and self._lives(server.url))
            with self._lock:
                assert server.process is not None
                code = server.process.poll()
                if code is None or server.given_up or self._closed.is_set():
                    continue
                server.failed = 0 if server.lived else server.failed + 1
                lately = sum(begun > time.monotonic() - _WITHIN for begun in server.begun)
                server.given_up = lately >= _STARTS or server.failed >= _FAILED
                then = f"after {len(server.begun)} starts it is left" if server.given_up else "it is started again"
                self._say(f"{server} ended{_with(code)}: {then}. Its last lines, of {server.log}:\n{_last_of(server)}")
                if not server.given_up:
                    self._start(server)

    def close(self) -> None:
        self._end()


def _watch(owner: "weakref.ref[StartedServers]", closed: threading.Event) -> None:
    while not closed.wait(_POLL_SECONDS):
        servers = owner()
        if servers is None:
            return
        try:
            servers.look()
        except Exception:  # such as a failed fork; the next call may succeed
            log.exception("a look at the servers that the run started")
        del servers


def _end(servers: Sequence[_Started], closed: threading.Event, lock: threading.RLock) -> None:
    """End all servers at the same time, and wait for them."""
    closed.set()
    with lock:
        _end_all(servers)


def _end_all(servers: Sequence[_Started]) -> None:
    running = [server.process for server in servers if server.process is not None]
    for process in running:
        process.terminate()
    until = time.monotonic() + _CLOSE_SECONDS
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def _with(code: int) -> str:
    """Describe how a process ended, by its exit code in the form that shells use."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f" by {signal.Signals(code - 128).name}"
    return f" with code {code}" if code else ""


def _last_of(server: _Started) -> str:
    """Return the last lines of a server's log, to be shown."""
    try:
        with server.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200 * _SHOWN))
            lines = file.read().decode(errors="replace").splitlines()[-_SHOWN:]
    except OSError as error:
        lines = [str(error.strerror)]
    return "\n".join(f"    {printable(line, 200)}" for line in lines)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


def python_of(environment: str) -> str:
    """Return the interpreter of a virtual environment. `environment` may also be the path of an interpreter."""
    place = Path(environment).expanduser()
    found = place / "bin" / "python" if place.is_dir() else place
    if not found.is_file() or not os.access(found, os.X_OK):
        raise ServerError(f"sampler.start.environment: {environment} has no bin/python, and is no Python itself")
    return str(found.absolute())  # not resolved: a virtual environment's Python is a link to another


def gpus_of_ranks(variables: Mapping[str, str]) -> set[int]:
    """Return the numbers of the GPUs that the trainer's ranks on this machine use, by what torchrun and CUDA set."""
    local = int(variables.get("LOCAL_WORLD_SIZE", "1"))
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return set(range(local))
    named = [part.strip() for part in visible.split(",") if part.strip()][:local]
    if odd := [part for part in named if not part.isdigit()]:
        raise ServerError(
            f"sampler.start.gpus: CUDA_VISIBLE_DEVICES names {odd[0]}, which cannot be compared with numbers of GPUs: "
            "give numbers there"
        )
    return set(map(int, named))
