"""Weights that are sent to servers' devices: on policy, and what goes wrong is found in time."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_weights
from ranks.cases import on_ranks, train_all
from server.linked_server import BY_LINK, PATIENCE, FakeLinked, GlooWire
from server.models import make_model as make_served_model
from server.runs import server_config
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import merged, read_lines
from truestep.config.schema import Config
from truestep.config.yaml_tree import ConfigError
from truestep.ranks.launch import RankError
from truestep.weight_transfer.link import Sending
from truestep.weight_transfer.nccl import NcclError


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("served") / "model", seed=2)


def linked(directory: Path, urls: list[str], **sections: Any) -> dict[str, Any]:
    options = merged({"sampler": {**BY_LINK, "max_new_tokens": 8}, "logging": {"console": False}}, sections)
    return server_config(directory, urls, **options).model_dump(mode="json", exclude_unset=True)


def check_on_policy(run: Path, steps: int = 4) -> None:
    metrics = read_lines(run / "metrics.jsonl")
    assert len(metrics) == steps
    assert all(abs(line["ratio_new_old"] - 1) < 1e-4 and line["max_staleness"] == 0 for line in metrics)


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.release),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.long),
        pytest.param(2, {"pipeline": 2}, marks=pytest.mark.long),
    ],
)
def test_a_run_through_links_is_on_policy(size: int, parallel: dict[str, int], served: Path, tmp_path: Path) -> None:
    fakes = FakeLinked(served, NAME), FakeLinked(served, NAME)
    with serving(fakes[0]) as first, serving(fakes[1]) as second:
        on_ranks(size, train_all, [linked(tmp_path, [first, second], parallel=parallel)])
    check_on_policy(tmp_path / "run")
    assert not (tmp_path / "run" / "weights").exists(), "nothing went over the disk"
    trained = read_weights(latest(tmp_path / "run"))
    for fake in fakes:
        assert fake.paths.count("/finish_weight_update") == 6, "one ends what an earlier trainer may have begun"
        assert "/collective_rpc" not in fake.paths
        assert fake.paths.count("/init_weight_transfer_engine") == 1
        has = fake._model.state_dict()
        assert all(torch.equal(has[name], value) for name, value in trained.items())


@pytest.mark.parametrize("moment", ["before", pytest.param("update", marks=pytest.mark.release), "middle"])
def test_a_server_that_restarts_joins_again(moment: str, served: Path, tmp_path: Path) -> None:
    """A restart before an update shows when the update has begun: the new process is in no group, and the trainer sees
    to it that it computes again."""
    fake, updates = FakeLinked(served, NAME), []

    def before_start() -> None:
        if moment == "before" and len(updates) == 1 and fake.paths.count("/start_weight_update") == 3:
            fake.restart()

    def lost() -> None:
        fake.restart()
        raise RuntimeError("the connection was lost")

    def before(info: dict[str, Any]) -> None:
        updates.append(info)
        if moment == "update" and len(updates) == 2:
            lost()

    def before_chunk(number: int) -> None:
        if moment == "middle" and len(updates) == 2 and number == 3:
            lost()

    fake.before_start, fake.before_update, fake.before_chunk = before_start, before, before_chunk
    with serving(fake) as url:
        on_ranks(1, train_all, [linked(tmp_path, [url], optimizer={"learning_rate": 1e-2})])
    check_on_policy(tmp_path / "run")
    assert fake.paths.count("/init_weight_transfer_engine") == 2
    names = [name for line in read_lines(tmp_path / "run" / "ledger.jsonl") for name in line["documents"]]
    assert len(names) == len(set(names)) == 64


@pytest.mark.long
def test_a_server_that_stands_still_is_left_and_asked_again(served: Path, tmp_path: Path) -> None:
    fake, chunks = FakeLinked(served, NAME), []

    def before_chunk(number: int) -> None:
        chunks.append(number)
        if chunks.count(1) == 2 and number == 1:
            time.sleep(PATIENCE + 4)
            raise RuntimeError("too late")

    fake.before_chunk = before_chunk
    with serving(fake) as url:
        on_ranks(1, train_all, [linked(tmp_path, [url])])
    check_on_policy(tmp_path / "run")
    assert fake.paths.count("/init_weight_transfer_engine") >= 2


@pytest.mark.parametrize("path", ["/start_weight_update", "/finish_weight_update"])
def test_an_update_whose_beginning_or_end_got_no_answer_is_ended(path: str, served: Path, tmp_path: Path) -> None:
    """The server's layers are empty then, and its engine would end with the next request."""
    fake, honest = FakeLinked(served, NAME), FakeLinked._linked

    async def linked_(path_: str, body: Any) -> Any:
        lost = path_ == path and fake.paths.count(path) == 3
        if not lost or path == "/start_weight_update":
            answer = await honest(fake, path_, body)
        if lost:
            fake._empty = True
            raise ConnectionResetError
        return answer

    fake._linked = linked_  # type: ignore[method-assign]
    with serving(fake) as url:
        on_ranks(1, train_all, [linked(tmp_path, [url])])
    check_on_policy(tmp_path / "run")


def train_with_a_wire_that_fails(config: dict[str, Any]) -> None:
    """NCCL refuses to send what another rank of its group will not take, and to leave the group."""
    honest, number = GlooWire.send, count()

    def abandon(self: GlooWire) -> None:
        raise NcclError("ncclCommAbort: unhandled system error")

    def send(self: GlooWire, content: torch.Tensor) -> Sending:
        if next(number) == 6:
            raise NcclError("ncclBroadcast: remote process exited or there was a network error")
        return honest(self, content)

    GlooWire.send, GlooWire.abandon = send, abandon  # type: ignore[method-assign]
    train_all([config])


def test_a_wire_that_fails_in_the_middle_is_a_server_that_is_lost(served: Path, tmp_path: Path) -> None:
    fake = FakeLinked(served, NAME)
    with serving(fake) as url:
        on_ranks(1, train_with_a_wire_that_fails, linked(tmp_path, [url]))
    check_on_policy(tmp_path / "run")
    assert fake.paths.count("/init_weight_transfer_engine") == 2


def test_an_update_that_a_killed_trainer_left_open_does_not_end_the_engine(served: Path, tmp_path: Path) -> None:
    fake = FakeLinked(served, NAME)
    fake.updating = fake._empty = True
    with serving(fake) as url:
        on_ranks(1, train_all, [linked(tmp_path, [url])])
    check_on_policy(tmp_path / "run")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing", "was given the weights of version"),
        pytest.param("half", "was given the weights of version", marks=pytest.mark.long),
        pytest.param("another layer's", "was given the weights of version", marks=pytest.mark.long),
        ("keeps its cache", "its prefix cache is still of older weights"),
    ],
)
def test_a_server_that_says_yes_and_has_other_weights_ends_the_run(
    fault: str, said: str, served: Path, tmp_path: Path
) -> None:
    fake = FakeLinked(served, NAME)
    loads = iter([False, *[True] * 9])

    def before(info: dict[str, Any]) -> None:
        if next(loads):
            fake.keeps_cache = fault == "keeps its cache"
            fake.takes = "all" if fake.keeps_cache else fault

    fake.before_update = before
    with serving(fake) as url, pytest.raises(RankError, match=said):
        on_ranks(1, train_all, [linked(tmp_path, [url], optimizer={"learning_rate": 1e-2})])
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 1, "nothing of the wrong weights was trained on"


def test_an_engine_that_dies_in_the_middle_of_an_update_is_given_its_weights_again(
    served: Path, tmp_path: Path
) -> None:
    """vLLM says so once, and then ends: nobody answers until it is started again."""
    fake, down = FakeLinked(served, NAME), list[str]()
    honest = fake._reply

    async def reply(path: str, body: Any) -> Any:
        if path == "/start_weight_update" and fake.paths.count(path) == 3 and not down:
            fake.restart()
            down.append(path)
            raise RuntimeError("EngineCore encountered an issue")
        if 0 < len(down) < 4:
            down.append(path)
            raise ConnectionResetError
        return await honest(path, body)

    fake._reply = reply  # type: ignore[method-assign]
    with serving(fake) as url:
        on_ranks(1, train_all, [linked(tmp_path, [url])])
    assert len(down) == 4
    check_on_policy(tmp_path / "run")


def test_a_server_with_another_backend_is_refused_by_name(served: Path, tmp_path: Path) -> None:
    fake = FakeLinked(served, NAME)
    fake.refuses = True
    with serving(fake) as url, pytest.raises(RankError, match='transfer: nccl: .*unexpected.*"backend": "nccl"'):
        on_ranks(1, train_all, [linked(tmp_path, [url])])


def test_an_update_that_a_killed_trainer_began_is_ended(served: Path, tmp_path: Path) -> None:
    fake = FakeLinked(served, NAME)
    fake.updating = True
    with serving(fake) as url:
        on_ranks(1, train_all, [linked(tmp_path, [url])])
    check_on_policy(tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"sampler": {"protocol": "sglang"}}, "nccl needs sampler.protocol: vllm"),
        ({"sampler": {"protocol": "vllm"}, "model": {"device": "cpu"}}, "sends weights from a GPU"),
    ],
)
def test_what_cannot_be_sent_is_refused(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        Config.model_validate(linked(tmp_path, ["http://127.0.0.1:1"], **sections))
