"""Servers that are slow, lie, die and come back: no bad document is trained on, and no silence is endless."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.conftest import Servers
from server.proxy import Answer, Proxy, is_group
from server.runs import completion, label_versions, recorded, server_config
from small_runs import read_lines, tell
from truestep.generate.errors import ServerError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # the first test waits for the servers to start

Spoiled = dict[str, Any]


def _without_last_token(choice: Spoiled) -> None:
    choice["token_ids"].pop()


def _cut_short(choice: Spoiled) -> None:
    choice["finish_reason"] = "length"
    del choice["token_ids"][2:], choice["logprobs"]["token_logprobs"][2:]


def _unknown_token(choice: Spoiled) -> None:
    choice["token_ids"][0] = 14


def _of_another_prompt(choice: Spoiled) -> None:
    choice["prompt_token_ids"] = [3, 4]


def _no_number(choice: Spoiled) -> None:
    choice["logprobs"]["token_logprobs"][0] = float("nan")


def _too_likely(choice: Spoiled) -> None:
    choice["logprobs"]["token_logprobs"][-1] = 0.5


def _unfinished(choice: Spoiled) -> None:
    choice["finish_reason"] = None


_SPOILS: tuple[Callable[[Spoiled], None], ...] = (
    _without_last_token,
    _cut_short,
    _unknown_token,
    _of_another_prompt,
    _no_number,
    _too_likely,
    _unfinished,
)


class Saboteur:
    """Spoils every other answer, each in another way, and remembers the completions that it let be."""

    def __init__(self) -> None:
        self._draw, self._answers = random.Random(5), 0
        self.good: set[tuple[int, ...]] = set()
        self.spoiled = 0

    async def __call__(self, path: str, asked: Any, answer: Answer) -> Answer | None:
        if not is_group(path, asked):
            return answer
        whole = json.loads(answer[1])
        self._answers += 1
        if self._answers % 2:
            self.good |= {(*choice["prompt_token_ids"], *choice["token_ids"]) for choice in whole["choices"]}
            return answer
        self.spoiled += 1
        kind = self.spoiled % (len(_SPOILS) + 4)
        if kind < len(_SPOILS):
            _SPOILS[kind](self._draw.choice(whole["choices"]))
            return 200, json.dumps(whole).encode()
        if kind == len(_SPOILS):
            whole["choices"].pop()
            return 200, json.dumps(whole).encode()
        garbage: dict[int, Answer | None] = {
            len(_SPOILS) + 1: None,  # cut in its middle
            len(_SPOILS) + 2: (200, b"<html>welcome to the proxy</html>"),
            len(_SPOILS) + 3: (503, b"try again"),
        }
        return garbage[kind]


def test_no_spoiled_answer_is_trained_on(servers: Servers, tmp_path: Path) -> None:
    saboteur = Saboteur()
    with Proxy(servers.first.url, saboteur) as proxy:
        run = recorded(server_config(tmp_path, [proxy.url], schedule={"steps": 6}))
        run.trainer.run()
    assert saboteur.spoiled > len(_SPOILS) + 4, "each kind at least once"
    assert len(run.taken) == 6 * 16
    assert {tuple(rollout.input_ids.tolist()) for rollout in run.taken} <= saboteur.good
    assert run.worst_gap() < 1e-4
    reasons = " ".join(line["reason"] for line in read_lines(tmp_path / "run" / "rejected.jsonl"))
    for said in (
        "14 is not in the vocabulary",
        "of another prompt",
        "log-prob is nan",
        "0.5",
        "None, neither",
        "not JSON",
    ):
        assert said in reasons, reasons


def test_a_server_that_is_not_there_is_named_at_the_start(servers: Servers, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"sampler.urls: http://127.0.0.1:9 does not answer as a vLLM"):
        recorded(server_config(tmp_path, [servers.first.url, "http://127.0.0.1:9"]))


def test_a_server_killed_and_restarted_is_given_its_weights_and_training_goes_on(
    servers: Servers, tmp_path: Path
) -> None:
    config = server_config(tmp_path, [servers.second.url], schedule={"steps": 6, "stall_timeout": 280})
    run = recorded(config)
    restarts = []

    def kill_after_two_steps(step: int, seen: int) -> None:
        if seen == 32:
            servers.second.kill()
            servers.second.start()
            restarts.append(seen)

    tell(run.trainer, updated=kill_after_two_steps)
    assert run.trainer.run() == "all 6 steps are done"
    assert restarts == [32]
    assert run.worst_gap() < 1e-4
    assert all((label_versions(document) == seen).all() for seen, documents in run.steps for document in documents)


def test_both_ways_for_a_completion_to_end(servers: Servers, tmp_path: Path) -> None:
    run = recorded(server_config(tmp_path, [servers.first.url], schedule={"steps": 2}))
    run.trainer.run()
    for rollout in run.taken:
        tokens = completion(rollout)
        assert rollout.metadata["stopped"] == (tokens[-1] == 0)
        assert rollout.truncated is not rollout.metadata["stopped"]
        assert rollout.metadata["stopped"] or len(tokens) == 16
        assert 0 not in tokens[:-1]
    assert {rollout.metadata["stopped"] for rollout in run.taken} == {True, False}
