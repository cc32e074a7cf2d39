"""A run that is slow goes on for as long as it takes; one that stands still ends, and says what it waited for."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from ranks.cases import train_all
from ranks.progress_cases import stand_still, train_slowly
from ranks.test_train_over_ranks import config
from server.runs import server_config
from small_runs import sort_prompts, word_model, write_lines, write_rollouts
from tiny import make_model
from truestep.config.custom import load_custom
from truestep.files import whole as files
from truestep.process import progress
from truestep.ranks import group, place
from truestep.ranks.launch import start_ranks
from truestep.ranks.place import find_place
from truestep.ranks.processes import Activity, Identity

TIMEOUT = 0.7
# Of runs that must not be ended: a busy machine may leave a process without a turn for some seconds.
LONG_TIMEOUT = 6.0
Model = Callable[[str], Path]


class Started:
    """Ranks that run."""

    def __init__(self, size: int, target: Callable[..., None], *arguments: Any, **options: Any):
        self.processes, self.folder, self._store = start_ranks(size, target, arguments, **options)

    def end(self) -> None:
        """Leave nothing of them."""
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder)

    def wait(self, ranks: list[int] | None = None) -> list[int | None]:
        waited: list[BaseProcess] = [self.processes[rank] for rank in ranks or range(len(self.processes))]
        for process in waited:
            process.join(timeout=280)
        return [process.exitcode for process in waited]

    def said(self) -> str:
        return "".join(file.read_text(encoding="utf-8") for file in sorted(self.folder.iterdir()))


def slow_config(what: str, directory: Path, timeout: float) -> dict[str, Any]:
    directory.mkdir()
    write_rollouts(directory / "rollouts.jsonl", 14)
    sections: dict[str, Any] = {"schedule": {"stall_timeout": timeout, "steps": 1}, "checkpoint": {"every": 0}}
    if what == "evaluation":
        model = word_model(directory / "model")
        prompts = write_lines(directory / "prompts.jsonl", sort_prompts(40))
        evaluation = {"prompts": str(prompts), "reward": "plain_rewards:digit_reward", "max_new_tokens": 8}
        records = [{"input_ids": [2, 3, 4], "prompt_length": 1, "logprobs": [-1.0, -1.0], "advantage": 1.0}] * 14
        write_lines(directory / "rollouts.jsonl", [record | {"id": str(n)} for n, record in enumerate(records)])
        sections |= {"evaluation": evaluation | {"every": 5, "batch_size": 1}}
    else:
        model = make_model(directory / "model", "llama", num_hidden_layers=40 if what == "step" else 20)
        sections |= {"data": {"tokens_per_microbatch": 400}}
    return config(model, directory / "rollouts.jsonl", directory / "run", **sections)


# What is slowed, its phase, and the seconds of each of its pieces: a layer of one micro-batch, a forward pass of a
# layer while a token is sampled, a page written, a tensor read.
SLOW = [
    ("step", "computing step 1", 1.6),
    ("evaluation", "evaluating after step 0", 0.1),
    ("save", "saving after step 1", 0.28),
    ("load", "loading the model", 1.3),
]


@pytest.mark.long
def test_what_takes_ten_times_the_timeout_passes(tmp_path: Path) -> None:
    """All four at a time, since they sleep. Each is without a sign of life for less than the timeout alone."""
    runs = {what: slow_config(what, tmp_path / what, LONG_TIMEOUT) for what, _, _ in SLOW}
    started = [Started(2, train_slowly, runs[what], what, seconds, str(tmp_path)) for what, _, seconds in SLOW]
    try:
        ended = [one.wait() for one in started]
        assert ended == [[0, 0]] * len(SLOW), "".join(one.said() for one in started)
    finally:
        for one in started:
            one.end()
    for what, phase, _ in SLOW:
        spans = dict(json.loads((tmp_path / f"{what}.json").read_text(encoding="utf-8")))
        assert spans[phase] >= 10 * LONG_TIMEOUT, (what, spans)


STILL = [
    ("stopped", 2, "computing step 2", ["rank 1 has made no progress for ", "its process stopped by a signal"]),
    (
        "disk",
        1,
        "saving after step 2",
        ["the run has made no", "waiting for the disk to write ", "tensors.py"],
    ),
    ("sync", 2, "saving after step 2", ["rank 0 has made no progress", "the disk to write ", "the others wait for it"]),
    ("source", 1, "reading the data", ["the run has made no progress", "reading the data for ", "at files.py:"]),
]


def test_what_stands_still_is_named(tiny_model: Model, tmp_path: Path) -> None:
    """All at a time, since they do nothing."""
    started = []
    try:
        for what, size, phase, _ in STILL:
            (tmp_path / what).mkdir()
            rollouts = tmp_path / what / "rollouts.jsonl"
            write_rollouts(rollouts, 40)
            given = config(tiny_model("llama"), rollouts, tmp_path / what / "run", schedule={"stall_timeout": TIMEOUT})
            late = size - 1 if what == "stopped" else 0
            started.append(Started(size, stand_still, given, what, late, phase))
        for (what, size, _, expected), ranks in zip(STILL, started, strict=True):
            codes = ranks.wait([rank for rank in range(size) if (what, rank) != ("stopped", size - 1)])
            said = ranks.said()
            assert all(codes), (codes, said)
            for words in expected:
                assert words in said
            assert f"(schedule.stall_timeout: {TIMEOUT:g})" in said
    finally:
        for one in started:
            one.end()


def activity_of(ready: str, work: str, expected: str = "") -> dict[str, float]:
    """What is seen of a process that does `work` for ever: once, or until it is what is expected."""
    command = [sys.executable, "-c", f"{ready}\nprint(flush=True)\n{work}"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.1)
        seen, deadline = Activity(child.pid), time.monotonic() + 60
        while True:
            time.sleep(0.5)
            found = seen.since_last()
            if not expected or expected in found or time.monotonic() > deadline:
                return found
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


COMPUTES = "while True: pass"
WORKS = {
    "sleeps": ("import time", "time.sleep(1000)", ""),
    "looks around": ("import time", "while True: time.sleep(0.05)", ""),
    "has a child that sleeps": ("import subprocess; child = subprocess.Popen(['sleep', '1000'])", "child.wait()", ""),
    "computes": ("", COMPUTES, "seconds of computing"),
    "has a child that computes": (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {COMPUTES!r}])",
        "child.wait()",
        "seconds of computing",
    ),
}


@pytest.mark.parametrize("work", WORKS)
def test_a_process_is_seen_to_work(work: str) -> None:
    ready, does, expected = WORKS[work]
    found = activity_of(ready, does, expected)
    found.pop("seconds ready to run", None)  # as on a machine that has too much to do
    assert expected in found if expected else not found


def test_bytes_written_in_one_call_are_seen_while_it_runs(tmp_path: Path) -> None:
    """As in a save by one call of another library."""
    ready = f"f = open({str(tmp_path / 'file')!r}, 'wb', buffering=0); content = bytes(2**26)"
    moved = "bytes read or written"
    assert activity_of(ready, "while True: f.seek(0); f.write(content)", moved)[moved] > 2**20


def test_a_process_is_told_from_what_is_left_of_it() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        identity = Identity(Identity.own().machine, child.pid, int(_started(child.pid)))
        assert identity.look() == "there"
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while identity.look() != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert identity.look() == "stopped"
        assert Identity(identity.machine, child.pid, identity.started + 1).look() == "gone", "a later process's number"
        assert Identity("another machine", child.pid, identity.started).look() == "unknown"
    finally:
        child.kill()
    deadline = time.monotonic() + 60
    while identity.look() != "gone" and time.monotonic() < deadline:  # nobody has waited for it: it is a zombie
        time.sleep(0.01)
    assert identity.look() == "gone"
    child.wait()
    assert identity.look() == "gone"


def _started(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


def test_what_waits_is_known_by_thread() -> None:
    with progress.waiting_for("documents"), progress.waiting_for(progress.OTHER_RANKS):
        assert progress.waits()[-2:] == ["documents", progress.OTHER_RANKS]
        assert progress.waits(threading.get_ident())[-1] == progress.OTHER_RANKS
        assert find_place().waits is (threading.current_thread() is threading.main_thread())
    assert progress.waits(threading.get_ident()) == []


def test_a_look_at_other_threads_keeps_nothing_that_they_hold() -> None:
    class Held:
        pass

    def hold() -> weakref.ref[Held]:
        held = Held()
        looking = threading.Thread(target=find_place)
        looking.start()
        looking.join()
        find_place()
        return weakref.ref(held)

    gc.disable()
    try:
        assert hold()() is None, "only the garbage collector would free it"
    finally:
        gc.enable()


def test_a_place_is_found_in_an_installed_truestep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip installs it: in a directory where all other code is passed over."""
    monkeypatch.setattr(place, "_INSTALLED", (str(Path(progress.__file__).parents[1]) + os.sep,))
    (tmp_path / "file").write_text("")
    seen: list[str] = []
    monkeypatch.setattr("os.fsync", lambda handle: seen.append(_below_installed(find_place).text))
    monkeypatch.setattr(place, "_is_own", lambda file, own=place._is_own: file != __file__ and own(file))
    files.sync_tree(tmp_path)
    assert seen[0].startswith("whole.py:") and seen[0].endswith(" in sync_tree")


def test_a_place_in_an_installed_package_of_the_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "users_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text("def score(look):\n    return look()\n")
    monkeypatch.syspath_prepend(str(package.parent))
    score = load_custom("reward", "users_package.rewards:score")
    assert score(lambda: _below_installed(find_place).text).startswith("test_progress.py:")
    assert score(find_place).text == "rewards.py:2 in score"


def _below_installed(look: Callable[[], Any]) -> Any:
    return look()


def connect() -> None:
    with group._connecting(0.5, lambda reason: print(f"gives up: {reason}", file=sys.stderr, flush=True)):
        group.dist.init_process_group("gloo", timeout=group._NO_CLOCK)


def test_ranks_that_cannot_be_connected_are_named() -> None:
    """One of two was never started. Its fellow waits inside a call of torch's, where nothing else watches."""
    rank = Started(1, connect, environment={"WORLD_SIZE": "2"})
    try:
        assert rank.wait() == [1]
        reason = "the 2 ranks were not connected in 0 s"
        assert f"error: rank 0 ends: {reason}" in rank.said()
        assert f"gives up: {reason}" in rank.said(), "where its agent is ended, if it must be"
    finally:
        rank.end()


@pytest.mark.release  # beside other tests the machine has more to do than it means
def test_a_healthy_run_on_a_machine_with_far_too_much_to_do_goes_on(tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 60)
    given = config(
        tiny_model("llama"), tmp_path / "rollouts.jsonl", tmp_path / "run", schedule={"stall_timeout": TIMEOUT}
    )
    busy = [subprocess.Popen([sys.executable, "-c", COMPUTES]) for _ in range(5 * (os.cpu_count() or 1))]
    try:
        run = Started(2, train_all, [given])
        try:
            assert run.wait() == [0, 0], run.said()
        finally:
            run.end()
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.long
def test_a_server_that_never_answers_is_named(tmp_path: Path) -> None:
    """It takes the connection and says nothing; the request alone may last for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        given = server_config(tmp_path, [url], schedule={"stall_timeout": TIMEOUT})
        run = Started(1, train_all, [given.model_dump(mode="json")])
        try:
            assert run.wait() == [1]
            said = run.said()
            assert "the run has made no progress" in said and f"waiting for {url} to answer" in said
        finally:
            run.end()
