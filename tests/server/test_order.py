"""Documents are taken in the order in which they were begun, whatever their durations. On a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.fake import FakeServer
from server.sources import GROUP, STEP, FakeWeights, Run
from truestep.environments.episodes.environment import End
from truestep.environments.episodes.service import Begun, Said
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.environment import EnvironmentPlay
from truestep.generate.generator import Completion, Generate, Request
from truestep.generate.play import Episode, EpisodeLimits, Played, sequence_of

SLOW = 30.0


@dataclass
class Scripted:
    """Plays episodes of one turn. What becomes of a group, and how long each episode takes, is known before."""

    seed: int
    begun: list[int] = field(default_factory=list)  # groups
    ended: list[int] = field(default_factory=list)  # groups, as their episodes end

    def fate(self, group: int) -> str:
        """Whether the group is trained on, has equal rewards, or can never be completed."""
        return random.Random(f"{self.seed} {group}").choices(["good", "equal", "hopeless"], [6, 3, 1])[0]

    def seconds(self, group: int, number: int) -> float:
        draw = random.Random(f"{self.seed} {group} {number}")
        return draw.choice([0.0, draw.random(), 5 * draw.random(), SLOW])

    def rating(self, group: int, number: int) -> Rating | RewardError:
        fate = self.fate(group)
        return RewardError(fate) if fate == "hopeless" else Rating(1.0 if fate == "equal" else float(number))

    async def play(self, episode: Episode, generate: Generate) -> Played:
        group, number = episode.seed[2:]
        self.begun.append(group)
        request = Request(episode.prompt.input_ids, episode.draw)
        completion = await generate(request)
        await asyncio.sleep(self.seconds(group, number))
        self.ended.append(group)
        sequences = (sequence_of(request.token_ids, completion),)
        rating = self.rating(group, number)
        return Played(sequences, (completion,), "", rating, not completion.stopped)

    def close(self) -> None: ...


def steps_of_a_queue(script: Scripted, limit: int) -> Iterator[tuple[list[int], list[int]]]:
    """The oracle: for each step, the groups trained on and those put aside. Groups come one after another, each begun
    at once and waited for."""
    numbers = count()
    while True:
        trained, aside = list[int](), list[int]()
        while len(trained) < STEP // GROUP:
            number = next(numbers)
            if script.fate(number) == "equal" and len(aside) < limit:
                aside.append(number)
            elif script.fate(number) != "hopeless":
                trained.append(number)
        yield trained, aside


def groups_of(documents: Any) -> list[int]:
    return list(dict.fromkeys(int(str(document.group_id)) for document in documents))


def runs_like_a_queue(
    seed: int,
    ahead: int,
    concurrency: int,
    limit: int,
    pause: str,
    busy: float,
    killed_after: list[tuple[int, float]],
    crashes: list[float],
) -> None:
    """Whatever groups are slow, given up or replaced, when servers lose what they made, and when the run is killed."""
    server, weights, script = FakeServer(timeout=1000.0), FakeWeights(), Scripted(seed)
    found: list[tuple[list[int], list[int]]] = []
    state, seen, num_steps = None, 0, 0
    for steps, later in [*killed_after, (3, 0.0)]:
        run = Run(
            [server],
            pause=pause,
            max_staleness=ahead * STEP,
            concurrency=concurrency,
            stall_timeout=100_000.0,
            busy=busy,
            weights=weights,
            replace_limit=limit,
            plays=script,
        )
        if state is not None:
            run.source.restore(state)
        run.seen = seen

        async def crash() -> None:
            for seconds in crashes:
                await asyncio.sleep(seconds)
                await server.crash_and_restart()

        trouble = run.thread.submit(crash())
        for _ in range(steps):
            trained = groups_of(run.step())
            found.append((trained, groups_of(run.put_aside())))
        if steps:  # else it is killed with the checkpoint that it went on from
            state, seen = run.snapshot(), run.seen
        run.thread.advance(later)  # what is made until the kill is lost with it
        trouble.cancel()
        run.close(finished=False)
        if not server.up:
            server.restart()
        num_steps += steps
    assert found == list(islice(steps_of_a_queue(script, limit), num_steps))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("limit", [0, 1, 100])
def test_steps_are_those_of_a_queue(ahead: int, limit: int) -> None:
    runs_like_a_queue(ahead + limit, ahead, 4, limit, "wait", 3.0, [(2, 10.0)], [5.0, 20.0])


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    ahead=st.sampled_from([0, 1, 2, 5]),
    concurrency=st.integers(1, 9),
    limit=st.sampled_from([0, 1, 2, 100]),
    pause=st.sampled_from(["wait", "keep", "abort"]),
    busy=st.sampled_from([0.0, 3.0, 20.0]),
    killed_after=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 40)), max_size=2),
    crashes=st.lists(st.floats(1, 60), max_size=2),
)
def test_steps_are_those_of_a_queue_in_many_runs(**run: Any) -> None:
    runs_like_a_queue(**run)


def test_a_slow_group_is_waited_for_and_others_are_made_meanwhile() -> None:
    script = Scripted(0)
    script.fate = lambda group: "good"  # type: ignore[method-assign]
    script.seconds = lambda group, number: SLOW if group == 2 else 1.0  # type: ignore[method-assign]
    run = Run([FakeServer()], max_staleness=2 * STEP, concurrency=2, plays=script).run(1)
    start = run.thread.loop.now
    run.step()
    assert run.thread.loop.now - start > SLOW - 5
    assert run.group_numbers == [[0, 1], [2, 3]]
    # The step that waited is the second: the two after it were permitted, and with two groups at once they were made.
    last = script.ended.index(2)
    assert set(script.ended[:last]) == {0, 1, 3, 4, 5, 6, 7}
    run.close()


def test_an_episode_that_failed_is_played_anew_beside_those_under_way() -> None:
    class Failing(Scripted):
        def rating(self, group: int, number: int) -> Rating | RewardError:
            return RewardError("it failed") if number == 1 else Rating(float(number))

    script = Failing(0)
    script.seconds = lambda group, number: 1.0 if number == 1 else SLOW  # type: ignore[method-assign]
    run = Run([FakeServer()], plays=script).run(1)
    assert run.thread.loop.now < 2 * SLOW, "one after the other they would take longer"
    assert [document.id for document in run.steps[0]] == ["0-0", "0-2", "1-0", "1-2"]
    assert {record.id for record in run.rejected()} == {"0-1", "1-1"}
    run.close()


# ---- lengths

GROUP_SIZE, DOCS_PER_STEP = 8, 256


class Slow(FakeServer):
    """Draws as many tokens as it may, with one pause in proportion to them."""

    async def _sample(self, asked: Request, n: int, came: Any) -> list[Completion]:
        most = asked.options.max_new_tokens
        numbers = [self.clock.tick() for _ in range(n)]
        self.running += n
        await asyncio.sleep(0.1 * most)
        self.running -= n
        self._changed.set()
        for number in numbers:
            self.sampled[number] = SimpleNamespace(ended=self.clock.tick())  # type: ignore[assignment]
        logprob = -(1 + self.weights) / 16384
        return [
            Completion([10 + number // 900, 10 + number % 900, *[5] * (most - 2)], [logprob] * most, stopped=False)
            for number in numbers
        ]


def drawn_length(group: int, number: int) -> int:
    """A few are fifty times as long as most."""
    return min(400, 2 + int(random.Random(f"{group} {number}").lognormvariate(2.0, 1.2)))


@dataclass
class Lengths:
    """Plays episodes of one turn, whose lengths are known when they begin."""

    begun: dict[str, int] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # groups

    async def play(self, episode: Episode, generate: Generate) -> Played:
        group, number = episode.seed[2:]
        length = self.begun[str(episode.name)] = drawn_length(group, number)
        request = Request(episode.prompt.input_ids, replace(episode.draw, max_new_tokens=length), session=episode.name)
        completion = await generate(request)
        self.ended.append(group)
        sequences = (sequence_of(request.token_ids, completion),)
        return Played(sequences, (completion,), "", Rating(float(number)), truncated=False)

    def close(self) -> None: ...


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("steps", [3, pytest.param(40, marks=pytest.mark.long)])
def test_the_lengths_trained_on_are_the_lengths_begun(steps: int, ahead: int) -> None:
    plays = Lengths()
    run = Run(
        [Slow("a"), Slow("b")],
        max_staleness=ahead * DOCS_PER_STEP,
        group_size=GROUP_SIZE,
        docs_per_step=DOCS_PER_STEP,
        max_new_tokens=400,
        plays=plays,
        concurrency=64,
    )
    run.run(steps)
    trained = {document.id: document.num_labels for step in run.steps for document in step}
    assert len(trained) == steps * DOCS_PER_STEP  # the long one: 10,240 episodes
    left_open = set(run.source.state()["open"])
    closed = {name: length for name, length in plays.begun.items() if int(name.split("-")[0]) not in left_open}
    assert trained == closed
    assert len(left_open) <= (ahead + 1) * DOCS_PER_STEP // GROUP_SIZE
    assert [number for step in run.group_numbers for number in step] == list(range(steps * DOCS_PER_STEP // GROUP_SIZE))
    if ahead:  # what came first, by itself, would be shorter
        first = list(dict.fromkeys(plays.ended))
        overtaken = sum(number < max(first[: place + 1]) for place, number in enumerate(first))
        assert overtaken > len(first) / 4
    run.close()


# ---- episodes of several turns, cut by time


class Delays:
    """In the place of an `EpisodeService`: environments in memory, whose steps take time and of which some hang."""

    def __init__(self) -> None:
        self.cut_at: Counter[str] = Counter()

    def begin(self, row: Any, seed: str, name: str | None = None) -> Any:
        draw = random.Random(seed)
        handle = SimpleNamespace(
            turns=0, tool_seconds={}, most=draw.choice([1, 1, 2, 4, 8, 16]), hangs=draw.random() < 0.1
        )
        return _after(0.1, Begun(handle, Said(tokens=[3, 4])))  # type: ignore[arg-type]

    def step(self, handle: Any, answer: Any) -> Any:
        handle.turns += 1
        if handle.hangs and handle.turns == handle.most:
            return _after(1000.0, None)
        return _after(2.0, End(Rating(1.0)) if handle.turns == handle.most else Said(tokens=[7]))

    def cut(self, handle: Any, reason: str) -> Any:
        self.cut_at[reason] += 1
        return _after(0.0, Rating(0.25))

    def tools(self) -> dict[str, Any]:
        return {}

    def close(self, handle: Any) -> None: ...

    def close_all(self) -> None: ...


def _after(seconds: float, value: Any) -> Any:
    from concurrent.futures import Future

    future: Future[Any] = Future()

    def settle() -> None:
        if future.cancelled():
            return
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    asyncio.get_running_loop().call_later(seconds, settle)
    return future


class Words:
    """A tokenizer of numbers."""

    chat_template, all_special_ids, all_special_tokens = None, (), ()
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __len__(self) -> int:
        return 1000

    def decode(self, ids: Any, **options: Any) -> str:
        return " ".join(map(str, ids))


class Noted(EnvironmentPlay):
    """Notes which episodes were begun."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.begun: dict[str, str] = {}

    async def play(self, episode: Episode, generate: Generate) -> Played:
        self.begun[str(episode.name)] = episode.reward_seed
        return await super().play(episode, generate)


@pytest.mark.parametrize("ahead", [0, 2])
def test_episodes_that_are_cut_by_time_are_trained_on_with_the_lengths_that_they_have(ahead: int) -> None:
    limit = EpisodeLimits(turns=100, tokens=1000, seconds=20.0)
    plays = Noted(Delays(), Words(), limit)
    run = Run(
        [FakeServer("a"), FakeServer("b")],
        max_staleness=ahead * STEP,
        plays=plays,
        pause="keep",  # several turns may be of several weights
        max_new_tokens=20,
        stall_timeout=100.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_check_probed", lambda *_: None)  # it takes a document for one completion
        run.run(50)
    documents = {document.id: document for step in run.steps for document in step}
    left_open = set(run.source.state()["open"])
    assert set(documents) == {name for name in plays.begun if int(name.split("-")[0]) not in left_open}
    assert not run.rejected()
    cut = 0
    for name, document in documents.items():
        draw = random.Random(plays.begun[name])
        most, hangs = draw.choice([1, 1, 2, 4, 8, 16]), draw.random() < 0.1
        turns = document.metadata["num_turns"]
        assert turns == sum(turn.role == "assistant" for turn in document.turns) <= most
        if document.metadata["ended_by"] == "environment":
            assert not document.truncated and not hangs and turns == most and document.reward == 1.0
        else:
            assert document.metadata["ended_by"] == "episode_timeout" and document.truncated
            assert hangs or most >= 8
            cut += 1
    assert cut > len(documents) / 8
    run.close()
