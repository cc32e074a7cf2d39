"""The engine as a service: requests at any time, from tasks, threads and rewards; streams, cancellations, errors."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from completing import Asked, How, decode
from generate.engine.test_engine import options, requests, same
from truestep.generate.engine import service
from truestep.generate.engine.phase import EngineSettings, Phase
from truestep.generate.engine.schedule import CacheError
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import Completion, Generate
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.rollouts.source import Interrupted

Model = Callable[[str], Path]
HOW = options(max_new_tokens=10, stop_ids=frozenset(range(3)))


@pytest.fixture(scope="module")
def policy(tiny_model: Model) -> Policy:
    return load_policy(tiny_model("gemma2"))


def alone(policy: Policy, asked: Asked, how: How = HOW) -> Completion:
    return decode(policy, [asked], how)[0]


def test_requests_at_any_time_draw_what_they_draw_alone(policy: Policy) -> None:
    asked = requests((3, 21, 1, 9, 12, 2, 5, 8))

    async def work(number: int, generate: Generate) -> Completion:
        await asyncio.sleep(0.003 * (number * 5 % 7))
        return await generate(asked[number].request(HOW))

    generator = EngineGenerator(policy)
    generator.weights(40)
    for mine, each in zip(generator.map(range(8), work), asked, strict=True):
        same(mine, alone(policy, each))
        assert mine.versions == [40] * len(mine.token_ids)


def test_seconds_in_which_all_episodes_wait_for_their_tools_are_counted(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those in which one of them draws, nor those of rewards after the last completion."""
    clock, drawing = 0.0, asyncio.Event()
    monkeypatch.setattr(service.time, "perf_counter", lambda: clock)
    asked, step = requests((3, 21)), Phase.step

    def counted_step(phase: Phase, *given: int) -> list[tuple[int, Completion]]:
        nonlocal clock
        clock += 1  # the engine's own time
        drawing.set()
        return step(phase, *given)

    monkeypatch.setattr(Phase, "step", counted_step)

    async def work(number: int, generate: Generate) -> None:
        nonlocal clock
        await generate(asked[0].request(HOW))
        if number:
            await generate(asked[1].request(HOW))
        else:
            drawing.clear()
            await drawing.wait()
            clock += 3  # its tool runs while the other one draws

    async def spend(seconds: float) -> None:
        nonlocal clock
        await asyncio.sleep(0.02)
        clock += seconds

    generator = EngineGenerator(policy)
    generator.map(range(2), work)
    assert generator.spent.idle == 0

    async def turns(number: int, generate: Generate) -> None:
        await generate(asked[number].request(HOW))
        await spend(7 if number else 5)
        await generate(asked[number].request(HOW))
        await spend(100)

    generator.spent = service.Spent()
    generator.map([1], turns)
    assert generator.spent.idle == 7
    assert generator.spent.rating == 100
    assert generator.spent.sampling > 7


def test_turns_compute_only_what_is_new(policy: Policy) -> None:
    """Of prompts and of drawn tokens. Every turn draws what the same request draws alone."""
    ends = options(max_new_tokens=24)

    async def talk(number: int, generate: Generate) -> list[tuple[Asked, Completion]]:
        (ids,) = (each.input_ids for each in requests((40,), seed=number))
        turns = []
        for turn in range(4):
            asked = Asked(ids, (number, turn))
            turns.append((asked, await generate(asked.request(ends))))
            ids = (*ids, *turns[-1][1].token_ids, 7, 8)
        return turns

    generator = EngineGenerator(policy, EngineSettings(rows=8, longest=40 + 4 * 26))
    for turns in generator.map(range(5), talk):
        for asked, completion in turns:
            same(completion, alone(policy, asked, ends))
    new = 5 * (40 + 3 * 26)
    assert generator.spent.prompt_tokens <= 1.1 * new
    assert generator.spent.cached_tokens > 5 * 3 * 40


def test_a_request_longer_than_the_session_begins_another(policy: Policy) -> None:
    short, long = requests((4,))[0], requests((90,))[0]

    async def work(asked: Asked, generate: Generate) -> list[Completion]:
        first = await generate(asked.request(HOW))
        return [first, await generate(long.request(HOW))]

    (both,) = EngineGenerator(policy).map([short], work)
    same(both[0], alone(policy, short))
    same(both[1], alone(policy, long))


def test_new_weights_leave_nothing_of_the_old_ones(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("qwen3"))
    prompt = requests((70,))[0]

    async def twice(_: int, generate: Generate) -> list[Completion]:
        return [await generate(prompt.request(HOW)) for _ in range(2)]

    generator = EngineGenerator(policy)
    before = generator.map([0], twice)[0]
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.1)
    generator.weights(1)
    after = generator.map([0], twice)[0]
    same(after[0], alone(policy, prompt))
    same(after[1], after[0])
    assert after[0].logprobs != before[0].logprobs


def test_tokens_are_streamed_in_order(policy: Policy) -> None:
    asked, came = requests((5, 9, 2)), {}

    async def work(number: int, generate: Generate) -> Completion:
        parts = came[number] = []
        return await generate(asked[number].request(options(max_new_tokens=9)), parts.append)

    for number, completion in enumerate(EngineGenerator(policy).map(range(3), work)):
        assert [token for part in came[number] for token in part] == completion.token_ids
        assert len(came[number]) > 3, "they come while it is drawn"


def test_a_cancelled_request_is_not_computed_on(policy: Policy) -> None:
    asked = requests((5, 9))
    endless, long = options(max_new_tokens=5000), options(max_new_tokens=200)

    async def work(_: int, generate: Generate) -> tuple[Completion, float]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(generate(asked[0].request(endless)), 0.05)
        drawn = progress.amounts()["tokens"]
        return await generate(asked[1].request(long)), drawn

    ((completion, drawn),) = EngineGenerator(policy).map([0], work)
    same(completion, alone(policy, asked[1], long))
    assert progress.amounts()["tokens"] - drawn < 2 * 200 + 50, "its own tokens, and those of the same request alone"


def test_an_error_of_the_work_is_raised_and_the_next_map_is_as_the_first(policy: Policy) -> None:
    asked = requests((5, 9))

    async def fail(number: int, generate: Generate) -> Completion:
        completion = await generate(asked[number].request(HOW))
        if number:
            raise ZeroDivisionError("planted")
        return completion

    generator = EngineGenerator(policy)
    with pytest.raises(ZeroDivisionError, match="planted"):
        generator.map(range(2), fail)
    assert torch.is_grad_enabled()
    same(decode(policy, asked[:1], HOW)[0], alone(policy, asked[0]))

    async def too_long(_: int, generate: Generate) -> Completion:
        return await generate(Asked((), (1,)).request(HOW))

    with pytest.raises(CacheError, match="no tokens"):
        generator.map([0], too_long)


def test_a_stop_ends_waiting_and_not_sampling(policy: Policy) -> None:
    done = []

    async def work(number: int, generate: Generate) -> None:
        done.append(await generate(requests((5,))[0].request(HOW)))
        await asyncio.sleep(60)

    with pytest.raises(Interrupted):
        EngineGenerator(policy).map(range(2), work, lambda: True)
    assert len(done) == 2


def test_other_threads_ask_now_or_for_the_next_time(policy: Policy) -> None:
    asked = requests((5, 9))
    generator = EngineGenerator(policy)
    before = generator.ask(asked[0].request(HOW))
    assert not before.done()

    async def work(_: int, generate: Generate) -> Completion:
        found: list[Completion] = []
        thread = threading.Thread(target=lambda: found.append(generator.ask(asked[1].request(HOW)).result(30)))
        thread.start()
        while not found:
            await asyncio.sleep(0.01)
        thread.join()
        return found[0]

    same(generator.map([0], work)[0], alone(policy, asked[1]))
    same(before.result(0), alone(policy, asked[0]))


def test_inside_a_running_event_loop(policy: Policy) -> None:
    """As in a notebook, whose main thread runs one."""

    async def main() -> Completion:
        return alone(policy, requests((5,))[0])

    same(asyncio.run(main()), alone(policy, requests((5,))[0]))
    assert torch.is_grad_enabled()


@pytest.mark.release
def test_thousands_of_phases_leave_nothing(policy: Policy) -> None:
    """Threads, descriptors and memory are as before, and new weights come between."""
    asked = requests((5, 9))
    generator = EngineGenerator(policy)
    how = options(max_new_tokens=2)

    async def work(each: Asked, generate: Generate) -> Completion:
        return await generate(each.request(how))

    def held() -> tuple[int, int, int]:
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") // 2**20

    for number in range(10_000):
        if number == 2000:
            before = held()
        if number % 10 == 0:
            with torch.no_grad():
                policy.head_weight.add_(0)
            generator.weights(number)
        generator.map(asked, work)
    after = held()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 8
