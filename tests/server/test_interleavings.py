"""Random schedules of answers, failures, restarts and new weights: what is trained on holds whatever happens.

`Run.check` looks at every document; each run must also come to its end.
"""

from __future__ import annotations

import asyncio
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.fake import STARTED_WITH, Clock, FakeRewards, FakeServer
from server.sources import GROUP, STEP, FakeWeights, Run
from truestep.generate.errors import BadAnswerError, UnreachableError
from truestep.generate.generator import Completion

_MOST = 30  # troubles in the life of a trainer; servers that are never well would train nothing


class Trouble:
    """What befalls servers, at random times. A server that scores otherwise than the trainer is another matter."""

    def __init__(self, servers: list[FakeServer], seed: int, often: float):
        self._servers, self._draw, self._often = servers, random.Random(seed), often
        self.happened: list[str] = []

    async def happen(self) -> None:
        kinds = (self.crash, self.leave, self.swap, self.refuse, self.hang, self.lie, self.abort, self.stand_still)
        for _ in range(_MOST):
            await asyncio.sleep(self._draw.expovariate(1 / self._often))
            server, kind = self._draw.choice(self._servers), self._draw.choice(kinds)
            if server.up:
                self.happened.append(kind.__name__)
                await kind(server)

    async def crash(self, server: FakeServer) -> None:
        await server.crash_and_restart(self._draw.choice((0.5, 2.0, 9.0)))

    async def leave(self, server: FakeServer) -> None:
        """Out of reach for a while, and the same as before when it is back."""
        server.up = False
        await asyncio.sleep(self._draw.choice((0.1, 3.0, 40.0)))
        server.up = True

    async def swap(self, server: FakeServer) -> None:
        """Somebody loads other weights between two requests of ours."""
        if not server.running and server.calls[-1:] in (["complete"], ["stream"]):
            server.weights = STARTED_WITH

    async def refuse(self, server: FakeServer) -> None:
        name = self._draw.choice(("complete", "stream", "pause", "load", "resume", "next_token", "describe"))
        server.faults[name] += [UnreachableError("busy")] * self._draw.randint(1, 3)

    async def hang(self, server: FakeServer) -> None:
        server.faults[self._draw.choice(("complete", "stream", "load", "next_token"))].append(server.hang)

    async def lie(self, server: FakeServer) -> None:
        server.faults[self._draw.choice(("complete", "stream", "next_token"))].append(BadAnswerError("nonsense"))

    async def abort(self, server: FakeServer) -> None:
        aborted = Completion([], [], stopped=False, aborted=True)
        spoil, server.spoil = server.spoil, lambda choices: [aborted, *choices[1:]]
        await asyncio.sleep(0.5)
        server.spoil = spoil

    async def stand_still(self, server: FakeServer) -> None:
        server.faults["complete"].append(lambda: asyncio.sleep(self._draw.random() * 30))
        server.faults["stream"].append(lambda: asyncio.sleep(self._draw.random() * 30))


def rewards(seed: int) -> FakeRewards:
    draw = random.Random(seed)
    return FakeRewards(lambda text: "no such answer" if draw.random() < 0.03 else None)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    servers=st.integers(1, 3),
    pause=st.sampled_from(["wait", "keep", "abort"]),
    ahead=st.sampled_from([0, 1, 2, 5]),
    concurrency=st.integers(1, 8),
    often=st.sampled_from([0.5, 3.0, 20.0]),
    busy=st.sampled_from([0.0, 1.0, 15.0]),
    stop_after=st.integers(1, 6),
)
# A server that was found to be another and has the right weights again while its last answer is still being rated.
@example(seed=5, servers=1, pause="wait", ahead=2, concurrency=1, often=3.0, busy=15.0, stop_after=5)
def test_whatever_happens_what_is_trained_on_holds(
    seed: int, servers: int, pause: str, ahead: int, concurrency: int, often: float, busy: float, stop_after: int
) -> None:
    clock, weights = Clock(), FakeWeights()
    fleet = [FakeServer(f"s{number}", clock=clock, seed=seed, timeout=20.0) for number in range(servers)]
    trouble = Trouble(fleet, seed, often)

    def life(steps: int) -> Run:
        """One process of the trainer, from its start to its end."""
        return Run(
            fleet,
            pause=pause,
            max_staleness=ahead * STEP,
            concurrency=concurrency,
            stall_timeout=100_000.0,
            rewards=rewards(seed),
            busy=busy,
            weights=weights,
        )

    first = life(stop_after)
    troubled = first.thread.submit(trouble.happen())
    first.run(stop_after)
    state = first.source.state()
    troubled.cancel()
    first.close(finished=False)
    for server in fleet:  # between two processes of the trainer all servers are well, or the second would not start
        server.faults.clear()
        server.spoil = lambda choices: choices
        server.restart()

    second = life(4)
    second.source.restore(state)
    second.seen = first.seen
    troubled = second.thread.submit(trouble.happen())
    second.run(4)
    left_open = set(second.source.state()["open"])
    troubled.cancel()
    second.close()

    names = [document.id for step in first.steps + second.steps for document in step]
    groups = [number for numbers in first.group_numbers + second.group_numbers for number in numbers]
    assert len(set(groups)) == len(groups) == len(names) / GROUP, "each group once, over both processes"
    rejected = {int(str(record.group_id)) for run in (first, second) for record in run.rejected()}
    assert set(range(max(groups))) - set(groups) - rejected <= left_open
    if ahead == 0:
        for numbers in first.group_numbers + second.group_numbers:
            assert numbers == sorted(numbers)
            assert set(range(numbers[0], numbers[-1])) <= {*numbers, *rejected}, "the next ones, and no others"
