"""Look-ahead, group making and the source on a virtual clock. `Run.check` looks at every document that is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from server.fake import STARTED_WITH, STOP, Clock, FakeRewards, FakeServer, asked
from server.sources import GROUP, STEP, FakeWeights, Run
from server.virtual import run as run_virtually
from truestep.environments.rewards import RewardError
from truestep.generate.errors import BadAnswerError, ServerError, UnreachableError, WeightsError
from truestep.generate.generator import Completion
from truestep.generate.group_maker import Group, Member
from truestep.generate.servers.protocol import Description, InferenceServer
from truestep.rollouts.source import Interrupted, SourceError


def reasons(run: Run) -> list[str]:
    return [record.reason for record in run.rejected()]


@pytest.mark.parametrize("pause", ["wait", "keep", "abort"])
def test_synchronous_training_takes_the_prompts_in_their_order(pause: str) -> None:
    run = Run([FakeServer()], pause=pause).run(5)
    assert run.group_numbers == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    run.close()
    assert run.weights.cleared and run.rewards.closed and run.servers[0].closed
    run.close()  # once is enough


@pytest.mark.parametrize("pause", ["wait", "keep", "abort"])
def test_sampling_goes_on_beside_training_as_far_as_staleness_permits(pause: str) -> None:
    run = Run([FakeServer("a"), FakeServer("b", clock=Clock(5000))], pause=pause, max_staleness=2 * STEP).run(8)
    versions = {run.seen - int(document.model_version.min()) for step in run.steps for document in step}  # type: ignore[union-attr]
    assert len(versions) > 1
    assert run.source.state()["groups"] <= (len(run.steps) + 3) * STEP // GROUP
    run.close()


def test_two_servers_are_used_evenly() -> None:
    clock = Clock()
    run = Run([FakeServer("a", clock=clock), FakeServer("b", clock=clock)], max_staleness=STEP).run(10)
    by_server = [document.metadata["server"] for step in run.steps for document in step]
    assert abs(by_server.count("a") - by_server.count("b")) <= STEP
    run.close()


def test_no_more_episodes_are_under_way_than_permitted() -> None:
    """Those of three groups. A group of which one episode is left counts as one, so more groups are begun."""
    run = Run([FakeServer()], max_staleness=10 * STEP, concurrency=3)
    play, under_way, most, groups = run.ahead.maker._plays.play, 0, 0, 0

    async def counted(episode: Any, generate: Any) -> Any:
        nonlocal under_way, most, groups
        under_way += 1
        most, groups = max(most, under_way), max(groups, len(run.ahead._tasks))
        try:
            await asyncio.sleep(20 if str(episode.name).endswith("-1") else 0)
            return await play(episode, generate)
        finally:
            under_way -= 1

    run.ahead.maker._plays.play = counted  # type: ignore[method-assign]
    run.run(5)
    assert most == 3 * GROUP and groups > 3
    run.close()


# ---- answers that cannot be used


def spoil_once(server: FakeServer, spoil: Callable[[list[Completion]], list[Completion]], times: int = 1) -> None:
    left = [times]

    def spoiled(choices: list[Completion]) -> list[Completion]:
        left[0] -= 1
        return spoil(choices) if left[0] >= 0 else choices

    server.spoil = spoiled


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda choices: choices[:1], "asked for 2 completions, got 1"),
        (lambda choices: [replace(choices[0], token_ids=[]), *choices[1:]], "a completion without tokens"),
        (lambda choices: [replace(choices[0], logprobs=[0.5]), *choices[1:]], "tokens and 1 log-probs"),
        (lambda choices: [replace(choices[0], token_ids=[STOP, *choices[0].token_ids[1:]]), choices[1]], "goes on af"),
    ],
)
def test_a_bad_answer_is_asked_for_again(spoil: Callable[[list[Completion]], list[Completion]], said: str) -> None:
    server = FakeServer()
    spoil_once(server, spoil)
    run = Run([server]).run(2)
    (reason,) = reasons(run)
    assert reason.startswith("the server's answer is bad: ") and said in reason
    assert run.ahead.maker.counts["bad_answers"] == 1
    assert run.group_numbers == [[0, 1], [2, 3]]
    run.close()


def test_what_a_server_aborts_by_itself_is_asked_for_again_alone() -> None:
    server = FakeServer()
    spoil_once(server, lambda choices: [Completion([], [], stopped=False, aborted=True), *choices[1:]], times=3)
    run = Run([server]).run(2)
    assert run.ahead.maker.counts["aborted"] == 3 and not reasons(run)
    run.close()


def test_a_group_that_is_answered_badly_again_and_again_gives_way_to_the_next() -> None:
    server = FakeServer()

    def cut_short(choices: list[Completion]) -> list[Completion]:
        return choices[:-1]

    run = Run([server], concurrency=1)
    spoil_once(server, cut_short, times=4)
    run.run(1)
    assert run.group_numbers == [[1, 2]] and len(reasons(run)) == 4
    run.close()


def test_a_server_that_only_lies_ends_the_run_in_words() -> None:
    server = FakeServer()
    server.spoil = lambda choices: choices[:-1]
    run = Run([server])
    with pytest.raises(SourceError, match=r"no group of 8 prompts in a row .* tried 4 times: .* got 1 \(8 times"):
        run.step()
    run.close(finished=False)
    assert not run.weights.cleared, "a run that goes on needs them"


# ---- rewards


def test_a_reward_that_fails_costs_its_completion_alone() -> None:
    failed: list[str] = []

    def fails(text: str) -> str | None:
        if len(failed) < 3:
            failed.append(text)
            return "no such answer"
        return None

    run = Run([FakeServer()], rewards=FakeRewards(fails)).run(3)
    assert reasons(run) == ["no such answer"] * 3
    run.close()


def test_a_group_whose_rewards_fail_is_given_up_and_its_members_are_noted() -> None:
    calls: dict[str, int] = {}

    def fails(text: str) -> str | None:
        calls["n"] = calls.get("n", 0) + 1
        return "broken" if 2 <= calls["n"] <= 8 else None

    run = Run([FakeServer()], rewards=FakeRewards(fails), concurrency=1).run(1)
    assert run.group_numbers == [[1, 2]]
    assert reasons(run) == ["broken"] * 7 + ["its group could not be completed: 1 of 8 completions rated"]
    run.close()


def test_rewards_that_always_fail_end_the_run() -> None:
    run = Run([FakeServer()], rewards=FakeRewards(lambda text: "broken"))
    with pytest.raises(SourceError, match="no group of 8 prompts in a row could be completed, each tried 4 times: bro"):
        run.step()
    run.close()


def test_on_bad_record_stop_ends_the_run_at_the_first() -> None:
    run = Run([FakeServer()], rewards=FakeRewards(lambda text: "broken"), stop_at_rejected=True)
    with pytest.raises(RewardError, match="data.on_bad_record: stop: a completion of prompt p.: broken"):
        run.step()
    run.close()


def test_what_is_no_exception_ends_the_run_too() -> None:
    class Exit(BaseException): ...

    run = Run([FakeServer()])

    async def make(group: Any, generate: Any) -> Any:
        raise Exit

    run.ahead.maker.make = make  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="Exit"):
        run.step()
    run.close()


# ---- silence


def test_a_server_that_dies_for_good_ends_the_run_and_is_named() -> None:
    run = Run([FakeServer()], stall_timeout=30.0).run(2)
    run.servers[0].crash()
    with pytest.raises(
        SourceError, match=r"no completion for 30 s \(schedule.stall_timeout: 30\): a is lost since \d\d:"
    ):
        run.step()
    run.close()


def test_a_server_that_dies_for_good_leaves_its_work_to_the_other() -> None:
    clock = Clock()
    run = Run([FakeServer("a", clock=clock), FakeServer("b", clock=clock)], max_staleness=STEP).run(2)
    run.servers[0].crash()
    run.run(4)
    assert {document.metadata["server"] for document in run.steps[-1]} == {"b"}
    run.close()


def test_an_answer_that_never_comes_is_asked_for_again() -> None:
    server = FakeServer(timeout=20)
    run = Run([server])
    server.faults["complete"].append(server.hang)
    run.run(2)
    assert run.ahead.maker.counts["unanswered"] == GROUP
    run.close()


def test_completions_that_come_slowly_are_no_silence() -> None:
    """Each step takes longer than the patience; each completion does not."""
    server = FakeServer()

    async def slow() -> None:
        await asyncio.sleep(8)

    server.faults["complete"] += [slow] * 40
    run = Run([server], stall_timeout=10.0, concurrency=1)
    start = run.thread.loop.now
    run.run(2)
    assert run.seen == 2 * STEP and run.thread.loop.now - start > 2 * 10.0
    run.close()


@pytest.mark.parametrize("pause", ["wait", "keep", "abort"])
def test_a_server_that_only_aborts_is_silent(pause: str) -> None:
    server = FakeServer()
    run = Run([server], pause=pause, stall_timeout=30.0).run(2)
    aborted = Completion([], [], stopped=False, aborted=True)
    start, server.spoil = run.thread.loop.now, lambda choices: [aborted for _ in choices]
    with pytest.raises(SourceError, match="no completion for 30 s .*: a is open with .* completions in flight"):
        run.run(2)
    assert run.thread.loop.now - start < 40
    run.close()


def test_weights_that_load_slowly_are_no_silence() -> None:
    """Loading and sampling each take less than the patience, and more together."""
    server = FakeServer()

    async def slow() -> None:
        await asyncio.sleep(8)

    server.faults["load"].append(slow)
    server.faults["complete"] += [slow] * 2
    run = Run([server], stall_timeout=10.0).run(1)
    assert run.thread.loop.now > 16
    run.close()


def test_rewards_that_come_slowly_are_no_silence() -> None:
    """A completion and its reward each take less than the patience, and more together."""
    server, rewards = FakeServer(), FakeRewards()
    run = Run([server], stall_timeout=10.0, concurrency=1, rewards=rewards)
    play = run.ahead.maker._plays.play

    async def slow(*asked: Any) -> Any:
        played = await play(*asked)
        await asyncio.sleep(8)
        return played

    run.ahead.maker._plays.play = slow  # type: ignore[method-assign]
    server.faults["complete"] += [lambda: asyncio.sleep(8)] * 2
    run.run(1)
    assert run.thread.loop.now > 32
    run.close()


def test_a_run_that_is_asked_to_stop_stops_waiting() -> None:
    run = Run([FakeServer()]).run(1)
    run.thread.advance(5)
    run.servers[0].crash()
    run.source.asked_to_stop = lambda: run.thread.loop.now > 50
    with pytest.raises(Interrupted):
        run.run(2)
    assert 50 < run.thread.loop.now < 52
    run.close(finished=False)


def test_an_error_that_looks_like_waiting_ends_the_waiting() -> None:
    run = Run([FakeServer()])

    async def collect(*asked: Any) -> Any:
        raise TimeoutError("of somebody's own")

    run.ahead.collect = collect  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="own"):
        run.step()
    run.close()


def test_documents_that_are_there_are_taken_whoever_asks_to_stop() -> None:
    run = Run([FakeServer()], busy=20.0)
    run.source.asked_to_stop = lambda: True
    with pytest.raises(Interrupted):
        run.step()
    run.thread.advance(20)
    run.step()
    run.close()


# ---- weights


def test_weights_that_were_replaced_behind_our_back_void_what_they_made() -> None:
    run = Run([FakeServer()], max_staleness=STEP, busy=10.0).run(1)
    run.thread.advance(10)  # groups are ready, and not yet confirmed
    run.servers[0].weights = STARTED_WITH
    run.run(3)
    assert run.ahead.maker.counts["void"] > 0
    run.close()


def test_what_is_voided_at_the_moment_when_its_group_ends_is_made_anew() -> None:
    """Its answer came in time, and its rewards while the server was found to be another."""
    run = Run([FakeServer()])
    add = run.ahead.maker._add

    def voided_last(group: Any, number: int, played: Any, problems: Any) -> Any:
        added = add(group, number, played, problems)
        if group.number == 0 and len(group.members) == GROUP and not run.ahead.maker.counts["void"]:
            run.ahead.fleet._void(played.completions[0].answer.server)
            assert not group.members
        return added

    run.ahead.maker._add = voided_last  # type: ignore[method-assign]
    run.run(2)
    run.close()


def test_an_answer_that_is_void_before_it_is_rated_is_asked_for_again() -> None:
    run = Run([FakeServer()])
    play, voided = run.ahead.maker._plays.play, []

    async def voided_first(*asked: Any) -> Any:
        played = await play(*asked)
        if not voided:
            voided.append(run.ahead.fleet._void(run.ahead.fleet.servers[0]))
        return played

    run.ahead.maker._plays.play = voided_first  # type: ignore[method-assign]
    run.run(2)
    assert run.seen == 2 * STEP < run.rewards.rated, "what was void was rated for nothing"
    run.close()


def test_a_group_between_its_last_member_and_its_end_may_lose_one() -> None:
    run = Run([FakeServer()])
    make = run.ahead.maker.make
    lost: list[int] = []

    async def loses_one(group: Any, generate: Any) -> Any:
        reason = await make(group, generate)
        if not lost:
            lost.append(group.number)
            group.members.pop()
        return reason

    run.ahead.maker.make = loses_one  # type: ignore[method-assign]
    run.run(2)
    assert run.group_numbers == [[0, 1], [2, 3]]
    run.close()


def test_weights_that_do_not_arrive_end_the_run() -> None:
    server = FakeServer()
    run = Run([server])
    server.faults["load"].append(ServerError("could not load"))
    with pytest.raises(ServerError, match="could not load"):
        run.step()
    run.close()


def test_a_wrong_server_ends_the_run_when_it_is_back() -> None:
    server = FakeServer()
    run = Run([server]).run(1)
    server.ignores_temperature = True
    server.crash()
    run.thread.advance(1)
    server.restart()
    with pytest.raises(WeightsError, match="raw_logprobs"):
        run.run(2)
    run.close()


async def sleep_once() -> None:
    await asyncio.sleep(0)


def test_the_end_does_not_wait_for_weights_that_do_not_arrive() -> None:
    server = FakeServer(timeout=10_000)
    run = Run([server])
    server.faults["pause"] += [sleep_once, server.hang]
    run.step()
    start = run.thread.loop.now
    run.close()
    assert run.thread.loop.now - start < 40


# ---- the start and going on


def test_a_run_goes_on_where_it_stopped() -> None:
    server, weights = FakeServer(), FakeWeights()
    first = Run([server], max_staleness=STEP, weights=weights).run(3)
    state = first.source.state()
    first.close(finished=False)
    server.up = True
    second = Run([server], max_staleness=STEP, weights=weights)
    second.source.restore(state)
    second.seen = first.seen
    second.run(3)
    taken = [number for numbers in first.group_numbers + second.group_numbers for number in numbers]
    assert sorted(taken) == list(range(12))
    assert state["open"] == sorted(set(range(state["groups"])) - set(taken[:6]))
    second.close()


def test_what_a_run_cannot_go_on_from_is_refused() -> None:
    run = Run([FakeServer()])
    state = run.source.state()
    with pytest.raises(SourceError, match="checkpoint was made from rollout files"):
        run.source.restore({"position": 3})
    with pytest.raises(SourceError, match="sampler.prompts, their weights, data.group_size or seed is not what"):
        run.source.restore(state | {"fingerprint": "other"})
    run.source.restore({name: value for name, value in state.items() if name != "open"})
    run.shared.updated(0, 0)  # nobody has asked yet: nothing is sent
    run.source.checkpointed(1)
    assert not run.servers[0].calls.count("load")
    run.shared._published = True
    with pytest.raises(ValueError, match="5 documents are not a multiple of groups of 2"):
        run.source.take(STEP + 1, 0)
    run.close()


def test_a_trainer_that_was_killed_in_a_sync_left_its_server_standing_still() -> None:
    server = FakeServer()
    server.paused = True
    Run([server]).run(1).close()
    assert not server.paused and "resume" in server.calls


DESCRIPTION = Description(("policy",), 1000, 1000)


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (replace(DESCRIPTION, names=("qwen", "llama")), "sampler.model: b serves qwen, llama, not policy"),
        (replace(DESCRIPTION, names=()), "sampler.model: b serves nothing, not policy"),
        (replace(DESCRIPTION, longest_text=11), "b serves at most 11 tokens; .* make 12: let the server serve longer"),
        (replace(DESCRIPTION, vocabulary_size=999), "b has a vocabulary of 999 and the trainer one of 1000"),
    ],
)
def test_another_model_is_refused_at_the_start(description: Description, said: str) -> None:
    servers = [FakeServer("a"), FakeServer("b")]
    servers[1].description = description
    with pytest.raises(ServerError, match=said):
        Run(servers)
    assert all(server.closed for server in servers)


def test_a_server_that_does_not_say_its_vocabulary_is_asked_for_the_tokens_around_its_end() -> None:
    server = FakeServer()
    server.description = Description()
    Run([server]).run(1).close()
    server = FakeServer()
    server.description = Description()
    server.faults["next_token"].append(ServerError("no such token"))
    with pytest.raises(ServerError, match="does not know token 999 of the trainer's vocabulary of 1000: it serves ano"):
        Run([server])

    class Greater(FakeServer):
        async def next_token(self, prompt: tuple[int, ...], *rest: Any, **options: Any) -> dict[int, float]:
            return {3: -1.0}

    server = Greater()
    server.description = Description()
    with pytest.raises(ServerError, match="a accepts token 1000, but the trainer's vocabulary has only 1000"):
        Run([server])


def test_another_tokenizer_is_refused_at_the_start() -> None:
    class WithTokenizer(FakeServer):
        tokens: Any = ()

        async def tokenize(self, text: str) -> list[int] | None:
            if isinstance(self.tokens, Exception):
                raise self.tokens
            return self.tokens

    for tokens in (None, UnreachableError("none"), ServerError("none")):
        server = WithTokenizer()
        server.tokens = tokens
        Run([server]).run(1).close()
    server = WithTokenizer()
    server.tokens = list(range(10))
    with pytest.raises(ServerError, match=r"tokenises prompt p0 as \[0, 1, 2, .*7, …\] and the trainer as \[3, 4, 5\]"):
        Run([server])


@pytest.mark.parametrize("error", [UnreachableError("refused"), BadAnswerError("a welcome page")])
def test_a_server_that_is_not_there_is_named_at_the_start(error: Exception) -> None:
    server = FakeServer()
    server.faults["describe"].append(error)
    with pytest.raises(ServerError, match=f"sampler.urls: a does not answer as an inference server does: {error}"):
        Run([server])


def test_a_server_that_cannot_stream_says_so() -> None:
    class Plain(FakeServer):
        stream = InferenceServer.stream

    run_virtually(_tokenizes_nothing(Plain()))
    with pytest.raises(ServerError, match="sampler.pause: keep needs a server that streams, which an inference server"):
        run_virtually(Plain().stream(asked((1,)), 1, lambda index, tokens: None))


async def _tokenizes_nothing(server: FakeServer) -> None:
    assert await server.tokenize("text") is None


def test_a_run_that_ends_in_the_middle_of_a_sync_leaves_no_server_standing_still() -> None:
    server = FakeServer()
    run = Run([server])
    run.step()
    server.faults["load"].append(lambda: asyncio.sleep(500))
    run.thread.advance(5)
    assert server.paused
    run.close()
    assert not server.paused and server.closed


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    nothing: Any = None
    drawn = [Completion([], [], stopped=True, versions=versions) for versions in ([16, 24], [8, 24, 32], [24])]
    group = Group(0, nothing, [Member(0, nothing, [completion]) for completion in drawn])
    assert group.version == 8
