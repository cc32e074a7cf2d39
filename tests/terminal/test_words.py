"""Work, amounts and durations in few words."""

from __future__ import annotations

import threading

import pytest

from truestep.process import progress
from truestep.run.terminal.words import doing_in_words, duration, size, work_in_words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0:00"), (7.9, "0:07"), (760, "12:40"), (11560, "3:12:40"), (2 * 86400 + 11520, "2 d 03:12"), (-1, "0:00")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_400, "99.4 kB"),
        (412e6, "412 MB"),
        (999.6e6, "1.0 GB"),
        (16e9, "16.0 GB"),
    ],
)
def test_sizes(count: float, words: str) -> None:
    assert size(count) == words


def test_work_says_how_far_it_has_come() -> None:
    with progress.working("sampling", "completions", 256):
        progress.made("completions", 112)
        (work,) = progress.works()
        assert work_in_words(work, 900.4) == "sampling 112/256 completions, 900 tok/s"
        progress.made("tokens", 3180)
        assert work_in_words(work, 900.4) == "sampling 112/256 completions, 3,180 tokens, 900 tok/s"
        with progress.working("rating", "rewards"):
            progress.made("rewards")
            assert work_in_words(progress.works()[-1]) == "rating 1 reward"
        with progress.working("scoring", "micro-batches"):
            progress.made("micro-batches")
            assert work_in_words(progress.works()[-1]) == "scoring 1 micro-batch"
        with progress.working("tried", "causes"):
            progress.made("causes")
            assert work_in_words(progress.works()[-1]) == "tried 1 cause"
        with progress.working("training", "micro-batches", 8):
            progress.made("micro-batches", 2)
            assert work_in_words(progress.works()[-1], 900) == "training micro-batch 3/8"
            progress.made("micro-batches", 6)
            assert work_in_words(progress.works()[-1]) == "training micro-batch 8/8"
        with progress.working("reading weights", "bytes read", 1.4e9):
            progress.made("bytes read", 2e8)
            assert work_in_words(progress.works()[-1]) == "reading weights 200 MB of 1.4 GB"
        with progress.working("writing", "bytes written"):
            assert work_in_words(progress.works()[-1]) == "writing"
            progress.made("bytes written", 3.2e6)
            assert work_in_words(progress.works()[-1]) == "writing 3.2 MB"
        assert progress.works() == [work], "what has ended is not shown"
    assert progress.works() == []


def test_the_main_threads_work_is_shown_before_that_of_others() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with progress.working("looking ahead", "groups", 4):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with progress.working("training", "micro-batches", 2):
        thread.start()
        entered.wait(60)
        names = [work.name for work in progress.works()]
        leave.set()
        thread.join()
    assert names == ["looking ahead", "training"]


def test_a_narrow_terminal_keeps_the_work_in_hand() -> None:
    with progress.working("sampling", "completions", 256):
        works = progress.works()
        phase = "waiting for the documents of step 1203"
        said = [doing_in_words(phase, works, [], 75, 900, width) for width in (100, 60, 40, 20)]
    assert said == [
        "waiting for the documents of step 1203: sampling 0/256 completions, 900 tok/s  1:15",
        "sampling 0/256 completions, 900 tok/s  1:15",
        "sampling 0/256 completions, 900 tok/s",
        "sampling 0/256 comp…",
    ]
    assert doing_in_words("", [], ["other ranks"], 0, 0, 80) == "waiting for other ranks"
    assert doing_in_words("saving after step 3", [], [], 0.3, 0, 80) == "saving after step 3"
