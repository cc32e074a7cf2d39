"""Servers that are slow, lie, die and come back: no bad document is trained on, and no silence is endless."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from server.conftest import Servers
from server.proxy import Answer, Proxy, is_group
from server.runs import completion, label_versions, recorded, server_config, write_prompts
from small_runs import read_lines
from truestep.environments.rewards import RewardError
from truestep.policy.loading.load import load_policy
from truestep.rollouts.source import SourceError
from truestep.sampler.server import sync
from truestep.sampler.server.errors import ServerError

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
    """Spoils a third of the answers, each in another way, and remembers the completions that it let be."""

    def __init__(self, slow: float):
        self._draw, self._slow = random.Random(5), slow
        self.good: set[tuple[int, ...]] = set()
        self.spoiled = 0

    async def __call__(self, path: str, asked: Any, answer: Answer) -> Answer | None:
        if not is_group(path, asked):
            return answer
        whole = json.loads(answer[1])
        if self._draw.random() > 1 / 3:
            self.good |= {(*choice["prompt_token_ids"], *choice["token_ids"]) for choice in whole["choices"]}
            return answer
        self.spoiled += 1
        kind = self.spoiled % (len(_SPOILS) + 5)
        if kind < len(_SPOILS):
            _SPOILS[kind](self._draw.choice(whole["choices"]))
            return 200, json.dumps(whole).encode()
        if kind == len(_SPOILS):
            await asyncio.sleep(self._slow)
            return answer
        if kind == len(_SPOILS) + 1:
            whole["choices"].pop()
            return 200, json.dumps(whole).encode()
        garbage: dict[int, Answer | None] = {
            len(_SPOILS) + 2: None,  # cut in its middle
            len(_SPOILS) + 3: (200, b"<html>welcome to the proxy</html>"),
            len(_SPOILS) + 4: (503, b"try again"),
        }
        return garbage[kind]


def test_no_spoiled_answer_is_trained_on(servers: Servers, tmp_path: Path) -> None:
    saboteur = Saboteur(slow=3.0)
    with Proxy(servers.first.url, saboteur) as proxy:
        run = recorded(server_config(tmp_path, [proxy.url], sampler={"request_timeout": 2.0}, schedule={"steps": 6}))
        run.trainer.run()
    assert saboteur.spoiled > len(_SPOILS) + 5, "each kind at least once"
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


def test_a_server_that_only_lies_ends_the_run_in_words(servers: Servers, tmp_path: Path) -> None:
    async def spoil(path: str, asked: Any, answer: Answer) -> Answer:
        return (200, b'{"choices": []}') if is_group(path, asked) else answer

    with Proxy(servers.first.url, spoil) as proxy:
        run = recorded(server_config(tmp_path, [proxy.url]))
        with pytest.raises(SourceError, match=r"no group of 8 prompts in a row .* asked for 4 completions, got"):
            run.trainer.run()
    assert run.taken == [] and len(read_lines(tmp_path / "run" / "rejected.jsonl")) >= 8 * 4


def test_a_server_that_is_gone_for_good_ends_the_run_and_is_named(servers: Servers, tmp_path: Path) -> None:
    with Proxy(servers.first.url) as proxy:
        patient = {"request_timeout": 10_000.0}  # what ends the run is that nothing comes
        config = server_config(tmp_path, [proxy.url], sampler=patient, schedule={"stall_timeout": 2.0, "steps": 50})
        run = recorded(config)
        updated = run.trainer.source.updated

        def gone_after_two_steps(seen: int) -> None:
            updated(seen)
            proxy.down = seen >= 32

        run.trainer.source.updated = gone_after_two_steps  # type: ignore[method-assign]
        with pytest.raises(SourceError, match=rf"stall_timeout: 2\): {proxy.url} is lost since \d\d:\d\d:\d\d .*hea"):
            run.trainer.run()
    assert run.trainer.step >= 2


def test_a_server_that_is_gone_leaves_its_work_to_the_other(servers: Servers, tmp_path: Path) -> None:
    with Proxy(servers.first.url) as proxy:
        run = recorded(server_config(tmp_path, [proxy.url, servers.second.url], schedule={"steps": 4}))
        updated = run.trainer.source.updated

        def gone_after_a_step(seen: int) -> None:
            updated(seen)
            proxy.down = True

        run.trainer.source.updated = gone_after_a_step  # type: ignore[method-assign]
        run.trainer.run()
    assert run.worst_gap() < 1e-4
    assert {rollout.metadata["server"] for rollout in run.steps[-1][1]} == {servers.second.url}


def test_a_server_that_is_not_there_is_named_at_the_start(servers: Servers, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"sampler.urls: http://127.0.0.1:9 does not answer as a vLLM"):
        recorded(server_config(tmp_path, [servers.first.url, "http://127.0.0.1:9"]))


def test_weights_that_change_behind_our_back_are_noticed_before_their_documents_are_used(
    servers: Servers, tmp_path: Path
) -> None:
    """What a quick restart does: the server answers as ever, with the weights that it was started with."""
    started_with = sync.WeightsDirectory(tmp_path / "started").write(load_policy(servers.model), 0, torch.float32)

    done: list[int] = []

    async def spoil(path: str, asked: Any, answer: Answer) -> Answer:
        if is_group(path, asked) and len(done) < 2 and len(proxy.requests) > 60 * (len(done) + 1):
            done.append(len(proxy.requests))
            await asyncio.to_thread(servers.first.give, started_with)
        return answer

    with Proxy(servers.first.url, spoil) as proxy:
        config = server_config(tmp_path, [proxy.url], schedule={"steps": 8}, sampler={"max_staleness": 16})
        run = recorded(config)
        run.trainer.run()
    assert len(done) == 2
    assert run.worst_gap() < 1e-4
    assert run.trainer.source._ahead.counts()["void"] > 0


def test_a_server_killed_and_restarted_is_given_its_weights_and_training_goes_on(
    servers: Servers, tmp_path: Path
) -> None:
    config = server_config(tmp_path, [servers.second.url], schedule={"steps": 6, "stall_timeout": 280})
    run = recorded(config)
    updated, restarts = run.trainer.source.updated, []

    def kill_after_two_steps(seen: int) -> None:
        updated(seen)
        if seen == 32:
            servers.second.kill()
            servers.second.start()
            restarts.append(seen)

    run.trainer.source.updated = kill_after_two_steps  # type: ignore[method-assign]
    assert run.trainer.run() == "all 6 steps are done"
    assert restarts == [32]
    assert run.worst_gap() < 1e-4
    assert all((label_versions(document) == seen).all() for seen, documents in run.steps for document in documents)


def test_what_comes_too_late_is_dropped_and_counted(servers: Servers, tmp_path: Path) -> None:
    """One prompt's answers take a second longer than the others' while training runs ahead."""
    slow = threading.Event()

    async def spoil(path: str, asked: Any, answer: Answer) -> Answer:
        if is_group(path, asked) and not slow.is_set():
            slow.set()
            await asyncio.sleep(1.0)
            while len(run.steps) < 4:
                await asyncio.sleep(0.05)
        return answer

    with Proxy(servers.first.url, spoil) as proxy:
        config = server_config(tmp_path, [proxy.url], schedule={"steps": 8}, sampler={"max_staleness": 16})
        config = config.model_copy(update={"sampler": config.sampler.model_copy(update={"pause": "keep"})})
        run = recorded(config)
        # Streams are not spoiled: the late group is one plain answer.
        fleet: Any = run.trainer.source._ahead.fleet
        for server in fleet.servers:
            server.remote.stream = lambda asked, came, remote=server.remote: remote.complete(asked)
        run.trainer.run()
    late = [line for line in read_lines(tmp_path / "run" / "rejected.jsonl") if "too stale" in line["reason"]]
    assert late and len(late) % 4 == 0
    assert all(seen - label_versions(document).min() <= 16 for seen, documents in run.steps for document in documents)
    dropped = {line["id"] for line in late}
    trained = {rollout.id for rollout in run.taken}
    assert not dropped & trained
    assert {name.split("-")[0] for name in dropped} <= {name.split("-")[0] for name in trained}, "it had another chance"


def test_rewards_that_fail_cost_their_completion_alone(servers: Servers, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 20)
    sampler = {"reward": "server.rewards:difficult_reward", "reward_timeout": 1.0, "reward_workers": 2}
    run = recorded(server_config(tmp_path, [servers.first.url], sampler=sampler, schedule={"steps": 4}))
    run.trainer.run()
    assert len(run.taken) == 64
    reasons = " ".join(line["reason"] for line in read_lines(tmp_path / "run" / "rejected.jsonl"))
    assert "took longer than sampler.reward_timeout: 1 s" in reasons
    assert "ended its process (exit code 7)" in reasons
    assert "raised ValueError: no such answer" in reasons


def test_on_bad_record_stop_ends_the_run_at_the_first_reward_that_fails(servers: Servers, tmp_path: Path) -> None:
    config = server_config(
        tmp_path,
        [servers.first.url],
        sampler={"reward": "small_runs:failing_reward"},
        data={"on_bad_record": "stop"},
    )
    with pytest.raises(RewardError, match="data.on_bad_record: stop: a completion of prompt prompts.jsonl:"):
        recorded(config).trainer.run()


def test_both_ways_for_a_completion_to_end(servers: Servers, tmp_path: Path) -> None:
    run = recorded(server_config(tmp_path, [servers.first.url], schedule={"steps": 2}))
    run.trainer.run()
    for rollout in run.taken:
        tokens = completion(rollout)
        assert rollout.metadata["stopped"] == (tokens[-1] == 0)
        assert rollout.metadata["stopped"] or len(tokens) == 16
        assert 0 not in tokens[:-1]
    assert {rollout.metadata["stopped"] for rollout in run.taken} == {True, False}
