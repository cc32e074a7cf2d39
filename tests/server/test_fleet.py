"""The fleet on a virtual clock: who is asked, who has which weights, and what becomes of servers that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from server.fake import DOWN, STARTED_WITH, VOCABULARY, FakeServer, asked, published
from server.virtual import run
from truestep.generate.errors import (
    BadAnswerError,
    ForgottenError,
    ServerError,
    UnreachableError,
    VoidedError,
    WeightsError,
)
from truestep.generate.servers.fleet import Fleet, ServedCompletions


class Watched:
    """A fleet, and what it says to its owner."""

    def __init__(self, *servers: FakeServer, **options: Any):
        self.voids, self.fatal = 0, list[Exception]()
        given: dict[str, Any] = {"vocabulary_size": VOCABULARY, "pause": "wait", "tolerance": 0.01} | options
        self.fleet = Fleet(servers, on_void=self._void, on_fatal=self.fatal.append, **given)
        self.known = self.fleet.servers

    def _void(self) -> None:
        self.voids += 1

    def later(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)

    async def opened(self, at: int = 0) -> None:
        while not self.known[at].is_open:
            await asyncio.sleep(0.1)


async def answered(watched: Watched) -> ServedCompletions:
    return await watched.fleet.ask(asked(), 2)


def test_requests_go_to_the_server_that_has_least_to_do() -> None:
    async def main() -> None:
        servers = [FakeServer("a"), FakeServer("b"), FakeServer("c", longest=2)]
        watched = Watched(*servers)
        await watched.fleet.publish(published(0))
        answers = await asyncio.gather(*(answered(watched) for _ in range(30)))
        assert [sum(answer.server.url == server.url for answer in answers) for server in servers] == [10, 10, 10]
        for _ in range(3):  # one at a time: of equals the one that did least
            answers.append(await answered(watched))
        assert {answer.server.url for answer in answers[-3:]} == {"a", "b", "c"}

    run(main())


def test_a_request_waits_until_a_server_has_weights() -> None:
    async def main() -> None:
        watched = Watched(FakeServer())
        request = watched.later(answered(watched))
        await asyncio.sleep(100)
        assert not request.done() and watched.fleet.report() == "a is loading weights with 0 completions in flight"
        await watched.fleet.publish(published(0))
        assert (await request).choices[0].versions[0] == 0

    run(main())


def test_wait_lets_completions_end_with_the_old_weights() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        request = watched.later(answered(watched))
        await asyncio.sleep(0.15)
        await watched.fleet.publish(published(8))
        assert request.done() and {version for one in request.result().choices for version in one.versions} == {0}
        assert request.result().confirmed, "the probe before new weights counts"
        assert (await answered(watched)).choices[0].versions[0] == 8

    run(main())


def test_abort_throws_completions_away() -> None:
    async def main() -> None:
        watched = Watched(FakeServer(), pause="abort")
        await watched.fleet.publish(published(0))
        request = watched.later(answered(watched))
        await asyncio.sleep(0.15)
        await watched.fleet.publish(published(8))
        with pytest.raises(VoidedError):
            await request

    run(main())


def test_keep_gives_each_token_the_version_that_made_it() -> None:
    async def main() -> None:
        watched = Watched(FakeServer(longest=6, seed=3), pause="keep")
        await watched.fleet.publish(published(0))
        request = watched.later(answered(watched))
        await asyncio.sleep(0.25)
        await watched.fleet.publish(published(8))
        choices = (await request).choices
        assert any(len(set(choice.versions)) == 2 for choice in choices)
        assert [choice.versions for choice in choices] == [
            [round(-value * 16384) - 1 for value in choice.logprobs] for choice in choices
        ]

    run(main())


def test_a_server_that_was_only_out_of_reach_goes_on_with_its_weights() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        before = await answered(watched)
        server.faults["complete"].append(UnreachableError("cut"))
        with pytest.raises(UnreachableError):
            await answered(watched)
        assert not watched.known[0].is_open
        await watched.opened()
        assert server.calls.count("load") == 1 and not watched.voids and before.confirmed
        assert watched.fleet.report() == "a is open with 0 completions in flight; its last trouble: cut"

    run(main())


def test_a_server_that_says_that_it_forgot_gets_the_current_weights() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        for call in ("complete", "next_token"):  # as a new process answers: it does not know the adapter's name
            server.faults[call].append(ForgottenError("it was restarted"))
        server.weights = STARTED_WITH
        with pytest.raises(ForgottenError):
            await answered(watched)
        await watched.opened()
        assert server.weights == 0 and server.calls.count("load") == 2 and watched.voids == 1
        assert (await answered(watched)).choices[0].versions[0] == 0 and not watched.fatal

    run(main())


def test_a_restarted_server_gets_the_current_weights_and_what_it_said_before_is_void() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        before = await answered(watched)
        request = watched.later(answered(watched))
        await asyncio.sleep(0.15)
        restart = watched.later(server.crash_and_restart())
        with pytest.raises(UnreachableError):
            await request
        assert "a is lost since " in watched.fleet.report() and "the connection was lost" in watched.fleet.report()
        await watched.opened()
        await restart
        assert server.weights == 0 and watched.voids and before.void
        assert not (await answered(watched)).void

    run(main())


def test_a_server_that_is_away_during_new_weights_gets_them_when_it_is_back() -> None:
    async def main() -> None:
        away = FakeServer("away")
        watched = Watched(FakeServer("here"), away)
        await watched.fleet.publish(published(0))
        before = [await answered(watched), await answered(watched)]
        away.faults["pause"].append(UnreachableError("cut"))
        await watched.fleet.publish(published(8))
        assert watched.known[1].lost_at is not None and away.weights == 0
        away.up = False
        await watched.fleet.publish(published(16))
        away.up = True
        await watched.opened(1)
        assert away.weights == 16 and watched.voids == 0 and all(answer.confirmed for answer in before)

    run(main())


def test_new_weights_wait_for_whoever_brings_a_server_back() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        server.faults["load"].append(UnreachableError("cut"))
        await watched.fleet.publish(published(0))  # fails; the recovery takes the lock in the middle of the next
        await asyncio.sleep(0.12)
        await watched.fleet.publish(published(8))
        assert watched.known[0].version == 8 and watched.known[0].is_open

    run(main())


def test_weights_so_old_that_they_are_forgotten_cannot_be_confirmed() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(FakeServer("here"), server)
        await watched.fleet.publish(published(0))
        server.up = False
        for version in range(8, 48, 8):
            await watched.fleet.publish(published(version))
        server.up = True
        await watched.opened(1)
        assert server.weights == 40 and watched.voids > 0

    run(main())


def test_patience_ends_and_others_make_it_anew() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        before = await answered(watched)
        server.crash()
        await watched.fleet.confirm({watched.known[0]})
        await watched.fleet.confirm({watched.known[0]})  # of a lost one there is nothing to confirm
        await asyncio.sleep(0.25)
        assert not before.void
        await asyncio.sleep(10)
        assert before.void and watched.voids == 1 and watched.known[0].attempts > 3
        await watched.fleet.close()
        assert server.closed and len(asyncio.all_tasks()) == 1

    run(main())


@pytest.mark.parametrize("look", ["confirm", "publish"])
def test_weights_that_were_replaced_behind_our_back_are_found_out(look: str) -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        before = await answered(watched)
        server.weights = STARTED_WITH
        if look == "confirm":
            await watched.fleet.confirm({watched.known[0]})
            assert "it was restarted" in watched.fleet.report()
            await watched.opened()
        else:
            await watched.fleet.publish(published(8))
        assert before.void and server.weights == (0 if look == "confirm" else 8)

    run(main())


def test_what_is_void_is_not_confirmed_by_a_later_probe_of_the_right_weights() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        server.weights = STARTED_WITH
        wrong = await answered(watched)
        await watched.fleet.publish(published(8))
        right = await answered(watched)
        await watched.fleet.confirm({watched.known[0]})
        assert wrong.void and not wrong.confirmed
        assert right.confirmed and not right.void

    run(main())


@pytest.mark.parametrize("error", [UnreachableError("gone"), BadAnswerError("nonsense")])
def test_a_probe_without_an_answer_confirms_nothing(error: Exception) -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        before = await answered(watched)
        server.faults["next_token"].append(error)
        await watched.fleet.confirm({watched.known[0]})
        assert not before.confirmed and not watched.known[0].is_open
        await watched.opened()
        assert before.confirmed

    run(main())


def _ignores_temperature(server: FakeServer) -> None:
    server.ignores_temperature = True


def _keeps_its_cache(server: FakeServer) -> None:
    server.cache = 0


def _ignores_new_weights(server: FakeServer) -> None:
    async def load(path: object) -> None: ...

    server.load = load  # type: ignore[method-assign, assignment]


def _computes_otherwise(server: FakeServer) -> None:
    async def load(path: object) -> None:
        server.weights = 77

    server.load = load  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_ignores_temperature, "a gives raw_logprobs: .* Let the server report log-probs after the temperature"),
        (_keeps_its_cache, "version 8, and scores a probe of 3 tokens .*: its prefix cache is still of older weights"),
        (_ignores_new_weights, "it still serves the weights of version 0, although the server was told to load"),
        (_computes_otherwise, "does it compute as the trainer does"),
    ],
)
def test_a_server_that_scores_otherwise_ends_the_run_in_words(spoil: Any, said: str) -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        spoil(server)
        with pytest.raises(WeightsError, match=said):
            await watched.fleet.publish(published(8))

    run(main())


def test_one_that_scores_otherwise_when_it_is_back_ends_the_run_too() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        _computes_otherwise(server)
        server.weights = STARTED_WITH
        await watched.fleet.confirm({watched.known[0]})
        await asyncio.sleep(10)
        (error,) = watched.fatal
        assert isinstance(error, WeightsError)

    run(main())


def test_a_fault_of_ours_in_a_recovery_ends_the_run() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        server.faults["pause"].append(UnreachableError("cut"))
        server.faults["describe"].append(ZeroDivisionError())
        await watched.fleet.publish(published(0))
        await asyncio.sleep(10)
        assert [type(error) for error in watched.fatal] == [ZeroDivisionError]

    run(main())


def test_a_server_that_refuses_while_it_starts_is_asked_again() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        server.faults["load"].append(UnreachableError("cut"))
        server.faults["describe"] += [ServerError("starting"), BadAnswerError("a welcome page")]
        await watched.fleet.publish(published(0))
        await watched.opened()
        assert server.calls.count("describe") == 3 and not watched.fatal

    run(main())


def test_a_server_that_cannot_load_the_weights_ends_the_run() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        server.faults["load"].append(ServerError("could not load"))
        with pytest.raises(ServerError, match="could not load"):
            await watched.fleet.publish(published(0))
        assert not server.paused, "whatever happened, it does not stand still"

    run(main())


def test_a_server_that_joins_late_takes_its_share() -> None:
    async def main() -> None:
        late = FakeServer("late", longest=2)
        watched = Watched(FakeServer("here", longest=2), late)
        late.crash()
        await watched.fleet.publish(published(0))
        watched.later(late.crash_and_restart(2 * DOWN))
        answers = [await answered(watched) for _ in range(10)]
        assert {answer.server.url for answer in answers} == {"here"}
        await watched.opened(1)
        answers = await asyncio.gather(*(answered(watched) for _ in range(10)))
        assert sum(answer.server.url == "late" for answer in answers) == 5

    run(main())


def test_weights_are_made_ready_while_completions_run() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        running: list[int] = []

        async def prepare() -> None:
            under_way = watched.later(answered(watched))  # it is open, and takes requests
            await asyncio.sleep(0.2)
            running.append(server.running)
            assert not under_way.done() and watched.known[0].is_open and not server.paused

        server.prepare = prepare  # type: ignore[method-assign]
        await watched.fleet.publish(published(8))
        assert running == [1] and server.weights == 8 and watched.known[0].is_open

    run(main())


def test_rolling_updates_leave_the_others_open() -> None:
    async def main() -> None:
        servers = [FakeServer("a"), FakeServer("b"), FakeServer("c")]
        watched = Watched(*servers, rolling=True)
        await watched.fleet.publish(published(0))
        opened: list[int] = []

        async def slow() -> None:
            await asyncio.sleep(5)
            opened.append(sum(known.is_open for known in watched.known))

        for server in servers:
            server.faults["load"].append(slow)
        update = watched.later(watched.fleet.publish(published(8)))
        while not update.done():
            answer = await answered(watched)
            assert {token for choice in answer.choices for token in choice.versions} <= {0, 8}
        assert opened == [2, 2, 2], "one at a time"
        assert [server.weights for server in servers] == [8, 8, 8] and watched.fleet.version == 8

    run(main())


def test_a_server_is_lost_that_cannot_make_weights_ready_and_gets_them_when_it_can() -> None:
    async def main() -> None:
        server = FakeServer()
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        failures = [UnreachableError("it was started anew")]

        async def prepare() -> None:
            if failures:
                raise failures.pop()

        server.prepare = prepare  # type: ignore[method-assign]
        await watched.fleet.publish(published(8))
        assert watched.known[0].lost_at is not None
        await watched.opened()
        assert server.weights == 8 and not watched.fatal

    run(main())


@pytest.mark.parametrize("rolling", [False, True])
def test_a_fleet_that_closes_leaves_no_server_standing_still(rolling: bool) -> None:
    """One of them refuses the weights, and the run ends while another one is in the middle of loading them."""

    async def main() -> None:
        servers = [FakeServer("a"), FakeServer("b")]
        watched = Watched(*servers, rolling=rolling)
        servers[0].faults["load"].append(lambda: asyncio.sleep(50))
        servers[1].faults["load"].append(ServerError("these are no weights of mine"))
        publishing = watched.later(watched.fleet.publish(published(0)))
        await asyncio.sleep(5)
        assert servers[0].paused and publishing.done() is not rolling
        await watched.fleet.close()
        assert not any(server.paused for server in servers) and servers[0].calls[-1] == "resume"
        assert len(asyncio.all_tasks()) == 1 + (not publishing.done()), "nothing goes on"
        with pytest.raises((ServerError, asyncio.CancelledError)):
            await publishing

    run(main())


def test_a_server_is_brought_back_while_newer_weights_come() -> None:
    async def main() -> None:
        server = FakeServer()

        async def prepare() -> None:
            await server._call("prepare")

        server.prepare = prepare  # type: ignore[method-assign]
        watched = Watched(server)
        await watched.fleet.publish(published(0))
        await server.crash_and_restart()
        server.faults["prepare"].append(lambda: asyncio.sleep(5))
        with pytest.raises(UnreachableError):
            server.faults["complete"].append(UnreachableError("lost"))
            await answered(watched)
        await asyncio.sleep(1)
        await watched.fleet.publish(published(8))
        assert not watched.fatal and server.weights == 8 and watched.known[0].version == 8
        assert (await answered(watched)).choices[0].versions[0] == 8
        await watched.fleet.close()

    run(main())
