"""The session's ranks: what a case leaves, and how it ends, is nothing to the next one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import pool
from ranks.cases import on_ranks
from truestep.config.schema import Config
from truestep.ranks import launch
from truestep.ranks.axes import RankError
from truestep.ranks.watch import Watch

SIZE = 3  # of no other test: its pool is this module's


@pytest.fixture(autouse=True)
def _own_pool() -> Iterator[None]:
    yield
    if SIZE in pool._pools:
        pool._pools.pop(SIZE).close()


def write_what_is_there(folder: str) -> None:
    """A process, its random numbers, its directory, and a variable that another case sets."""
    found = [os.getpid(), torch.rand(1).item(), os.getcwd(), os.environ.get("LEFT", ""), "left by a case" in sys.path]
    Path(folder, os.environ["RANK"]).write_text("\n".join(map(str, found)))


def leave_variables() -> None:
    os.environ["LEFT"] = "by a case"
    torch.set_default_dtype(torch.float64)
    sys.path.append("left by a case")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave_functions_and_values() -> None:
    """Of a class, in the place of an inherited one, of truestep's modules and of others."""
    Watch.phase = lambda self, name: None  # type: ignore[method-assign]
    Config.model_validate = lambda *arguments, **options: None  # type: ignore[assignment,method-assign]
    launch._FOLDER = "elsewhere"  # type: ignore[misc]
    dist.all_reduce = print


def find_none_of_them() -> None:
    assert Watch.phase.__module__ == Watch.__module__
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "model_validate" not in vars(Config)
    assert launch._FOLDER != "elsewhere" and dist.all_reduce is not print


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("planted")


def die_on_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def seen(folder: Path) -> list[list[str]]:
    folder.mkdir()
    on_ranks(SIZE, write_what_is_there, str(folder))
    return [(folder / str(rank)).read_text().split("\n") for rank in range(SIZE)]


def test_the_same_processes_are_as_good_as_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = seen(tmp_path / "first")
    on_ranks(SIZE, leave_variables)
    on_ranks(SIZE, leave_functions_and_values)
    on_ranks(SIZE, find_none_of_them)
    assert seen(tmp_path / "second") == first
    assert all(line[2:] == [str(tmp_path), "", "False"] for line in first)
    assert len({line[0] for line in first}) == SIZE


@pytest.mark.parametrize(
    ("fail", "says"), [(fail_on_one, "rank 1: ZeroDivisionError: planted"), (die_on_one, r"exit codes: \{1: -9\}")]
)
def test_a_case_that_fails_says_why_and_harms_no_other(
    fail: pool.Callable[[], None], says: str, tmp_path: Path
) -> None:
    first = seen(tmp_path / "first")
    with pytest.raises(RankError, match=says):
        on_ranks(SIZE, fail)
    second = seen(tmp_path / "second")
    assert not {line[0] for line in first} & {line[0] for line in second}


def test_a_failure_shows_only_its_own_cases_words(tmp_path: Path) -> None:
    on_ranks(SIZE, print, "said by an earlier case")
    with pytest.raises(RankError) as error:
        on_ranks(SIZE, fail_on_one)
    assert "earlier" not in str(error.value)
