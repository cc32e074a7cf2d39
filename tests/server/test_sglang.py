"""SGLang's client: runs through a server that speaks as SGLang documents it, and replies that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from server.models import make_model
from server.runs import Recorder, label_versions, server_config
from server.sglang_server import FakeSglang, serving
from server.vllm_server import NAME
from small_runs import quiet_trainer, read_lines
from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError
from truestep.generate.generator import DrawOptions, Request
from truestep.generate.servers.sglang import Sglang, read_answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sglang") / "model", seed=2)


def ask(url: str, call: Callable[[Sglang], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        client = Sglang(url, NAME, None, 60.0)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(main())


def request(stops: frozenset[int] = frozenset({0})) -> Request:
    return Request((3, 4, 5), DrawOptions(0.8, 12, stops))


@pytest.mark.parametrize(("pause", "staleness"), [("wait", 0), ("keep", 32), ("abort", 32)])
def test_a_run_trains_on_what_it_samples(pause: str, staleness: int, model: Path, tmp_path: Path) -> None:
    fake = FakeSglang(model, NAME)
    options = {"protocol": "sglang", "pause": pause, "max_staleness": staleness}
    with serving(fake) as url:
        run = Recorder(quiet_trainer(server_config(tmp_path, [url], sampler=options)))
        run.trainer.run()
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 4
    assert run.worst_gap() < 1e-4, "every label, by the weights of the version that it names"
    modes = {body["mode"] for path, body in fake.asked if path == "/pause_generation"}
    assert modes == {"wait": set(), "keep": {"retract"}, "abort": {"abort"}}[pause]
    assert fake.paths.count("/update_weights_from_disk") == 5, "before the first step and after each"
    if staleness == 0:
        assert all((label_versions(one) == seen).all() for seen, documents in run.steps for one in documents)


def test_weights_that_were_not_loaded_are_found(model: Path, tmp_path: Path) -> None:
    fake = FakeSglang(model, NAME)
    fake.takes = "nothing"
    with serving(fake) as url, pytest.raises(ServerError, match="was given the weights of version 0"):
        quiet_trainer(server_config(tmp_path, [url], sampler={"protocol": "sglang"})).run()


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_counts_each_token_once(incremental: bool, model: Path) -> None:
    fake = FakeSglang(model, NAME)
    fake.incremental = incremental
    came: dict[int, list[int]] = {}

    def count(index: int, tokens: Sequence[int]) -> None:
        came[index] = [*came.get(index, []), *tokens]

    for n in (1, 3):
        came.clear()
        with serving(fake) as url:
            choices = ask(url, lambda client, n=n: client.stream(request(), n, count))
        assert [choice.token_ids for choice in choices] == [came[index] for index in range(n)]
        assert all(len(choice.token_ids) == len(choice.logprobs) for choice in choices)


def test_completions_end_at_the_trainers_stop_tokens(model: Path) -> None:
    with serving(FakeSglang(model, NAME)) as url:
        choices = ask(url, lambda client: client.complete(request(frozenset(range(0, 40, 2))), 8))
        assert any(choice.stopped for choice in choices)
        for choice in choices:
            assert choice.stopped == (choice.token_ids[-1] % 2 == 0)
            assert all(token % 2 for token in choice.token_ids[:-1])


def test_a_probe_is_the_models_own_distribution(model: Path) -> None:
    fake = FakeSglang(model, NAME)
    with serving(fake) as url:
        found = ask(url, lambda client: client.next_token((3, 4), 0.7, 5, past_the_cache=True))
    expected = fake._scores([3, 4], 0.7)
    assert set(found) == set(expected.topk(5).indices.tolist())
    assert all(abs(value - float(expected[token])) < 1e-6 for token, value in found.items())
    assert fake.asked[-1][1]["extra_key"], "a cache of its own"


def test_a_token_that_the_model_does_not_know_is_refused(model: Path) -> None:
    with serving(FakeSglang(model, NAME)) as url, pytest.raises(ServerError, match="greater than the vocab size"):
        ask(url, lambda client: client.next_token((10_000,), 1.0, 1))


def test_weights_that_are_not_there_are_refused(model: Path, tmp_path: Path) -> None:
    with serving(FakeSglang(model, NAME)) as url, pytest.raises(ServerError, match="could not load the weights in"):
        ask(url, lambda client: client.load(tmp_path / "absent"))


def test_completions_that_are_aborted_have_no_tokens(model: Path) -> None:
    fake = FakeSglang(model, NAME)

    async def abort(client: Sglang) -> Any:
        under_way = asyncio.create_task(client.complete(Request((3,), DrawOptions(0.8, 500, frozenset())), 2))
        while not fake._running:
            await asyncio.sleep(0.001)
        await client.pause("abort")
        choices = await under_way
        await client.resume()
        return choices

    with serving(fake) as url:
        choices = ask(url, abort)
    assert [choice.aborted for choice in choices] == [True, True] and not any(choice.token_ids for choice in choices)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "without meta_info"),
        ({"meta_info": {"finish_reason": None}}, "finish_reason is None"),
        ({"meta_info": {"finish_reason": {"type": "stop"}}}, "must obey return_logprob"),
        (
            {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1, 2]]}},
            "output_ids and the tokens",
        ),
    ],
)
def test_an_answer_that_must_not_become_a_document(answer: Any, said: str) -> None:
    with pytest.raises(BadAnswerError, match=said):
        read_answers([answer], 1)
    with pytest.raises(BadAnswerError, match="asked for 2 completions, got 1"):
        read_answers([answer], 2)


def test_a_server_that_is_gone() -> None:
    with pytest.raises(UnreachableError, match="/generate"):
        ask("http://127.0.0.1:9", lambda client: client.complete(request(), 3))


def test_numbers_are_those_of_torch(model: Path) -> None:
    """The double's own scores are a log-softmax, or it would prove nothing."""
    row = FakeSglang(model, NAME)._scores([1, 2], 0.8)
    assert torch.allclose(row.exp().sum(), torch.tensor(1.0))
