"""A real vLLM on this machine's CPU, started and stopped by its process id."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx

NAME = "policy"
_READY_SECONDS = 280.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class VllmServer:
    def __init__(self, python: str, model: Path, log: Path, *, logprobs_mode: str = "processed_logprobs"):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "256", "--logprobs-mode", logprobs_mode),
            *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port), "--seed", str(self.port)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            assert self._process is not None and self._process.poll() is None, self._log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.25)
        raise TimeoutError(f"vLLM was not ready within {_READY_SECONDS:.0f} s: {self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        """At once, and its engine with it: the session that it leads is its own."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def post(self, path: str, body: object = None) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)
