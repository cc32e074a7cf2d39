"""Weights through memory, from trainers on several ranks: on policy, and what goes wrong is found in time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_weights
from ranks.cases import on_ranks, train_all
from server.memory_server import FakeVllm
from server.models import make_model as make_served_model
from server.runs import server_config
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import merged, read_lines
from truestep.ranks.launch import RankError
from truestep.transfer.memory import _remove_abandoned


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("served") / "model", seed=2)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in the place of /dev/shm, in which nothing stays that the next run would not remove."""
    (tmp_path / "memory").mkdir()
    yield tmp_path / "memory"
    _remove_abandoned(tmp_path / "memory")  # of ranks that were ended before they could close
    assert not list((tmp_path / "memory").iterdir())


def run_config(directory: Path, urls: list[str], **sections: Any) -> dict[str, Any]:
    sampler = {"transfer": "memory", "memory_directory": str(directory / "memory")}
    options = merged({"sampler": sampler, "logging": {"console": False}}, sections)
    return server_config(directory, urls, **options).model_dump(mode="json", exclude_unset=True)


def check_on_policy(run: Path, steps: int = 4) -> None:
    metrics = read_lines(run / "metrics.jsonl")
    assert len(metrics) == steps
    assert all(abs(line["ratio_new_old"] - 1) < 1e-4 and line["max_staleness"] == 0 for line in metrics)


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (1, {}),
        (2, {}),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.release),
        pytest.param(2, {"pipeline": 2}, marks=pytest.mark.long),
        pytest.param(2, {"context": 2}, marks=pytest.mark.release),
        pytest.param(4, {"pipeline": 2, "data_shard": 2}, marks=pytest.mark.long),
    ],
)
def test_a_run_through_memory_is_on_policy(
    size: int, parallel: dict[str, int], served: Path, memory: Path, tmp_path: Path
) -> None:
    fake = FakeVllm(served, NAME)
    with serving(fake) as url:
        on_ranks(size, train_all, [run_config(tmp_path, [url], parallel=parallel)])
    assert not list(memory.iterdir()), "a run that ends frees its memory"
    check_on_policy(tmp_path / "run")
    assert fake.paths.count("/finish_weight_update") == 5 and "/collective_rpc" not in fake.paths
    assert not (tmp_path / "run" / "weights").exists(), "nothing went over the disk"
    has = fake._model.state_dict()
    for name, value in read_weights(latest(tmp_path / "run")).items():
        assert torch.equal(has[name], value), f"{name}: the server has the weights of the last step"


def test_weights_are_checked_before_the_pause(served: Path, memory: Path, tmp_path: Path) -> None:
    fake = FakeVllm(served, NAME)
    with serving(fake) as url:
        on_ranks(1, train_all, [run_config(tmp_path, [url])])
    steps = [
        "stage" if (body or {}).get("update_info", {}).get("stage") else path.partition("?")[0]
        for path, body in fake.asked
        if path.partition("?")[0] in ("/pause", "/resume", "/update_weights")
    ]
    assert steps[0] == "/resume", "a trainer that was killed may have left it paused"
    assert steps[1:] == ["stage", "/pause", "/update_weights", "/resume"] * 5


def test_each_server_gets_weights_as_it_can(served: Path, memory: Path, tmp_path: Path) -> None:
    reached, other = FakeVllm(served, NAME), FakeVllm(served, NAME, in_memory=False)
    with serving(reached) as first, serving(other) as second:
        on_ranks(2, train_all, [run_config(tmp_path, [first, second], sampler={"transfer": "auto"})])
    check_on_policy(tmp_path / "run")
    assert reached.paths.count("/finish_weight_update") == other.paths.count("/collective_rpc") == 5
    for name, value in reached._model.state_dict().items():
        assert torch.equal(other._model.state_dict()[name], value)


def test_a_server_that_does_not_see_the_memory_is_refused_where_nothing_else_is_wanted(
    served: Path, memory: Path, tmp_path: Path
) -> None:
    fake = FakeVllm(served, NAME, in_memory=False)
    with serving(fake) as url, pytest.raises(RankError, match="sampler.transfer: memory: .* does not take weights"):
        on_ranks(1, train_all, [run_config(tmp_path, [url])])


def test_an_update_that_a_killed_trainer_began_is_ended(served: Path, memory: Path, tmp_path: Path) -> None:
    fake = FakeVllm(served, NAME)
    fake.updating = True
    with serving(fake) as url:
        on_ranks(1, train_all, [run_config(tmp_path, [url])])
    check_on_policy(tmp_path / "run")


# ---- faults: each is found before anything of the wrong weights is trained on


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing", "was given the weights of version"),
        pytest.param("half", "was given the weights of version", marks=pytest.mark.long),
        pytest.param("another layer's", "was given the weights of version", marks=pytest.mark.long),
        ("keeps its cache", "its prefix cache is that of older weights"),
    ],
)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_server_that_says_yes_and_has_other_weights_ends_the_run(
    fault: str, said: str, size: int, served: Path, memory: Path, tmp_path: Path
) -> None:
    fake = FakeVllm(served, NAME)
    loads = iter([False, *[True] * 9])

    def before(info: dict[str, Any]) -> None:
        if info.get("load") and next(loads):
            fake.takes, fake.keeps_cache = (fault, False) if fault in ("nothing", "half") else ("all", False)
            fake.takes = fault if fault == "another layer's" else fake.takes
            fake.keeps_cache = fault == "keeps its cache"

    fake.before_update = before
    with serving(fake) as url, pytest.raises(RankError, match=said):
        on_ranks(size, train_all, [run_config(tmp_path, [url], optimizer={"learning_rate": 1e-2})])
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 1, "nothing of the wrong weights was trained on"


def test_a_tensor_that_changed_on_its_way_is_named(served: Path, memory: Path, tmp_path: Path) -> None:
    fake = FakeVllm(served, NAME)
    stages = iter([False, True, False])

    def before(info: dict[str, Any]) -> None:
        if info.get("stage") and next(stages):
            slot = next(iter(sorted(Path(info["stage"]).parent.glob("slot-1"))))
            with slot.open("r+b") as content:
                content.seek(1000)
                content.write(b"\xff\x7f\xff\x7f")

    fake.before_update = before
    with serving(fake) as url, pytest.raises(RankError, match="was given weights in memory: .* arrived with checksum"):
        on_ranks(1, train_all, [run_config(tmp_path, [url])])
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 1


@pytest.mark.parametrize(
    "moment", [*(pytest.param(one, marks=pytest.mark.long) for one in ("stage", "load")), "answers"]
)
def test_a_server_that_restarts_is_given_its_weights_again(
    moment: str, served: Path, memory: Path, tmp_path: Path
) -> None:
    fake = FakeVllm(served, NAME)
    seen: list[str] = []
    honest = fake._last

    def before(info: dict[str, Any]) -> None:
        kind = "stage" if info.get("stage") else "load"
        seen.append(kind)
        if kind == moment and seen.count(kind) == 2:
            fake.restart()
            raise RuntimeError("the connection was lost")

    async def last(body: dict[str, Any]) -> dict[str, Any]:
        seen.append("answer")
        if moment == "answers" and seen.count("answer") == 38:
            fake.restart()  # between the probe of its weights and their use
        return await honest(body)

    fake.before_update, fake._last = before, last  # type: ignore[method-assign]
    with serving(fake) as url:
        on_ranks(1, train_all, [run_config(tmp_path, [url], optimizer={"learning_rate": 1e-2})])
    check_on_policy(tmp_path / "run")
    names = [name for line in read_lines(tmp_path / "run" / "ledger.jsonl") for name in line["documents"]]
    assert len(names) == len(set(names)) == 64


def test_an_engine_that_dies_in_the_middle_of_an_update_is_given_its_weights_again(
    served: Path, memory: Path, tmp_path: Path
) -> None:
    """vLLM says so once, and then ends: nobody answers until it is started again."""
    fake, down = FakeVllm(served, NAME), list[str]()
    honest = fake._reply

    async def reply(path: str, body: Any) -> Any:
        if path == "/start_weight_update" and fake.paths.count(path) == 2 and not down:
            fake.restart()
            down.append(path)
            raise RuntimeError("EngineCore encountered an issue")
        if 0 < len(down) < 4:
            down.append(path)
            raise ConnectionResetError
        return await honest(path, body)

    fake._reply = reply  # type: ignore[method-assign]
    with serving(fake) as url:
        on_ranks(1, train_all, [run_config(tmp_path, [url])])
    assert len(down) == 4
    check_on_policy(tmp_path / "run")


def train_and_kill(config: dict[str, Any], rank: int, tensors: int) -> None:
    """This rank is killed at so many calls that add tensors, or gather them, of the second publication."""
    from truestep.policy.weights.protocol import Weights

    honest, calls = Weights.on_device_of_first, [0]

    def caught(self: Weights, *arguments: Any) -> dict[str, torch.Tensor]:
        calls[0] += 1
        if int(os.environ["RANK"]) == rank and calls[0] == tensors:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(self, *arguments)

    Weights.on_device_of_first = caught  # type: ignore[method-assign]
    train_all([config])


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_the_middle(rank: int, served: Path, memory: Path, tmp_path: Path) -> None:
    fake = FakeVllm(served, NAME)
    with serving(fake) as url:
        config = run_config(tmp_path, [url], checkpoint={"every": 1})
        with pytest.raises(RankError, match="rank . is gone|-9"):
            on_ranks(2, train_and_kill, config, rank, 7)
        on_ranks(2, train_all, [config])
    check_on_policy(tmp_path / "run")
    names = [name for line in read_lines(tmp_path / "run" / "ledger.jsonl") for name in line["documents"]]
    assert len(names) == len(set(names)) == 64


def test_the_trainer_s_memory_is_two_copies(served: Path, memory: Path, tmp_path: Path) -> None:
    """However many times weights are published."""
    fake, sizes = FakeVllm(served, NAME), []
    lock = threading.Lock()

    def before(info: dict[str, Any]) -> None:
        with lock:
            sizes.append(
                sum(slot.stat().st_size for slot in Path(info.get("stage") or info["load"]).parent.glob("slot-*"))
            )

    fake.before_update = before
    with serving(fake) as url:
        on_ranks(1, train_all, [run_config(tmp_path, [url])])
    whole = sum(value.nbytes for value in fake._model.state_dict().values())
    assert len(set(sizes[4:])) == 1 and sizes[-1] < 2.6 * whole
