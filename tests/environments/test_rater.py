"""The reward service: it rates beside the run, and what hangs, dies, forges or grows costs its completion alone."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
import torch

import hostile_reward
from processes import mentioning
from truestep.environments import frames, worker
from truestep.environments.descendants import descendants, started
from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rater, check_reward
from truestep.environments.rewards import RewardError

PROMPT = Prompt("a", "sort 2 1 =", {"answer": "1 2"}, (1, 2))
PATIENCE = 240.0  # seconds, against what hangs; nothing here takes as long
LATE = r"^the reward took longer than sampler\.reward_timeout: 5 s$"
LOST = r"^the reward ended its process \("
TOO_LARGE = r"^the reward took more than 0\.5 GiB of memory \(sampler\.reward_memory\)$"
SAID = r"^the reward wrote to the connection that carries rewards: "

OUTCOMES: dict[str, float | str] = {
    "pickles": SAID,
    "guessed_frames": SAID,
    "nested_json": SAID,
    "huge_number_in_json": SAID,
    "announced_gigabytes": SAID,
    "half_a_frame": f"{SAID}|{LATE}",
    "garbage": SAID,
    "replaced_json": 0.25,
    "replaced_frames": SAID,
    "answers_late_from_a_thread": 0.25,
    "looks_for_other_requests": 0.25,
    "exits": r"^the reward raised SystemExit: 3 \(at hostile_reward\.py:\d+\)$",
    "exits_at_once": rf"{LOST}exit code 7\)$",
    "aborts": rf"{LOST}signal 6\)",
    "crashes": rf"{LOST}signal 11\)",
    "interrupts": r"^the reward raised KeyboardInterrupt \(at hostile_reward\.py:\d+\)$",
    "terminates_itself": rf"{LOST}signal 15\)$",
    "kills_its_parent": LATE,  # the first process of a namespace takes no signal from inside
    "stops_its_parent": LATE,
    "leaves_exit_hooks": 0.25,
    "alarm_for_the_next": 0.25,
    "sleeps": LATE,
    "loops": LATE,
    "catches_everything": LATE,
    "stops_itself": LATE,
    "reads_its_input": 0.0,
    "forks_without_end": rf"^the reward started more than 256 processes$|{LATE}",
    # Some attacks are met by two guards, and which of them is first depends on how busy the machine is.
    "takes_all_memory": rf"^the reward raised MemoryError|{TOO_LARGE}|{LATE}",
    "shares_all_memory": rf"{TOO_LARGE}|{LATE}",
    "prints_without_end": rf"^0\.25$|{LATE}",
    "opens_every_file": rf"^the reward raised OSError: \[Errno 24\] Too many open files|{LATE}",
    "writes_an_endless_file": rf"^the reward raised OSError: \[Errno 27\] File too large|{LATE}",
    "recurses": rf"^the reward raised RecursionError: |{LATE}",
    "raises_its_limits": 0.25,
    "leaves_a_session_behind": 0.25,
    "leaves_a_child_and_sleeps": LATE,
    "leaves_threads": 0.25,
    "closes_every_descriptor": rf"{LOST}(exit code \d+|signal 9)\)$",
    "moves_the_connection": rf"{LOST}(exit code \d+|signal 9)\)$",
    "changes_directory": 0.25,
    "changes_clocks": 0.25,
    "deletes_its_module": 0.25,
    "replaces_builtins": SAID,
    "looks_for_secrets": 0.25,
    "returns_nan": r"^the reward returned nan; at most 1e\+38 in size is a reward$",
    "returns_too_much": r"^the reward returned 1e\+300; at most 1e\+38 in size is a reward$",
    "returns_a_huge_integer": r"^the reward returned \(an object that cannot be shown\), which is not a number$",
    "returns_text": r"^the reward returned '1\.0', which is not a number$",
    "returns_nothing": r"^the reward returned None, which is not a number$",
    "returns_an_evil_object": r"^the reward returned \(an object that cannot be shown\), which is not a number$",
    "raises_escapes": r"^the reward raised ValueError: \\x1b\]0;owned\\x07\\x1b\[2Jhaha[ha]*…",
    "raises_what_cannot_be_shown": r"^the reward raised UnreadableError: .*cannot be shown",
    "raises_a_base_exception": r"^the reward raised Base: no Exception \(at hostile_reward\.py:\d+\)$",
}


def options(reward: str = "server.rewards:choosy", timeout: float = 60.0, **others: object) -> WorkerOptions:
    return WorkerOptions(reward, timeout, 2**29, **others)  # type: ignore[arg-type]


def writable(place: Path) -> tuple[str, ...]:
    """A directory that isolated rewards write, also where the tests are root's."""
    place.chmod(0o777)
    return (str(place),)


def outcome(rater: Rater, prompt: Prompt, completion: str, seed: str = "0") -> float | str:
    try:
        return rater.submit(prompt, completion, seed).result(PATIENCE)
    except RewardError as error:
        return str(error)


@pytest.fixture
def rater() -> Iterator[Rater]:
    made = Rater(options(), 1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, float | str]]]:
    """Every attack once, several at a time, and a good completion after each."""
    place = tmp_path_factory.mktemp("attacks")
    os.environ["TRUESTEP_TEST_SECRET"] = "hunter2"
    rater = Rater(options("hostile_reward:reward", 5.0, writable=writable(place)), 6)
    good = {}
    try:
        futures = {}
        for name in OUTCOMES:
            prompt = Prompt(name, "text", {"attack": name, "place": str(place)}, (1,))
            futures[name] = rater.submit(prompt, "a b", name)
            good[name] = rater.submit(Prompt("good", "text", {}, (1,)), "a b c", "good")
        assert not wait([*futures.values(), *good.values()], PATIENCE).not_done
        yield (
            place,
            {
                name: future.result() if future.exception() is None else str(future.exception())
                for name, future in futures.items()
            },
        )
    finally:
        rater.close()
        del os.environ["TRUESTEP_TEST_SECRET"]
    assert all(future.result() == 0.3 for future in good.values()), "an attack costs its own completion alone"


def test_every_attack_is_here() -> None:
    assert set(OUTCOMES) == set(hostile_reward.ATTACKS)


@pytest.mark.parametrize("name", OUTCOMES)
def test_an_attack_ends_as_its_completions_reason(name: str, attacked: tuple[Path, dict[str, float | str]]) -> None:
    got, expected = attacked[1][name], OUTCOMES[name]
    if isinstance(expected, float):
        assert got == expected
    else:
        assert re.search(expected, str(got)), got
        assert len(str(got)) < 500 and str(got).isprintable()


def test_an_attack_reaches_nothing_outside_its_process(attacked: tuple[Path, dict[str, float | str]]) -> None:
    assert not (attacked[0] / "pwned").exists()
    assert hostile_reward.FORGED not in attacked[1].values()


def test_whatever_a_reward_started_ends_with_its_completion(attacked: tuple[Path, dict[str, float | str]]) -> None:
    """A child without a parent after it, and a child in another session after the reward was ended."""
    for name in ("orphan", "child"):
        assert (attacked[0] / name).read_text() != ""
        for _ in range(600):
            if not mentioning(attacked[0] / name):
                break
            time.sleep(0.1)
        assert not mentioning(attacked[0] / name), name


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_reward_is_what_the_function_returns(rater: Rater) -> None:
    assert outcome(rater, PROMPT, "four") == 4.0


def test_a_process_is_started_only_when_there_is_work_for_it() -> None:
    rater = Rater(options("server.rewards:process_id"), 4)
    assert len({outcome(rater, PROMPT, "any") for _ in range(4)}) == 1
    rater.close()


def test_several_rate_at_a_time(tmp_path: Path) -> None:
    rater = Rater(options("server.rewards:meets_another", writable=writable(tmp_path)), 2)
    first = rater.submit(Prompt("first", "p", {"names": [], "place": str(tmp_path)}, (1,)), "first", "0")
    assert first.result(PATIENCE) == 1.0  # which is rated alone
    place = {"names": ["one", "two"], "place": str(tmp_path)}
    futures = [rater.submit(Prompt(name, "p", place, (1,)), name, name) for name in ("one", "two")]
    assert [future.result(PATIENCE) for future in futures] == [1.0, 1.0]
    rater.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("server.rewards:nobody", "has no function nobody"),
        ("no_such_module:score", "No module named 'no_such_module'"),
        ("server.dying_at_import:score", r"could not be started \(exit code 9\); last it printed: no licence"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_named(name: str, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        check_reward(options(name))
    rater = Rater(options(name), 1)
    assert re.search(reason, str(outcome(rater, PROMPT, "any")))
    rater.close()


def test_what_it_draws_depends_on_the_seed_alone() -> None:
    rater = Rater(options("unsteady_reward:reward"), 1)
    first = [outcome(rater, PROMPT, "abc a", seed) for seed in ("1", "2", "1")]
    rater.close()
    other = Rater(options("unsteady_reward:reward"), 1)
    assert [outcome(other, PROMPT, "abc a", seed) for seed in ("2", "1")] == [first[1], first[0]]
    other.close()
    assert first[0] == first[2] != first[1]


@pytest.mark.parametrize(("completion", "failed"), [("raise", 1), ("four", 0)])
def test_the_first_completion_is_rated_alone_and_its_failure_is_said_once(completion: str, failed: int) -> None:
    said: list[str] = []
    rater = Rater(options("server.rewards:choosy"), 4, said.append)
    first, *others = [rater.submit(PROMPT, text, "0") for text in (completion, "raise", "four", "raise")]
    assert rater._held is not None and len(rater._held) == 3 and len(rater._threads) == 1
    assert isinstance(others[-1].exception(PATIENCE), RewardError)
    assert first.done() and rater._held is None
    rater.close()
    assert len(said) == failed
    for text in said:
        head, *trace = text.splitlines()
        assert head.startswith("warning: the first completion of this run has no reward: the reward raised ValueError")
        assert trace[0] == "  Traceback (most recent call last):" and trace[-1] == "  ValueError: no such answer"
        assert "rewards.py" in trace[1] and "in choosy" in trace[1], "the first frame is the user's"


def test_a_rater_that_is_closed_before_its_first_rating_cancels_all() -> None:
    rater = Rater(options("server.rewards:choosy"), 2)
    first, second = (rater.submit(PROMPT, text, "0") for text in ("hang", "four"))
    while not first.running():
        time.sleep(0.01)
    rater.close()
    assert isinstance(first.exception(PATIENCE), RewardError) and second.cancelled()


def test_the_parts_of_a_reward_come_with_it() -> None:
    rater = Rater(options("server.rewards:in_parts"), 1)
    rating = rater.submit(PROMPT, "three", "0").result(PATIENCE)
    assert rating == 5.5 and rating.parts == {"letters": 5.0, "begins with t": 0.5}
    rater.close()


def test_the_environment_holds_what_was_named_and_no_other_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUESTEP_A", "passed on")
    monkeypatch.setenv("TRUESTEP_B", "kept")
    rater = Rater(options("server.rewards:count_variables", environment=("TRUESTEP_A",)), 1)
    assert outcome(rater, PROMPT, "TRUESTEP_A TRUESTEP_B PATH PYTHONPATH WORLD_SIZE") == 3.0
    rater.close()


def test_a_closed_rater_has_ended_its_processes_and_cancels_what_waits() -> None:
    rater = Rater(options("server.rewards:choosy"), 1)
    assert outcome(rater, PROMPT, "four") == 4.0
    supervisors = [worker._supervisor.pid for worker in rater._workers]
    below = descendants(supervisors[0])
    assert below
    hanging, waiting = (rater.submit(PROMPT, text, "0") for text in ("hang", "four"))
    while not hanging.running():
        time.sleep(0.01)
    rater.close()
    rater.close()
    assert waiting.cancelled() and isinstance(hanging.exception(PATIENCE), RewardError)
    assert not any(running(pid) for pid in (*supervisors, *below))


RUN = """
import pathlib, sys, time
from truestep.environments.prompts import Prompt
from truestep.environments.process import WorkerOptions
from truestep.environments.rater import Rater
pathlib.Path(sys.argv[2]).chmod(0o777)
rater = Rater(WorkerOptions("hostile_reward:reward", 60.0, 2**29, isolation=sys.argv[3], writable=(sys.argv[2],)), 1)
rater.submit(Prompt("p", "p", {"attack": sys.argv[1], "place": sys.argv[2]}, (1,)), "x", "0")
time.sleep(600)
"""


@pytest.mark.parametrize("isolation", ["auto", "off"])
def test_a_run_that_is_killed_takes_its_rewards_with_it(isolation: str, tmp_path: Path) -> None:
    """So for what a reward had started in a session of its own."""
    command = [sys.executable, "-c", RUN, "leaves_a_child_and_sleeps", str(tmp_path), isolation]
    run = subprocess.Popen(command)
    child = tmp_path / "child"
    try:
        until(lambda: run.poll() is not None or (child.exists() and child.read_text() != ""))
        assert run.poll() is None
        below = descendants(run.pid)
        assert len(below) >= 3 and set(mentioning(child)) & set(below)
        known = {pid: started(pid) for pid in below}
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    until(lambda: not any(running(pid) and started(pid) == since for pid, since in known.items()))


def until(true: object) -> None:
    end = time.monotonic() + PATIENCE
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"\xff", b"{", b'{"a": 1', b"[" * 100_000, b'{"a": ' + b"9" * 9000 + b"}"]
)
def test_what_is_no_frame_is_an_error(body: bytes) -> None:
    with pytest.raises(frames.FrameError):
        frames.decode(body)


def test_frames_come_as_they_were_sent_in_whatever_portions() -> None:
    ours, theirs = frames.connected()
    reader = frames.Frames(theirs, 1000)
    messages = [{"text": "\ud800\x00é"}, {}, {"number": float("inf")}]
    data = b"".join(frames.encode(message) for message in messages)
    got = []
    for at in range(len(data)):
        ours.send(data[at : at + 1])
        reader.fill()
        while (message := reader.take()) is not None:
            got.append(message)
    assert got == messages and reader.silent()
    ours.send((1001).to_bytes(4, "big"))
    reader.fill()
    with pytest.raises(frames.FrameError, match="1001 bytes announced"):
        reader.take()
    with pytest.raises(frames.LateError):
        frames.Frames(ours, 1000).receive(time.monotonic() + 0.01)
    ours.close()
    with pytest.raises(frames.EndOfFramesError):
        reader.fill()
    with pytest.raises(frames.FrameError, match="at most 10 can be sent"):
        frames.encode({"long": "x" * 10}, 10)


def test_a_worker_has_no_descriptor_and_no_thread_of_the_run(tmp_path: Path) -> None:
    """Also of files that any other program would inherit."""
    secret = tmp_path / "secret"
    secret.write_text("key")
    with secret.open() as file, socket.create_server(("127.0.0.1", 0)) as listener:
        for inherited in (file.fileno(), listener.fileno()):
            os.set_inheritable(inherited, True)
        waits = threading.Event()
        thread = threading.Thread(target=waits.wait)
        thread.start()
        rater = Rater(options("server.rewards:what_it_holds"), 1)
        port = listener.getsockname()[1]
        prompt = Prompt("p", "p", {"secret": str(secret), "port": port}, (1,))
        try:
            assert rater.submit(prompt, "any", "0").result(240) == 0.0
        finally:
            rater.close()
            waits.set()
            thread.join()


def test_a_worker_starts_without_torch_and_without_numpy() -> None:
    code = (
        "import sys, truestep.environments.supervisor, truestep.environments.worker; "
        "sys.exit(bool({'torch', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_it_draws_from_numpy_and_torch_depends_on_the_whole_seed() -> None:
    def drawn(seed: str) -> tuple[float, float, float]:
        worker._seed(seed)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    first, other, again = (drawn(seed) for seed in ("7 1 12 3", "7 1 12 4", "7 1 12 3"))
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))
