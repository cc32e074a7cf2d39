"""Requests of a fleet, one at a time: which are sent as one, who is told what, and what ends when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from server.fake import STARTED_WITH, VOCABULARY, Clock, FakeServer, asked, published
from server.sources import Run
from server.test_fleet import Watched
from server.virtual import run
from truestep.generate import sticky
from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError, VoidedError, WeightsError
from truestep.generate.generator import Completion, Generate, run_all
from truestep.generate.groups import TRIES
from truestep.generate.servers.confirmed import confirmed_results
from truestep.rollouts.source import Interrupted


async def opened(*servers: FakeServer, **options: Any) -> Watched:
    watched = Watched(*servers, **options)
    await watched.fleet.publish(published(0))
    return watched


def sent(*servers: FakeServer) -> int:
    return sum(server.calls.count("complete") + server.calls.count("stream") for server in servers)


def in_flight(watched: Watched) -> int:
    return sum(known.in_flight for known in watched.known)


def left(watched: Watched) -> int:
    """What the fleet still holds of requests."""
    batches = watched.fleet._batches
    return len(batches._unsent) + sum(not task.done() for task in batches._tasks) + in_flight(watched)


# ---- what is sent as one


def test_equal_requests_that_are_made_at_once_are_one() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        completions = await run_all([watched.fleet.generate(replace(asked(), seed=(0, n))) for n in range(5)])
        assert sent(server) == 1 and len({tuple(one.token_ids[:2]) for one in completions}) == 5
        assert {one.server for one in completions} == {"a"} and len({id(one.answer) for one in completions}) == 1
        await watched.fleet.generate(asked())
        await watched.fleet.generate(asked())
        assert sent(server) == 3 and not left(watched)

    run(main())


def test_requests_that_differ_are_sent_alone() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        others = (
            asked((3, 4)),
            asked((3, 5)),
            asked((3, 4), temperature=0.5),
            asked((3, 4), most=5),
            asked((3, 4), stops=(0, 1)),
            asked((3, 4), session="s"),
        )
        await run_all([watched.fleet.generate(request) for request in others])
        assert sent(server) == len(others)

    run(main())


@pytest.mark.parametrize("streamed", [False, True], ids=["greedy", "streamed"])
def test_greedy_and_streamed_requests_are_sent_alone(streamed: bool) -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        counts: list[int] = []
        sample = server._sample

        async def counted(request: Any, n: int, came: Any) -> Any:
            counts.append(n)
            return await sample(request, n, came)

        server._sample = counted  # type: ignore[method-assign]
        request, heard = asked(temperature=1.0 if streamed else 0.0), (lambda tokens: None) if streamed else None
        await run_all([watched.fleet.generate(request, heard) for _ in range(3)])
        assert counts == [1, 1, 1]

    run(main())


@pytest.mark.parametrize("error", [UnreachableError("cut"), BadAnswerError("nonsense"), ServerError("never")])
def test_all_who_wait_for_an_answer_get_its_error(error: Exception) -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        server.faults["complete"].append(error)
        results = await asyncio.gather(*(watched.fleet.generate(asked()) for _ in range(3)), return_exceptions=True)
        assert results == [error] * 3 and not left(watched)

    run(main())


def test_new_weights_in_the_middle_of_an_answer_void_it_for_all() -> None:
    async def main() -> None:
        watched = await opened(FakeServer(), pause="abort")
        waiting = [watched.later(watched.fleet.generate(asked())) for _ in range(3)]
        await asyncio.sleep(0.15)
        await watched.fleet.publish(published(8))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [VoidedError] * 3

    run(main())


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"stop": ("end",)}])
def test_what_servers_are_not_told_is_refused(options: dict[str, Any]) -> None:
    async def main() -> None:
        watched = await opened(FakeServer())
        request = asked()
        with pytest.raises(ServerError, match="sample with a temperature only"):
            await watched.fleet.generate(replace(request, options=replace(request.options, **options)))

    run(main())


# ---- who waits no longer


def test_a_request_ends_when_the_last_who_waits_for_it_is_cancelled() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        first, second = (watched.later(watched.fleet.generate(asked())) for _ in range(2))
        await asyncio.sleep(0.15)
        first.cancel()
        await asyncio.sleep(0.01)
        assert server.running == 1 and in_flight(watched) == 2
        second.cancel()
        await asyncio.sleep(0.01)
        assert server.running == 0 and not left(watched)
        assert first.cancelled() and second.cancelled()

    run(main())


def test_one_that_is_cancelled_leaves_the_others_their_completions() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        tasks = [watched.later(watched.fleet.generate(asked())) for _ in range(3)]
        await asyncio.sleep(0.15)
        tasks[1].cancel()
        first, last = await tasks[0], await tasks[2]
        assert first.token_ids[:2] != last.token_ids[:2] and sent(server) == 1

    run(main())


def test_one_that_is_cancelled_before_it_is_sent_is_not_asked_for() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        tasks = [watched.later(watched.fleet.generate(asked())) for _ in range(2)]
        asyncio.get_running_loop().call_soon(tasks[0].cancel)  # behind the first turn of both, before they are sent
        await tasks[1]
        assert watched.known[0].served == 1
        alone = watched.later(watched.fleet.generate(asked()))
        asyncio.get_running_loop().call_soon(alone.cancel)
        await asyncio.sleep(1)
        assert alone.cancelled() and watched.known[0].served == 1 and not left(watched)

    run(main())


def test_one_that_waits_for_an_open_server_can_be_cancelled() -> None:
    async def main() -> None:
        watched = Watched(FakeServer())
        request = watched.later(watched.fleet.generate(asked()))
        await asyncio.sleep(10)
        request.cancel()
        await asyncio.sleep(0.01)
        assert not left(watched) and len(asyncio.all_tasks()) == 1

    run(main())


def test_a_fleet_that_closes_ends_its_requests() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        waiting = [watched.later(watched.fleet.generate(asked((3, number)))) for number in range(3)]
        await asyncio.sleep(0.15)
        assert server.running == 3
        await watched.fleet.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 3
        assert server.running == 0 and server.closed and len(asyncio.all_tasks()) == 1 and not left(watched)

    run(main())


# ---- streams


@pytest.mark.parametrize("pause", ["wait", "keep", "abort"])
def test_a_stream_gives_its_tokens_in_their_order(pause: str) -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server, pause=pause)
        heard: list[int] = []
        times: list[float] = []

        def hear(tokens: Sequence[int]) -> None:
            heard.extend(tokens)
            times.append(asyncio.get_running_loop().time())

        completion = await watched.fleet.generate(asked(), hear)
        assert heard == completion.token_ids and len(set(times)) == len(heard) > 1
        assert server.calls.count("stream") == 1 and not server.calls.count("complete")

    run(main())


def test_an_error_of_the_listener_is_the_callers_and_not_the_servers() -> None:
    class Typed(FakeServer):
        async def stream(self, request: Any, n: int, came: Any) -> list[Completion]:
            try:
                return await super().stream(request, n, came)
            except TypeError as error:  # as the client does that reads an event
                raise BadAnswerError("an event of the stream is not in its format") from error

    def fails(tokens: Sequence[int]) -> None:
        raise TypeError("my own")

    async def main() -> None:
        watched = await opened(Typed())
        with pytest.raises(TypeError, match="my own"):
            await watched.fleet.generate(asked(), fails)
        assert watched.known[0].is_open and not left(watched)

    run(main())


def test_a_listener_hears_no_token_that_does_not_exist() -> None:
    class Odd(FakeServer):
        async def stream(self, request: Any, n: int, came: Any) -> list[Completion]:
            came(0, [VOCABULARY])
            raise AssertionError("it went on")

    async def main() -> None:
        watched = await opened(Odd())
        heard: list[int] = []
        with pytest.raises(BadAnswerError, match="token id 1000 is not in the vocabulary of 1000"):
            await watched.fleet.generate(asked(), heard.extend)
        assert not heard

    run(main())


# ---- sessions


def test_a_session_stays_at_its_server_and_moves_when_that_is_lost() -> None:
    async def main() -> None:
        clock = Clock()
        servers = [FakeServer(name, clock=clock) for name in "abc"]
        watched = await opened(*servers)
        turns: dict[str, list[str | None]] = {"x": [], "y": []}
        for turn in range(6):
            for name, urls in turns.items():
                await watched.fleet.generate(asked((3, turn + 5)))  # others, so that the least busy one changes
                urls.append((await watched.fleet.generate(asked((3, turn + 4), session=name))).server)
        assert all(len(set(urls)) == 1 for urls in turns.values())
        (home,) = (known for known in watched.known if known.url == turns["x"][0])
        home.remote.crash()  # type: ignore[attr-defined]
        with pytest.raises(UnreachableError):
            await watched.fleet.generate(asked(session="x"))
        moved = {(await watched.fleet.generate(asked(session="x"))).server for _ in range(3)}
        assert len(moved) == 1 and moved != {home.url}
        home.remote.restart()  # type: ignore[attr-defined]
        await watched.opened(watched.known.index(home))
        assert {(await watched.fleet.generate(asked(session="x"))).server for _ in range(3)} == moved, "it stays there"
        await watched.fleet.close()

    run(main())


def test_a_session_without_letters_is_one_too_and_no_session_is_none() -> None:
    async def main() -> None:
        servers = [FakeServer(name, longest=2) for name in "ab"]
        watched = await opened(*servers)
        home = {(await watched.fleet.generate(asked(session=""))).server for _ in range(3)}
        free = {(await watched.fleet.generate(asked((3, number)))).server for number in range(4, 10)}
        assert len(home) == 1 and free == {"a", "b"}

    run(main())


def test_so_many_sessions_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sticky, "_MOST", 10)

    async def main() -> None:
        watched = await opened(FakeServer())
        for number in range(40):
            await watched.fleet.generate(asked(session=f"s{number}"))
            await watched.fleet.generate(asked(session="s0"))  # the one that goes on is not the oldest
        assert len(watched.fleet._sessions) == 10 and "s0" in watched.fleet._sessions
        assert not left(watched)

    run(main())


# ---- work with confirmed answers

Work = Callable[[int, Generate], Coroutine[Any, Any, Any]]


def worked(watched: Watched, items: int, work: Work, places: int = 8) -> Coroutine[Any, Any, list[Any]]:
    return confirmed_results(watched.fleet, range(items), work, asyncio.Semaphore(places))


def test_work_whose_answers_became_void_is_done_again_and_no_other() -> None:
    async def main() -> None:
        clock = Clock()
        good, swapped = FakeServer("good", clock=clock), FakeServer("swapped", clock=clock)
        watched = await opened(good, swapped)
        done: list[tuple[int, str | None]] = []

        async def work(item: int, generate: Generate) -> Completion:
            completion = await generate(asked((3, item)))
            assert completion.answer is None
            done.append((item, completion.server))
            if completion.server == "swapped" and swapped.calls.count("load") == 1:
                swapped.weights = STARTED_WITH  # it was restarted, without a word
            return completion

        results = await worked(watched, 6, work)
        again = {item for item, server in done[:6] if server == "swapped"}
        assert len(again) == 3 and sorted(item for item, _ in done[6:]) == sorted(again)
        assert {round(-value * 16384) - 1 for one in results for value in one.logprobs} == {0}
        assert not left(watched)
        await watched.fleet.close()

    run(main())


def test_several_turns_of_one_work_are_redone_together() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        turns: list[int] = []

        async def work(item: int, generate: Generate) -> list[int]:
            ids = [3]
            for turn in range(3):
                ids += (await generate(asked(ids, session=f"{item}"))).token_ids
                turns.append(turn)
                if len(turns) == 2:
                    server.weights = STARTED_WITH
            return ids

        (ids,) = await worked(watched, 1, work)
        assert turns == [0, 1, 2, 0, 1, 2] and len(ids) > 6
        await watched.fleet.close()

    run(main())


def test_work_asks_again_where_a_server_is_lost_aborts_or_answers_badly() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        server.faults["complete"] += [UnreachableError("cut"), BadAnswerError("nonsense")]
        aborted, times = Completion([], [], stopped=False, aborted=True), [1]

        def abort_once(choices: list[Completion]) -> list[Completion]:
            return [aborted] if times and times.pop() else choices

        server.spoil = abort_once

        async def work(item: int, generate: Generate) -> Completion:
            return await generate(asked())

        (completion,) = await worked(watched, 1, work)
        assert completion.token_ids and server.calls.count("complete") == 4
        server.faults["complete"] += [BadAnswerError("nonsense")] * TRIES
        with pytest.raises(BadAnswerError):
            await worked(watched, 1, work)

    run(main())


def test_a_stream_that_is_lost_begins_its_work_again() -> None:
    """What was heard of it is of no completion, so it is not taken back in the middle of the work."""

    async def main() -> None:
        server = FakeServer(longest=6, seed=3)
        watched = await opened(server)
        heard: list[list[int]] = []

        async def work(item: int, generate: Generate) -> Completion:
            heard.append([])
            return await generate(asked(), heard[-1].extend)

        working = watched.later(worked(watched, 1, work))
        await asyncio.sleep(0.25)
        assert heard[0]
        await server.crash_and_restart()
        (completion,) = await working
        assert len(heard) == 2 and heard[1] == completion.token_ids and heard[0] != completion.token_ids
        await watched.fleet.close()

    run(main())


def test_an_error_of_the_work_ends_all_of_it() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)

        async def work(item: int, generate: Generate) -> Completion:
            if item == 2:
                await asyncio.sleep(0.15)
                raise ZeroDivisionError
            return await generate(asked((3, item)))

        with pytest.raises(ZeroDivisionError):
            await worked(watched, 4, work)
        await asyncio.sleep(0.01)
        assert server.running == 0 and not left(watched) and len(asyncio.all_tasks()) == 1

    run(main())


def test_no_more_requests_of_the_work_are_in_flight_than_permitted() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = await opened(server)
        most = 0

        async def work(item: int, generate: Generate) -> Completion:
            nonlocal most
            completion = await generate(asked((3, item)))
            most = max(most, in_flight(watched))
            return completion

        await worked(watched, 20, work, places=3)
        assert 0 < most <= 3

    run(main())


# ---- as all ranks use it


def test_servers_redo_work_whose_answers_became_void() -> None:
    """Between its completions and the probe a server is restarted, and has weights that nobody sent."""
    life = Run([FakeServer("a"), FakeServer("b", clock=Clock(5000))]).run(1)
    done: list[int] = []

    async def work(item: int, generate: Generate) -> Completion:
        completion = await generate(asked((3, item)))
        done.append(item)
        if len(done) == 4:
            life.servers[1].weights = STARTED_WITH
        return completion

    with life._patched():
        life.shared.weights(life.seen)
        completions = life.shared.map(range(4), work, lambda: False)
    assert 4 < len(done) < 8 and set(done) == set(range(4)), "that of one server alone"
    made_by = {round(-value * 16384) - 1 for completion in completions for value in completion.logprobs}
    assert [life.weights.versions[number] for number in made_by] == [life.seen] and STARTED_WITH not in made_by
    life.run(1)
    life.close()


def test_new_weights_are_waited_for_before_work_begins() -> None:
    life = Run([FakeServer()], busy=0.0).run(1)
    life.servers[0].faults["load"].append(lambda: asyncio.sleep(20))

    async def work(item: int, generate: Generate) -> Completion:
        return await generate(asked())

    with life._patched():
        life.shared.publish(8)
        (completion,) = life.shared.map([0], work, lambda: False)
    assert set(completion.versions) == {8}
    life.close()


def test_work_that_is_interrupted_leaves_nothing_running() -> None:
    life = Run([FakeServer()]).run(1)

    async def work(item: int, generate: Generate) -> Completion:
        return await generate(asked((3, item)))

    life.servers[0].faults["complete"] += [life.servers[0].hang] * 20
    start = life.thread.loop.now
    with pytest.raises(Interrupted):
        life.shared.map(range(4), work, lambda: life.thread.loop.now > start + 5)
    life.close(finished=False)  # it looks that no task is left
    assert not life.servers[0].running


@pytest.mark.parametrize("when", ["published", "back"])
def test_work_ends_with_the_error_of_the_servers(when: str) -> None:
    """Nobody takes a step meanwhile: the work alone waits for a server, which is never open again."""
    life = Run([FakeServer()]).run(1)

    async def work(item: int, generate: Generate) -> Completion:
        return await generate(asked((3, item)))

    async def load(path: object) -> None:
        life.servers[0].weights = 77

    life.thread.advance(1)
    life.servers[0].load = load  # type: ignore[method-assign, assignment]
    with life._patched(), pytest.raises(WeightsError, match="does it compute as the trainer does"):
        if when == "published":
            life.shared.publish(8)
        else:
            life.servers[0].crash()
            life.servers[0].restart()
            life.servers[0].faults["complete"].append(UnreachableError("cut"))
        life.shared.map(range(2), work, lambda: False)
    life.close(finished=False)


def test_a_completion_for_another_thread_is_of_confirmed_weights() -> None:
    life = Run([FakeServer()]).run(1)
    life.thread.advance(1)
    life.servers[0].weights = STARTED_WITH  # nobody has noticed yet
    completion = life.shared.ask(asked()).result()
    assert set(completion.versions) == {life.seen} and completion.answer is None
    assert {round(-value * 16384) - 1 for value in completion.logprobs} == {1}, "the second weights that were written"
    life.close()
