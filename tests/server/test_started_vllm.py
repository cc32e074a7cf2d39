"""A real vLLM that the run starts: it samples, is killed and started again, and ends with the run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from server.runs import label_versions, recorded, server_config
from server.test_started import lives
from server.vllm_server import SETTINGS
from truestep.generate.servers.keeper import _descendants

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FLAGS = ["--enforce-eager", "--max-num-seqs", "64"]


def test_a_run_goes_on_with_a_server_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ.get("TRUESTEP_VLLM")
    if not python:
        pytest.skip("TRUESTEP_VLLM does not name the Python of a vLLM: `make vllm` installs one and prints it")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    sampler = {"urls": None, "start": {"environment": python, "options": FLAGS}}
    run = recorded(server_config(tmp_path, [], sampler=sampler, schedule={"stall_timeout": 600}))
    source: Any = run.trainer.source
    started, take, seen = run.shared._servers._started, source.take, set[int]()

    def kill_in_the_second_step(count: int, documents_seen: int) -> Any:
        keeper = started._servers[0].process.pid
        below = _descendants(keeper)[1:]
        seen.update(below)
        if documents_seen == 16:
            os.kill(below[0], signal.SIGKILL)
        return take(count, documents_seen)

    source.take = kill_in_the_second_step
    assert run.trainer.run() == "all 4 steps are done"
    assert len(started._servers[0].begun) == 2, "it was started again"
    assert len(seen) >= 2
    for versions, documents in run.steps:
        assert len(documents) == 16
        assert all((label_versions(document) == versions).all() for document in documents)
    assert run.worst_gap() < 1e-4
    deadline = time.monotonic() + 30
    while any(map(lives, seen)):
        assert time.monotonic() < deadline, "a process outlives the run"
        time.sleep(0.1)
    assert "Application startup complete" in (tmp_path / "run" / "servers" / "0.log").read_text()
