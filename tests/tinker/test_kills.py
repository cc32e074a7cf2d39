"""A server and its clients are killed at any instant: every number that a client was ever told is that of a run that
nobody killed, and each checkpoint that it was told of is there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from checkpoints import read_weights
from selection import in_tiers
from small_runs import read_lines
from tinker.house import config_of, metrics_of, request_of, served_in, tenant_of
from tinker.killed import data_of, run_client, run_server
from truestep import dump_config
from truestep.ranks.forks import fork_context

PYTHON = os.environ.get("TRUESTEP_TINKER", "")
KEYS = ("tml-alice", "tml-robert")


def begun(target: Any, *given: Any) -> ForkServerProcess:
    process = fork_context().Process(target=target, args=given, daemon=True)
    process.start()
    return process


def free_port() -> int:
    """A port below those that connections get: one that is made while nobody listens there may get the port itself."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")


def kill(process: ForkServerProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)


def reference(folder: Path, key: str, steps: int) -> dict[int, tuple[float, float]]:
    """The loss and the norm of each step of a run that nobody kills."""
    house = served_in(folder, folder / f"whole-{key}").of(key)
    house.begin()
    lora = {"rank": 4, "seed": len(key)}
    body = {"session_id": house.session, "model_seq_id": 0, "base_model": "model", "lora_config": lora}
    model = house.result(house.post("create_model", body).json())["model_id"]
    found = {}
    for step in range(1, steps + 1):
        raw = request_of(model, 2 * step - 1, data_of(key, step), "cross_entropy")
        loss = metrics_of(house.result(house.post("forward_backward", content=raw).json()))["loss:sum"]
        update = {"model_id": model, "seq_id": 2 * step, "adam_params": {"learning_rate": 0.01}}
        found[step] = (loss, house.result(house.post("optim_step", update).json())["metrics"]["grad_norm"])
    return found


@pytest.mark.parametrize("kills", in_tiers([4, 30], [], [4]))
def test_kills_of_server_and_clients(kills: int, tmp_path: Path) -> None:
    draw = random.Random(kills)
    (tmp_path / "serve.yaml").write_text(dump_config(config_of(tmp_path)))
    port = free_port()

    def server(kill: tuple[str, int] | None = None) -> ForkServerProcess:
        return begun(run_server, str(tmp_path), port, kill)

    def client(key: str) -> ForkServerProcess:
        return begun(run_client, str(tmp_path), port, key)

    serving, clients = server(), {key: client(key) for key in KEYS}
    try:
        wait_for_lines(tmp_path, 3)
        for number in range(kills):
            where = ("event", "record", "server", "client")[number % 4]
            if where == "client":
                time.sleep(draw.uniform(0.0, 1.0))
                key = draw.choice(KEYS)
                kill(clients[key])
                clients[key] = client(key)
                continue
            if where in ("event", "record"):  # the one that serves now is killed by itself
                kill(serving)
                serving = server((where, draw.randint(1, 120 if where == "event" else 20)))
                serving.join(120)
                assert serving.exitcode == -signal.SIGKILL, (tmp_path / "console.txt").read_text()[-3000:]
            else:
                time.sleep(draw.uniform(0.0, 1.0))
                kill(serving)
            serving = server()
            wait_for_lines(tmp_path, 1)
        (tmp_path / "stop").touch()
        for process in clients.values():
            process.join(120)
            assert process.exitcode == 0
    finally:
        for process in (serving, *clients.values()):
            if process.is_alive():
                kill(process)
    check(tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="TRUESTEP_TINKER names no Python: `make tinker` makes one")
def test_the_client_s_own_package_does_not_see_the_kills(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(dump_config(config_of(tmp_path)))
    program = str(Path(__file__).with_name("long_program.py"))
    told, steps = [], 8
    for kills in ((), (2, 4, 5)):  # after so many steps
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        port = free_port()
        address = {"TINKER_API_KEY": KEYS[0], "TINKER_BASE_URL": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "1"}
        serving = begun(run_server, str(tmp_path), port, None)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | address
        command = [PYTHON, program, "model", str(steps)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": (tmp_path / "errors.txt").open("w"), "text": True}
        with subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) as client:
            lines: list[str] = []
            try:
                for line in client.stdout:
                    lines.append(line)
                    if len(lines) in kills:
                        kill(serving)
                        serving = begun(run_server, str(tmp_path), port, None)
            finally:
                client.kill()
                kill(serving)
        told.append(lines)
    assert len(told[0]) == steps and told[1] == told[0], (tmp_path / "errors.txt").read_text()[-3000:]


def wait_for_lines(folder: Path, count: int) -> None:
    """Wait until each client has been told so many more things."""
    before, end = {key: told(folder, key) for key in KEYS}, time.monotonic() + 120
    while any(told(folder, key) < before[key] + count for key in KEYS):
        assert time.monotonic() < end, (folder / "console.txt").read_text()[-3000:]
        time.sleep(0.02)


def told(folder: Path, key: str) -> int:
    """How many things a client was told."""
    file = folder / f"{key}.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def check(folder: Path) -> None:
    house = served_in(folder, folder / "checkpoints")
    for key in KEYS:
        lines = read_lines(folder / f"{key}.jsonl")
        expected = reference(folder, key, max(line["step"] for line in lines))
        for line in lines:
            if "loss" in line:
                assert (line["loss"], line["norm"]) == expected[line["step"]], (key, line)
        listed = house.of(key).get("checkpoints", params={"limit": 1000}).json()["checkpoints"]
        paths = {one["tinker_path"] for one in listed}
        assert {line["path"] for line in lines if "path" in line} <= paths
        for path in paths:
            saved, directory = house.tinker._jobs._checkpoints.find(tenant_of(key), path)
            assert f"step-{saved.steps}" == saved.name and read_weights(directory)
    assert not list((folder / "checkpoints").glob("*/*/weights/.*")), "what was not complete is gone"
