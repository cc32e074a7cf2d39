"""Servers that a run starts: their arguments, ends, restarts, and that nothing outlives the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.runs import server_config
from small_runs import quiet_trainer
from truestep.generate.errors import ServerError
from truestep.generate.servers import started
from truestep.generate.servers.started import Engine, StartedServers, gpus_of_ranks, python_of
from truestep.ranks.group import ALONE
from truestep.rollouts.source import SourceError
from truestep.run.assemble.servers import _lives, engine_to_start
from truestep.run.assemble.sources import check_inputs

# An engine that notes how it was started, has a child in another session that heeds no signal, and answers /health.
ENGINE = """
import http.server, json, os, subprocess, sys
asked = dict(zip(sys.argv, sys.argv[1:]))
child = subprocess.Popen([sys.executable, "-Sc", STUBBORN], start_new_session=True)
with open(os.path.join(HERE, "starts.jsonl"), "a") as notes:
    noted = {"pid": os.getpid(), "child": child.pid, "arguments": sys.argv[1:], "environment": dict(os.environ)}
    print(json.dumps(noted), file=notes)
print("the engine begins")
if os.path.exists(os.path.join(HERE, "broken")):
    sys.exit("CUDA error: out of memory")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(asked["--port"])), Handler).serve_forever()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with this engine."""
    monkeypatch.setattr(started, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(started, "_GRACE_SECONDS", 0.2)
    script = tmp_path / "engine.py"
    script.write_text(f"HERE, STUBBORN = {str(tmp_path)!r}, {STUBBORN!r}\n{ENGINE}", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


@pytest.fixture
def start(place: Path) -> Iterator[Callable[..., StartedServers]]:
    made: list[StartedServers] = []
    plain = Engine(str(place / "bin" / "python"), "vllm", "/models/m", "policy", "bfloat16", 4096)

    def begin(say: Callable[[str], None] = print, gpus: Any = ((),), timeout: float = 20.0, **how: Any) -> Any:
        made.append(StartedServers(replace(plain, **how), gpus, place / "servers", say, timeout))
        return made[-1]

    yield begin
    for each in made:
        each.close()
    assert not [one for one in starts(place) if lives(one["pid"]) or lives(one["child"])], "something outlives the run"


def starts(place: Path) -> list[dict[str, Any]]:
    file = place / "starts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(happens: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_server_has_its_gpus_port_seed_and_key(
    start: Callable[..., StartedServers], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_trainer = {"LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    for name, value in (of_trainer | {"PYTHONPATH": "/of/the/trainer", "HTTP_PROXY": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, value)
    servers = start(gpus=[(4, 5), (6, 7)], tensor=2, options=("--gpu-memory-utilization", "0.8"), receives=True)
    servers.wait(_lives)
    assert len({*servers.urls}) == 2 and all(map(_lives, servers.urls))
    found = sorted(starts(place), key=lambda one: one["environment"]["CUDA_VISIBLE_DEVICES"])
    assert [one["environment"]["CUDA_VISIBLE_DEVICES"] for one in found] == ["4,5", "6,7"]
    for number, (one, url) in enumerate(zip(found, servers.urls, strict=True), 1):
        given = one["arguments"]
        assert given[:2] == ["-m", "vllm.entrypoints.openai.api_server"] and given[-2:] == [
            "--gpu-memory-utilization",
            "0.8",
        ]
        flags = dict(zip(given[2::2], given[3::2], strict=True))
        assert flags["--seed"] == str(number) and flags["--port"] == url.rpartition(":")[2]
        assert flags["--host"] == "127.0.0.1" and flags["--tensor-parallel-size"] == "2"
        assert flags["--logprobs-mode"] == "processed_logprobs" and flags["--max-model-len"] == "4096"
        assert flags["--weight-transfer-config"] == '{"backend": "nccl"}'
        assert one["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
        assert one["environment"]["VLLM_API_KEY"] == servers.key and len(servers.key or "") > 20
        assert not {*of_trainer, "PYTHONPATH"} & set(one["environment"])
        assert one["environment"]["PATH"].startswith(f"{place / 'bin'}{os.pathsep}")
        assert str(servers.key) not in " ".join(given), "everybody on the machine reads arguments"


def test_a_server_that_ends_is_started_again_on_its_port(start: Callable[..., StartedServers], place: Path) -> None:
    said: list[str] = []
    servers = start(said.append)
    servers.wait(_lives)
    (first,) = starts(place)
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: len(starts(place)) == 2 and _lives(servers.urls[0]))
    second = starts(place)[1]
    assert second["arguments"] == first["arguments"] and second["pid"] != first["pid"]
    until(lambda: not lives(first["child"]))
    (message,) = said
    assert message.startswith(f"the server {servers.urls[0]} ended by SIGKILL: it is started again")
    assert "the engine begins" in message and "servers/0.log" in message


def test_a_server_that_ends_again_and_again_is_left(
    start: Callable[..., StartedServers], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started, "_STARTS", 3)
    said: list[str] = []
    start(said.append).wait(_lives)
    (place / "broken").touch()
    os.kill(starts(place)[0]["pid"], signal.SIGKILL)
    until(lambda: said and "after 3 starts it is left" in said[-1])
    assert len(starts(place)) == 3 and "CUDA error: out of memory" in said[-1]


def test_a_server_that_ends_as_it_starts_ends_the_run_with_its_last_words(
    start: Callable[..., StartedServers], place: Path
) -> None:
    (place / "broken").touch()
    with pytest.raises(ServerError, match=r"(?s)ended with code 1 as it started:.*CUDA error: out of memory"):
        start().wait(_lives)


def test_a_server_that_never_answers_is_named(start: Callable[..., StartedServers]) -> None:
    with pytest.raises(ServerError, match="does not answer after sampler.start.timeout: 0.2 seconds"):
        start(timeout=0.2).wait(lambda url: False)


def test_a_server_that_never_answers_again_is_left_whatever_time_it_takes(
    start: Callable[..., StartedServers], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started, "_WITHIN", 0.0)
    said: list[str] = []
    start(said.append).wait(_lives)
    (place / "broken").touch()
    os.kill(starts(place)[0]["pid"], signal.SIGKILL)
    until(lambda: said and "after 4 starts it is left" in said[-1])


def test_an_error_while_the_trainer_is_made_ends_the_servers(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = server_config(tmp_path, [], sampler={"urls": None, "start": {"environment": str(place)}})

    def fail(*_: Any) -> Any:
        until(lambda: starts(place))
        raise RuntimeError("out of memory")

    monkeypatch.setattr("truestep.run.train.make_runner", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        quiet_trainer(config)
    (one,) = starts(place)
    until(lambda: not lives(one["pid"]) and not lives(one["child"]))


def test_a_keeper_whose_trainer_is_gone_before_it_looks_starts_nothing_that_stays(place: Path) -> None:
    keeper = Path(started.__file__).with_name("keeper.py")
    command = [sys.executable, "-I", str(keeper), "1", "0.2", str(place / "log"), str(place / "bin" / "python")]
    assert subprocess.run([*command, "--port", "0"], timeout=20, check=False).returncode == 0
    assert not [one for one in starts(place) if lives(one["pid"]) or lives(one["child"])]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_trainer_that_is_killed(place: Path, ending: int) -> None:
    code = f"""
import time
from pathlib import Path
from truestep.generate.servers import started

started._GRACE_SECONDS = 0.2
engine = started.Engine({str(place / "bin" / "python")!r}, "vllm", "m", "policy", "float32", 64)
servers = started.StartedServers(engine, [(), ()], Path({str(place / "servers")!r}), print, 20.0)
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: len(starts(place)) == 2)
    trainer.send_signal(ending)
    trainer.wait()
    until(lambda: not any(lives(one[name]) for one in starts(place) for name in ("pid", "child")), 30.0)


def test_gpus_of_ranks_are_those_that_cuda_shows_them() -> None:
    assert gpus_of_ranks({}) == {0}
    assert gpus_of_ranks({"LOCAL_WORLD_SIZE": "4"}) == {0, 1, 2, 3}
    assert gpus_of_ranks({"LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "5,3,1"}) == {3, 5}
    assert gpus_of_ranks({"CUDA_VISIBLE_DEVICES": ""}) == set()
    with pytest.raises(ServerError, match="CUDA_VISIBLE_DEVICES names GPU-8f3a, which cannot be compared"):
        gpus_of_ranks({"CUDA_VISIBLE_DEVICES": "GPU-8f3a"})


def test_an_environment_without_python_is_refused(place: Path) -> None:
    assert python_of(str(place)) == python_of(str(place / "bin" / "python")) == str(place / "bin" / "python")
    for wrong in (place / "servers", place / "engine.py"):
        with pytest.raises(ServerError, match=r"sampler.start.environment: .* has no bin/python"):
            python_of(str(wrong))


def test_options_become_an_engine(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    start = {"environment": str(place), "gpus": [2, 3, 4, 5], "tensor": 2, "options": ["--enforce-eager"]}
    given = {"urls": None, "start": start, "adapter": "served"}
    config = server_config(tmp_path, [], sampler=given, adapter={"rank": 4}, data={"tokens_per_microbatch": 50})
    found = engine_to_start(config)
    assert found is not None
    engine, gpus = found
    assert gpus == [[2, 3], [4, 5]]
    assert (engine.dtype, engine.longest, engine.adapter_rank, engine.options) == (
        "float32",
        50,
        4,
        ("--enforce-eager",),
    )
    assert engine.command(1, 2)[-6:-1] == ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    assert Path(engine.model).is_absolute() and engine.command(1, 2)[0] == str(place / "bin" / "python")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    auto = config.changed({"model.device": "auto"})
    with pytest.raises(SourceError, match="sampler.start.gpus: the trainer runs on a GPU"):
        engine_to_start(auto.changed({"sampler.start.gpus": None, "sampler.start.tensor": 1}))
    config = auto.changed({"sampler.start.gpus": [1, 0, 4, 5]})
    with pytest.raises(SourceError, match="sampler.start.gpus: GPU 0, 1 is one on which the trainer runs"):
        check_inputs(config, ALONE)
