"""Real vLLMs on this machine's CPU, started and stopped by their process ids."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from truestep.generate.servers.vllm import Vllm

NAME = "policy"
LINKED = ("--weight-transfer-config", '{"backend": "nccl"}')
_READY_SECONDS = 280.0
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # The engine computes in its own process. A worker beside it, and the engine that waits for it, would each keep a
    # core busy by looking for the other's messages, and the trainer has to share two with them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def plugin_path(folder: Path) -> str:
    """Give the import path by which a vLLM has the plugins of the tests."""
    facts = folder / "truestep_tests-0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: truestep_tests\nVersion: 0\n", encoding="utf-8")
    entry = "[vllm.general_plugins]\ngloo = server.gloo_in_vllm:register\nexperts = server.experts_in_vllm:register\n"
    (facts / "entry_points.txt").write_text(entry, encoding="utf-8")
    return os.pathsep.join([str(folder), str(Path(__file__).parents[1])])


class Starter:
    """The process that servers are forked from."""

    def __init__(self, python: str, log: Path):
        environment = dict(os.environ) | SETTINGS | {"PYTHONPATH": plugin_path(log.with_suffix(".plugin"))}
        self._log = log
        with log.open("ab") as written:
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name("starter.py"))],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            )

    def start(self, log: Path, arguments: list[str]) -> int:
        """The process id; the process leads a session of its own."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"log": str(log), "arguments": arguments}), file=self._process.stdin, flush=True)
        said = self._process.stdout.readline()
        assert said, self._log.read_text()[-3000:]
        return int(said)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class VllmServer:
    def __init__(
        self,
        starter: Starter,
        model: Path,
        log: Path,
        *,
        logprobs_mode: str = "processed_logprobs",
        others: Sequence[str] = (),
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._starter, self._log = starter, log
        self._arguments = [
            *("--model", str(model), "--dtype", "float32", "--served-model-name", NAME, "--seed", str(self.port)),
            *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "256", "--logprobs-mode", logprobs_mode),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *others,
        ]
        self._process: int | None = None

    def start(self) -> None:
        self._process = self._starter.start(self._log, self._arguments)

    def wait(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            assert self._runs(), self._log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.25)
        raise TimeoutError(f"vLLM was not ready within {_READY_SECONDS:.0f} s: {self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        """At once, and its engine with it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while self._runs() or not is_free(self.port):  # its engine has the socket too
                assert time.monotonic() < deadline, f"port {self.port} is not free"
                time.sleep(0.01)
            self._process = None

    def _runs(self) -> bool:
        """The starter leaves nothing of a process that has ended."""
        assert self._process is not None
        try:
            os.kill(self._process, 0)
        except ProcessLookupError:
            return False
        return True

    def give(self, weights: Path) -> None:
        """As the trainer does. Completions under way are thrown away."""
        give_weights(self.url, weights)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60)

    def post(self, path: str, body: object = None) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)


def give_weights(url: str, weights: Path) -> None:
    async def give() -> None:
        server = Vllm(url, NAME, None, 60)
        try:
            await server.pause("abort")
            await server.load(weights)
            await server.resume()
        finally:
            await server.close()

    asyncio.run(give())
