"""What is written for servers, what is probed, and the threads beside the trainer: each alone."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from server.fake import FakeServer, expected, make_prompts
from server.virtual import run
from truestep.environments.process import WorkerOptions
from truestep.environments.rater import Rater
from truestep.environments.rewards import RewardError
from truestep.generate.errors import BadAnswerError
from truestep.generate.generator import Completion, DrawOptions, Request
from truestep.generate.play import Episode, SingleTurn
from truestep.generate.servers.probe import expect, make_probes, measure
from truestep.generate.servers.servers import LoopThread
from truestep.generate.servers.weight_files import WeightsDirectory
from truestep.model.loading.load import load_policy

Models = Callable[[str], Path]


def test_the_newest_weights_and_those_before_stay(tiny_model: Models, tmp_path: Path) -> None:
    policy, shared = load_policy(tiny_model("llama")), tmp_path / "shared"
    directory = WeightsDirectory(shared)
    written: list[Path] = []
    leftover = shared / f".{directory.write(policy, 2, torch.float32).name}.partial"
    next(shared.glob("truestep-*")).rename(leftover)  # as a kill leaves it
    for version in (8, 16, 4):  # the last after a start that went back
        written.append(directory.write(policy, version, torch.float32))
        os.utime(written[-1], ns=(len(written), len(written)))
    assert set(shared.iterdir()) == set(written[1:])
    assert len({path.name for path in written}) == 3 and written[2].is_absolute()
    directory.clear()
    assert not shared.exists()


def test_what_others_put_beside_weights_stays(tiny_model: Models, tmp_path: Path) -> None:
    directory = WeightsDirectory(tmp_path / "shared")
    directory.write(load_policy(tiny_model("llama")), 0, torch.float32)
    (tmp_path / "shared" / "notes.txt").write_text("mine")
    directory.clear()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["notes.txt"]


def test_runs_that_share_a_directory_leave_one_another_s_weights(tiny_model: Models, tmp_path: Path) -> None:
    policy, shared = load_policy(tiny_model("llama")), tmp_path / "shared"
    first, second = (WeightsDirectory(shared, run=tmp_path / run) for run in ("a", "b"))
    kept = [first.write(policy, version, torch.float32) for version in (8, 16)]
    for version in (8, 16, 24, 32):
        others = second.write(policy, version, torch.float32)
    assert all((path / "config.json").is_file() for path in kept), "a server may ask for either"
    second.clear()
    assert all((path / "config.json").is_file() for path in kept) and not others.exists()
    first.clear()
    assert not shared.exists()


def test_a_tied_head_has_a_file_of_its_own(tiny_model: Models, tmp_path: Path) -> None:
    policy = load_policy(tiny_model("qwen3_tied"))
    path = WeightsDirectory(tmp_path).write(policy, 0, torch.bfloat16)
    head = load_file(path / "model-lm-head.safetensors")["lm_head.weight"]
    assert head.dtype == torch.bfloat16 and torch.equal(head, policy.head_weight.detach().bfloat16())
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["lm_head.weight"] == "model-lm-head.safetensors"


def test_probes_are_scored_by_the_policy(tiny_model: Models) -> None:
    policy = load_policy(tiny_model("llama"))
    probes = make_probes(make_prompts(), 0, 150)
    assert [len(probe) for probe in probes] == [136, 150, 150]
    known = expect(policy, probes, 8)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
        logits = model(torch.tensor([probes[1]])).logits[0, -1]
    np.testing.assert_allclose(known.logprobs[1], (logits / 0.7).log_softmax(-1), atol=1e-5)
    np.testing.assert_allclose(known.raw[1], logits.log_softmax(-1), atol=1e-5)


@pytest.mark.parametrize("answer", [{}, {1000: -1.0}, {-1: -1.0}, {3: float("nan")}])
def test_a_probe_that_is_answered_with_nonsense_shows_nothing(answer: dict[int, float]) -> None:
    class Nonsense(FakeServer):
        async def next_token(self, *asked: Any, **options: Any) -> dict[int, float]:
            return answer

    with pytest.raises(BadAnswerError, match="log-probs that are NaN, or of tokens that do not exist"):
        run(measure(Nonsense(), expected(0, 0)))


def test_rewards_are_waited_for_beside_the_loop() -> None:
    loop = LoopThread()
    rater = Rater(WorkerOptions("server.rewards:word_reward", 60.0, 2**30), 1)
    plays = SingleTurn(rater, lambda ids: " ".join("ab"[number] for number in ids))

    async def name() -> str:
        return threading.current_thread().name

    prompt, draw = make_prompts()[0], DrawOptions(1.0, 2, frozenset())

    async def complete(request: Request, on_tokens: Any = None) -> Completion:
        return Completion(list(request.seed), [0.0, 0.0], stopped=True)

    async def both() -> list[float]:
        episodes = [Episode(prompt, draw, seed) for seed in ((0, 1), (0, 0))]
        played = await asyncio.gather(*(plays.play(episode, complete) for episode in episodes))
        return [float(each.rating) for each in played if not isinstance(each.rating, RewardError)]

    try:
        assert loop.run(name()) == "sampler" and loop.run(both()) == [0.2, 0.1]
    finally:
        loop.close()
        rater.close()
