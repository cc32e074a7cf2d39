"""Environments in processes: an episode for each, and whatever one of them does costs that one alone."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import environments_of_tests
from processes import mentioning
from truestep.environments.descendants import descendants, started
from truestep.environments.episodes import host
from truestep.environments.episodes.environment import Answer, End, ToolCall
from truestep.environments.episodes.service import (
    Begun,
    Episode,
    EpisodeError,
    EpisodeService,
    FailingRewardError,
    LateEpisodeError,
    Said,
    check_environment,
)
from truestep.environments.episodes.tool_calls import Family
from truestep.environments.printed import PrintedLog
from truestep.environments.process import WorkerOptions
from truestep.environments.rewards import Rating, RewardError

PATIENCE = 240.0  # seconds, against what hangs; nothing here takes as long
LATE = r"^the environment's step took longer than sampler\.reward_timeout: 2 s$"
OWN_DESCRIPTOR = r"^the environment wrote .*to the connection of its process"
# What ends by itself.
OUTCOMES: dict[str, float | str] = {
    "exits": r"^the environment ended its process in step \(exit code 7\)$",
    "exits_by_exception": r"^the environment's step raised SystemExit: 3 \(at environments_of_tests\.py:\d+\)$",
    "raises": r"^the environment's step raised KeyError: 'no such key' \(at environments_of_tests\.py:\d+\)$",
    "kills_itself": r"^the environment ended its process in step \(signal 9\)$",
    "leaves_a_session_behind": 0.25,
    "leaves_a_session_behind_and_exits": r"^the environment ended its process in step \(exit code 9\)$",
    "writes_garbage": OWN_DESCRIPTOR,
    "forges": OWN_DESCRIPTOR,
    "announces_gigabytes": OWN_DESCRIPTOR,
    "closes_every_descriptor": r"^the environment ended its process in step \(signal 9\)$",
    "floods_its_output": 0.25,
    "returns_nan": r"^the environment's step returned nan; at most 1e\+38 in size is a reward$",
    "returns_nan_in_a_message": r"^the environment's step returned what JSON cannot hold: Out of range float",
    "returns_nan_in_turn_rewards": r"^the environment's step returned turn_rewards with nan, which is not a finite",
    "returns_too_many_turn_rewards": r"^the environment's step returned 2 turn_rewards after 1 turns of the policy$",
    "returns_20_megabytes": r"^the environment's step returned 20000012 bytes; at most 16711680 are allowed$",
    "returns_nothing": r"^the environment's step returned None, which is neither messages, text, tokens, an End nor",
    "returns_bytes": r"^the environment's step returned b'no', which is neither messages, text, tokens, an End nor",
    "returns_a_message": r"^the environment's step returned a message, which belongs in a list: \[message\]$",
    "returns_a_message_without_role": r"^the environment's step returned a list with .*, a message without a role$",
    "returns_a_mixed_list": r"^the environment's step returned a list with 1, which is neither a message nor a token$",
    "returns_an_empty_list": r"^the environment's step returned an empty list$",
    "returns_a_negative_token": r"^the environment's step returned -1, which is no token$",
    "returns_half_a_character": r"^the environment's step returned a text that is not Unicode",
    "returns_an_object_in_a_message": r"^the environment's step returned what JSON cannot hold: .*PosixPath",
    "returns_a_part_that_is_text": r"^the environment's step's part 'style' is 'good', which is not a finite number$",
}
HANGING = ("hangs", "loops_without_signals", "stops_itself", "leaves_a_session_behind_and_hangs")
OF_THEIR_OWN = (  # in tests of their own below
    *("kills_its_parent", "stops_its_parent", "kills_its_supervisor", "stops_its_supervisor"),
    *("takes_memory", "takes_memory_in_children", "forks_without_end", "returns_10_megabytes"),
    "leaves_a_session_behind_and_goes_on",
)


def options(name: str, timeout: float = 60.0, **others: Any) -> WorkerOptions:
    return WorkerOptions(f"environments_of_tests:{name}", timeout, 2**29, **others)


@contextmanager
def serving(
    name: str, workers: int = 1, timeout: float = 60.0, arguments: Mapping[str, Any] | None = None, **others: Any
) -> Iterator[EpisodeService]:
    made = EpisodeService(options(name, timeout, **others), workers, arguments)
    try:
        yield made
    finally:
        made.close_all()


def begun(service: EpisodeService, seed: str = "0", **row: Any) -> Episode:
    return service.begin({"prompt": "text", **row}, seed).result(PATIENCE).episode


def stepped(service: EpisodeService, episode: Episode, text: str = "x") -> Any:
    return service.step(episode, Answer(text)).result(PATIENCE)


def outcome(future: Future[Any]) -> float | str | Said:
    error = future.exception(PATIENCE)
    if error is not None:
        assert isinstance(error, EpisodeError), error
        return str(error)
    result = future.result()
    return float(result.reward) if isinstance(result, End) else result


def gone(mark: object) -> bool:
    return until(lambda: not mentioning(mark))


def until(true: Any) -> bool:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
    return True


def processes(service: EpisodeService) -> list[int]:
    """Find the processes of a service: each supervisor, and all below it."""
    found = []
    for one in service._hosts:
        if one._connection is not None and not one.is_lost:
            top = one._connection._supervisor.pid
            found += [top, *descendants(top)]
    return found


# ---- what works


def test_a_calculator_with_a_tool_over_three_turns() -> None:
    with serving("Calculator", arguments={"unit": "!"}) as service:
        assert service.tools(PATIENCE)["calculate"]["function"]["description"] == "Return the value of a sum."
        first = service.begin({"prompt": [{"role": "user", "content": "1 + 2 + 3"}], "answer": "6"}, "0")
        episode, said = first.result(PATIENCE).episode, first.result().said
        assert said == Said(messages=[{"role": "user", "content": "1 + 2 + 3"}])
        for expression, value in (("1+2", "3!"), ("3+3", "6!")):
            call = ToolCall("calculate", {"expression": expression}, "id")
            known = {"role": "tool", "name": "calculate", "tool_call_id": "id"}
            got = service.step(episode, Answer("", (call,))).result(PATIENCE)
            assert got == Said(messages=[{**known, "content": value}])
            assert episode.tool_seconds.keys() == {"calculate"} and episode.tool_seconds["calculate"] > 0
        end = stepped(service, episode, " 6 ")
        assert isinstance(end, End) and isinstance(end.reward, Rating) and end == End(1.0)
        with pytest.raises(EpisodeError, match="the episode has ended"):
            stepped(service, episode)


def test_malformed_calls_are_answered_and_only_tools_that_ran_are_timed() -> None:
    written = '<tool_call>{"name": broken</tool_call><tool_call>{"name": "other", "arguments": {}}</tool_call>'
    answer = Family("hermes").read(written)
    with serving("Calculator") as service:
        episode = begun(service)
        broken, other = service.step(episode, answer).result(PATIENCE).messages
        assert broken["content"].startswith("error: ") and "JSON" in broken["content"]
        assert other["content"] == "error: there is no tool 'other'; there are calculate"
        assert episode.tool_seconds == {}


def test_state_is_kept_between_turns_and_not_between_episodes() -> None:
    with serving("Counting") as service:
        one, other = begun(service, "7"), begun(service, "7")
        assert [stepped(service, one, text) for text in "ab"] == [Said(text="1 0"), Said(text="2 0")]
        assert stepped(service, other) == Said(text="1 0")
        first, second = (stepped(service, episode, "end") for episode in (one, other))
        assert (first.reward, second.reward) == (3.0, 2.0) and first.turn_rewards == (0.5,)
        assert {name: first.reward.parts[name] for name in ("before", "turns")} == {"before": 0.0, "turns": 3.0}
        third = stepped(service, begun(service, "8"), "end")
        drawn = [end.reward.parts["drawn"] for end in (first, second, third)]
        assert drawn[0] == drawn[1] != drawn[2], "the same seed, the same random numbers"
        rating = service.cut(begun(service), "max_turns").result(PATIENCE)
        assert isinstance(rating, Rating) and (rating, rating.parts) == (-1.0, {"max_turns": 1.0})


def test_generators_are_imported_once_for_all_episodes() -> None:
    service = EpisodeService(WorkerOptions("turn_environments:Seeded", 60.0, 2**29), 1)
    try:
        parts = [stepped(service, begun(service, seed)).reward.parts for seed in ("7", "7", "8")]
    finally:
        service.close_all()
    assert [part["there"] for part in parts] == [1.0] * 3
    assert parts[0]["drawn"] == parts[1]["drawn"] != parts[2]["drawn"]


def test_tokens_and_text_are_said_as_they_are() -> None:
    with serving("Tokens") as service:
        started = service.begin({"prompt": ""}, "0").result(PATIENCE)
        assert started.said == Said(tokens=[1, 2, 3])
        assert stepped(service, started.episode) == Said(tokens=[4, 5])
        assert stepped(service, started.episode) == End(1.0)
    with serving("Hostile") as service:
        said = stepped(service, begun(service, attack="returns_10_megabytes"))
        assert said.text == "x" * 10_000_000


@pytest.mark.parametrize("count", [32, pytest.param(256, marks=pytest.mark.long)])
def test_many_episodes_that_sleep_take_little_more_than_their_sleep(count: int) -> None:
    """Each sleeps 0.6 s, and all of them together would sleep for 19 s or more."""
    with serving("Sleeping", 2) as service:
        service.tools(PATIENCE)
        since = time.monotonic()
        episodes = [one.result(PATIENCE).episode for one in [service.begin({"prompt": "p"}, "0") for _ in range(count)]]
        for _ in range(3):
            ends = [one.result(PATIENCE) for one in [service.step(episode, Answer("x")) for episode in episodes]]
        took = time.monotonic() - since
        assert all(end == End(1.0) for end in ends)
        assert took < 0.6 * count / 4, took
        assert len(service._hosts) == (1 if count <= 64 else 2)


def test_what_an_environment_prints_is_kept(tmp_path: Path) -> None:
    log = PrintedLog(tmp_path / "log")
    service = EpisodeService(options("Hostile"), 1, printed=log)
    outcome(service.step(begun(service, attack="floods_its_output"), Answer("x")))
    service.close_all()
    assert (tmp_path / "log").read_text().startswith("episodes-0: ")


# ---- attacks


@pytest.fixture(scope="module")
def attacked() -> Iterator[dict[str, Any]]:
    """Every attack that ends by itself, all at a time, and a good episode that lives beside all of them."""
    with serving("Hostile") as service:
        good = begun(service)
        futures = {
            name: service.step(begun(service, attack=name, mark=f"{name}-of-service"), Answer("x")) for name in OUTCOMES
        }
        yield futures
        for future in futures.values():
            outcome(future)
        assert stepped(service, good) == End(0.5), "an attack costs its own episode alone"
        assert len(service._hosts) == 1 and not service._hosts[0].is_lost


def test_every_attack_is_here() -> None:
    assert {*OUTCOMES, *HANGING, *OF_THEIR_OWN} == set(environments_of_tests.ATTACKS)


@pytest.mark.parametrize("name", OUTCOMES)
def test_an_attack_ends_as_its_episodes_reason(name: str, attacked: dict[str, Future[Any]]) -> None:
    got, expected = outcome(attacked[name]), OUTCOMES[name]
    if isinstance(expected, float):
        assert got == expected
    else:
        assert re.search(expected, str(got)), got
        assert len(str(got)) < 500 and str(got).isprintable()
    assert gone(f"{name}-of-service")


def test_what_a_method_raised_comes_with_its_traceback(attacked: dict[str, Future[Any]]) -> None:
    error = attacked["raises"].exception(PATIENCE)
    assert isinstance(error, EpisodeError) and error.traceback is not None
    head, first, *_, last = error.traceback.splitlines()
    assert head == "Traceback (most recent call last):" and last == "KeyError: 'no such key'"
    assert "environments_of_tests.py" in first and first.endswith("in step"), "the first frame is the user's"


def test_an_episode_that_hangs_is_lost_alone_and_within_its_limit() -> None:
    with serving("Hostile", timeout=2.0) as service:
        futures = [service.step(begun(service, attack=name, mark="hanging-one"), Answer("x")) for name in HANGING]
        since = time.monotonic()
        for name, future in zip(HANGING, futures, strict=True):
            assert re.search(LATE, str(outcome(future))), name
            assert isinstance(future.exception(), LateEpisodeError)
        assert time.monotonic() - since < 20
        assert stepped(service, begun(service)) == End(0.5)
        assert gone("hanging-one")
        assert len(service._hosts) == 1 and until(lambda: not service._hosts[0]._closing)


@pytest.mark.parametrize(
    ("attack", "isolation", "reason"),
    [
        ("kills_its_parent", "auto", r"^the environment ended the process that forks its episodes \(signal 9\)"),
        ("stops_its_parent", "auto", r"did not end one of them$|^the environment's step took longer than"),
        pytest.param("kills_its_supervisor", "off", r"^the environment ended the process", marks=pytest.mark.long),
        pytest.param(
            "stops_its_supervisor",
            "off",
            r"did not end one of them$|^the environment's step took longer than",
            marks=pytest.mark.long,
        ),
    ],
    ids=["kills_its_parent", "stops_its_parent", "kills_its_supervisor", "stops_its_supervisor"],
)
def test_what_is_lost_with_the_forking_process_is_named_and_the_run_goes_on(
    attack: str, isolation: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CLOSE_SECONDS", 0.5)
    with serving("Hostile", timeout=1.0, isolation=isolation) as service:
        beside, attacker = begun(service), begun(service, attack=attack)
        before = {pid: started(pid) for pid in processes(service)}
        assert re.search(reason, str(outcome(service.step(attacker, Answer("x")))))
        until(lambda: beside.over is not None)
        with pytest.raises(EpisodeError, match="the process that forks"):
            stepped(service, beside)
        service._options = options("Hostile", 60.0, isolation=isolation)
        assert stepped(service, begun(service)) == End(0.5)
        until(lambda: not any(started(pid) == since is not None for pid, since in before.items()))


@pytest.mark.parametrize("isolation", ["auto", pytest.param("off", marks=pytest.mark.long)])
@pytest.mark.parametrize("attack", ["takes_memory", "takes_memory_in_children"])
def test_an_episode_that_takes_too_much_memory_is_lost_alone(attack: str, isolation: str) -> None:
    with serving("Hostile", isolation=isolation) as service:
        beside, attacker = begun(service), begun(service, attack=attack)
        got = str(outcome(service.step(attacker, Answer("x"))))
        expected = r"took more than 0\.5 GiB of memory.* \(sampler\.reward_memory\)$|raised MemoryError"
        assert re.search(expected, got), got
        assert stepped(service, beside) == End(0.5)


@pytest.mark.long
def test_an_episode_that_forks_without_end_is_lost_alone() -> None:
    with serving("Hostile") as service:
        beside, attacker = begun(service), begun(service, attack="forks_without_end")
        got = outcome(service.step(attacker, Answer("x")))
        assert re.search(r"started more than \d+ processes, this episode the most$", str(got)), got
        assert stepped(service, beside) == End(0.5)


# ---- ends


def test_an_episode_that_is_closed_or_cancelled_frees_its_processes() -> None:
    with serving("Hostile") as service:
        row = {"attack": "leaves_a_session_behind_and_goes_on", "mark": "closed-one"}
        idle, busy, other = begun(service, **row), begun(service, attack="hangs"), begun(service, attack="hangs")
        alone = len(processes(service))
        assert stepped(service, idle) == Said(text="go on")
        assert mentioning("closed-one")
        hanging = [service.step(episode, Answer("x")) for episode in (busy, other)]
        service.close(idle)
        service.close(busy)
        assert hanging[1].cancel()
        assert gone("closed-one") and until(lambda: len(processes(service)) <= alone - 3)
        assert hanging[0].cancelled()
        with pytest.raises(EpisodeError, match="the episode was closed"):
            stepped(service, idle)
        begins = [service.begin({"prompt": "p"}, "0") for _ in range(3)]
        assert begins[1].cancel()
        assert all(isinstance(one.result(PATIENCE), Begun) for one in (begins[0], begins[2]))
        until(lambda: service._hosts[0].load == 2)


def test_nothing_is_left_when_all_is_closed() -> None:
    with serving("Hostile", 2) as service:
        row = {"attack": "leaves_a_session_behind_and_goes_on", "mark": "left-one"}
        stepped(service, begun(service, **row))
        hanging = service.step(begun(service, attack="hangs"), Answer("x"))
        before = {pid: started(pid) for pid in processes(service)}
        assert len(before) >= 5
        service.close_all()
        assert hanging.cancelled()
        assert not any(started(pid) == since is not None for pid, since in before.items())
        assert not mentioning("left-one")
        with pytest.raises(RuntimeError, match="closed"):
            service.begin({"prompt": "p"}, "0")


def test_all_is_closed_while_the_environment_is_imported() -> None:
    service = EpisodeService(options("Hostile"), 1)
    waiting = service.begin({"prompt": "p"}, "0")
    service.close_all()
    assert waiting.cancelled() and not service._hosts[0].thread.is_alive()


RUN = """
import sys, time
from truestep.environments.episodes.environment import Answer
from truestep.environments.episodes.service import EpisodeService
from truestep.environments.process import WorkerOptions
service = EpisodeService(WorkerOptions("environments_of_tests:Hostile", 60.0, 2**29, isolation=sys.argv[1]), 1)
row = {"attack": "leaves_a_session_behind_and_hangs", "mark": "killed-" + "run"}
service.step(service.begin(row, "0").result().episode, Answer("x"))
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("isolation", ["auto", "off"])
def test_a_run_that_is_killed_takes_its_episodes_with_it(isolation: str) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, isolation])
    try:
        until(lambda: run.poll() is not None or mentioning("killed-run"))
        assert run.poll() is None
        before = {pid: started(pid) for pid in descendants(run.pid)}
        assert len(before) >= 4
    finally:
        run.kill()
        run.wait()
    until(lambda: not any(started(pid) == since is not None for pid, since in before.items()))


# ---- what never works


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("environments_of_tests:Nobody", "has no class Nobody"),
        ("no_such_module:Environment", "No module named 'no_such_module'"),
        ("environments_of_tests:Options", "its options do not fit: missing a required argument: 'needed'"),
        ("environments_of_tests:until", "has no function until"),
        ("environments_of_tests:of_parent", "it is not a subclass of truestep's Environment"),
        ("server.dying_at_import:score", r"could not be started \(exit code 9\); last it printed: no licence"),
    ],
)
def test_an_environment_that_cannot_be_imported_ends_the_run(name: str, reason: str) -> None:
    service = EpisodeService(WorkerOptions(name, 60.0, 2**29), 1)
    for future in [service.begin({"prompt": "p"}, "0") for _ in range(2)]:
        with pytest.raises(FailingRewardError, match=reason):
            future.result(PATIENCE)
    with pytest.raises(FailingRewardError, match=reason):
        service.tools(PATIENCE)
    service.close_all()


def test_an_environment_is_checked_before_a_run() -> None:
    assert list(check_environment(options("Calculator"), {"unit": ""})) == ["calculate"]
    with pytest.raises(RewardError, match="'no_such_module'"):
        check_environment(WorkerOptions("no_such_module:Environment", 60.0, 2**29))


def test_first_episodes_that_all_fail_alike_end_the_run() -> None:
    said: list[str] = []
    service = EpisodeService(options("Failing"), 1, say=said.append)
    errors = [one.exception(PATIENCE) for one in [service.begin({"prompt": n}, "0") for n in range(20)]]
    service.close_all()
    (failing,) = [error for error in errors if isinstance(error, FailingRewardError)]
    assert "none of the first 16 episodes has a reward, and for the same reason: the environment's start raised" in str(
        failing
    )
    assert sum(type(error) is EpisodeError for error in errors) == 19
    assert len(said) == 1 and said[0].startswith(
        "warning: the first episode of this run has no reward: the environment"
    )


def test_a_row_that_is_no_json_is_an_episodes_error() -> None:
    with (
        serving("Hostile") as service,
        pytest.raises(EpisodeError, match="start is called with cannot be written as JSON"),
    ):
        service.begin({"prompt": object()}, "0").result(PATIENCE)
