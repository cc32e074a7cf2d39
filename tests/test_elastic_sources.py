"""A rank is lost in runs of every kind of source: each document once, and nothing is left."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents import Agents
from losing import DOCUMENTS, STEPS, agents_of, each_once, leaves_nothing, lose, says_why, train_on_a_server
from server.fake_vllm import FakeVllm
from server.models import make_model
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import merged, sort_prompts, word_model, write_lines
from stream.redis_server import RedisServer, needs_redis
from stream.senders import ToDirectory, ToStream
from test_elastic import compare
from tiny import make_records


def drawn_config(folder: Path, **sections: Any) -> dict[str, Any]:
    base = {
        "model": {"path": str(word_model(folder / "model")), "dtype": "float32", "device": "cpu"},
        "data": {"group_size": 3, "tokens_per_microbatch": 100},
        "sampler": {
            "prompts": str(write_lines(folder / "prompts.jsonl", sort_prompts(7))),
            "max_new_tokens": 6,
            "reward": "plain_rewards:digit_reward",
            "reward_workers": 1,
        },
        "schedule": {"docs_per_step": DOCUMENTS, "steps": STEPS, "stall_timeout": 60},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"directory": str(folder / "run"), "every": 3},
    }
    return merged(base, sections)


EPISODES = {
    "environment": {"class": "turn_environments:Unsteady"},
    "reward": None,
    "max_episode_tokens": 64,
    "stop": ["=", "1", "2", "3"],
}
PROGRAM = Path(__file__).parent / "generate" / "endpoint" / "sorts.py"
AGENTS = {
    "environment": {"type": "command", "run": [sys.executable, str(PROGRAM), "ends", "{prompt}"]},
    "reward": None,
    "max_episode_tokens": 64,
}


@pytest.mark.long
@pytest.mark.parametrize("whom", ["first", "another"])
@pytest.mark.parametrize("sampler", [{}, EPISODES, AGENTS], ids=["rewards", "episodes", "agents"])
def test_runs_that_sample_in_process(whom: str, sampler: dict[str, Any], tmp_path: Path) -> None:
    with agents_of(tmp_path, drawn_config(tmp_path, sampler=sampler), nodes=(2, 3)) as agents, leaves_nothing(agents):
        agents.start(0, 1, 2)
        lose(agents, whom)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
    says_why(agents, whom)
    each_once(agents)


def stream_config(folder: Path, model: Path, source: dict[str, str]) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "data": {"source": source, "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": DOCUMENTS, "stall_timeout": 60},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"directory": str(folder / "run"), "every": 3},
    }


def send_while_it_trains(agents: Agents, sender: ToDirectory | ToStream, whom: str | None) -> None:
    """Send the documents of two steps at a time, ahead of the run; kill a rank behind a step."""
    records = make_records(5, documents=STEPS * DOCUMENTS, max_length=16)

    def send() -> None:
        for number in range(0, len(records), 2 * DOCUMENTS):
            sender.send(records[number : number + 2 * DOCUMENTS])
            time.sleep(0.2)
        sender.end()

    sending = threading.Thread(target=send)
    sending.start()
    try:
        agents.start(0, 1, 2)
        if whom is not None:
            lose(agents, whom)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
    finally:
        sending.join()


@pytest.fixture(scope="module")
def whole(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is sent the same documents and loses nothing."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "sent").mkdir()
    config = stream_config(folder, tiny_model("llama"), {"type": "files", "directory": str(folder / "sent")})
    with agents_of(folder, config, nodes=(3, 3)) as agents:
        send_while_it_trains(agents, ToDirectory(folder / "sent"), None)
    return folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("whom", ["first", "another"])
@pytest.mark.parametrize("kind", ["directory", pytest.param("redis", marks=needs_redis)])
def test_runs_on_a_stream(
    kind: str,
    whom: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    whole: Path,
    request: pytest.FixtureRequest,
) -> None:
    for folder in ("sent", "redis"):
        (tmp_path / folder).mkdir()
    sent = tmp_path / "sent"
    source, sender = {"type": "files", "directory": str(sent)}, ToDirectory(sent)
    server: RedisServer | None = None
    if kind == "redis":
        server = RedisServer(tmp_path / "redis")
        request.addfinalizer(server.close)
        source, sender = {"type": "stream", "url": server.url, "stream": "rollouts"}, ToStream(server)
    config = stream_config(tmp_path, tiny_model("llama"), source)
    with agents_of(tmp_path, config, nodes=(2, 3)) as agents, leaves_nothing(agents):
        send_while_it_trains(agents, sender, whom)
    if server is not None:
        assert server.pending("rollouts") == [], "all is acknowledged"
    says_why(agents, whom)
    each_once(agents)
    compare(agents.run, whole)


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 2 * DOCUMENTS])
@pytest.mark.parametrize("whom", ["first", "another"])
def test_runs_on_a_server(whom: str, staleness: int, tmp_path: Path) -> None:
    with serving(FakeVllm(make_model(tmp_path / "served", seed=100), NAME)) as url:
        train_on_a_server(tmp_path, url, whom, staleness)
