"""Tensors over a link: what is announced is what is sent, and arrives as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapters import write_adapter
from ranks.cases import on_ranks
from server.gloo_in_vllm import broadcast
from server.linked_server import read
from server.test_publication import config_of, stored
from tiny import expert_model, make_model
from truestep.config.schema import Config
from truestep.generate.servers.weight_files import WeightsDirectory
from truestep.model.adapter import AdapterSource
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.model.tensor_stream import TensorStream
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.weight_transfer.link import LinkError, Sender, Sending, join
from truestep.weight_transfer.packed import Entry, as_bytes, chunks_of, update_info

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8)


class Done:
    def is_completed(self) -> bool:
        return True


class Never:
    def is_completed(self) -> bool:
        return False


class Kept:
    """A wire that keeps what it carries."""

    device = torch.device("cpu")

    def __init__(
        self, sending: Callable[[], Sending] = Done, joining: Callable[[int], Any] = lambda ranks: None
    ) -> None:
        self.messages: list[torch.Tensor] = []
        self._sending, self._joining = sending, joining

    def join(self, ranks: int) -> None:
        self._joining(ranks)

    def send(self, content: torch.Tensor) -> Sending:
        self.messages.append(content.clone())
        return self._sending()


class Gloo:
    """A wire between processes of one machine."""

    device = torch.device("cpu")

    def __init__(self, folder: str, rank: int):
        store = dist.FileStore(str(Path(folder, "store")), 2)
        self._group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    def join(self, ranks: int) -> None: ...

    def send(self, content: torch.Tensor) -> Sending:
        sent: Sending = broadcast(self._group, content)
        return sent

    def receive(self, size: int) -> torch.Tensor:
        content = torch.empty(size, dtype=torch.uint8)
        broadcast(self._group, content).wait()
        return content


def entries_of(tensors: dict[str, torch.Tensor]) -> list[Entry]:
    return [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def same(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(right) and all(
        found[name].dtype == value.dtype and found[name].shape == value.shape
        and torch.equal(as_bytes(found[name].contiguous()), as_bytes(value.contiguous()))
        for name, value in right.items()
    )  # fmt: skip


shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12), st.integers(1, 400), st.integers(1, 4))
def test_any_tensors_arrive_as_they_were(kinds: list[tuple[torch.dtype, list[int]]], size: int, at_once: int) -> None:
    tensors = {
        f"t{number}": torch.randint(0, 100, shape).to(dtype) for number, (dtype, shape) in enumerate(kinds)
    }  # fmt: skip
    wire = Kept()
    sender = Sender(wire, size)
    for _ in range(2):
        wire.messages.clear()
        sender.begin(entries_of(tensors))
        names = list(tensors)
        for start in range(0, len(names), at_once):
            sender.add({name: tensors[name] for name in names[start : start + at_once]})
        sender.finish()
        messages = iter(wire.messages)
        found = read(update_info(entries_of(tensors)), size, lambda count, left=messages: next(left))
        assert next(messages, None) is None
        assert {name: found[name] for name in tensors}.keys() == tensors.keys()
        assert same({name: found[name] for name in tensors}, tensors)


def test_a_chunk_ends_behind_the_tensor_with_which_it_has_more_than_its_size() -> None:
    listed = [Entry(str(number), torch.uint8, (4,)) for number in range(5)]
    assert [len(chunk) for chunk in chunks_of(listed, 8)] == [3, 2]
    assert [len(chunk) for chunk in chunks_of(listed, 7)] == [2, 2, 1]


def test_tensors_that_were_not_announced_so_are_refused() -> None:
    sender = Sender(Kept())
    sender.begin([Entry("a", torch.float32, (2,)), Entry("b", torch.float32, (2,))])
    with pytest.raises(LinkError, match="b of torch.float32"):
        sender.add({"b": torch.zeros(2)})
    sender = Sender(Kept())
    sender.begin([Entry("a", torch.float32, (2,))])
    with pytest.raises(LinkError, match="some announced tensors were not sent"):
        sender.finish()
    sender.add({"a": torch.zeros(2)})
    with pytest.raises(LinkError, match="c was not announced"):
        sender.add({"c": torch.zeros(2)})


def test_a_server_that_takes_nothing_is_waited_for_so_long() -> None:
    sender = Sender(Kept(Never), patience=0.05)
    sender.begin([Entry("a", torch.float32, (2,))])
    sender.add({"a": torch.zeros(2)})
    with pytest.raises(LinkError, match=r"did not receive a chunk of weights within 0\.05 s"):
        sender.finish()


def test_what_a_server_says_meanwhile_ends_the_waiting() -> None:
    def watch() -> None:
        raise LinkError("it answered 500")

    sender = Sender(Kept(Never), watch=watch)
    sender.begin([Entry("a", torch.float32, (2,))])
    sender.add({"a": torch.zeros(2)})
    with pytest.raises(LinkError, match="500"):
        sender.finish()


def test_a_server_joins_beside_its_answer() -> None:
    answer, seen = Future[None](), list[int]()

    def joining(ranks: int) -> None:
        seen.append(ranks)
        answer.set_result(None)

    join(Kept(joining=joining), 3, answer, 5)
    assert seen == [3]


def test_a_server_that_refuses_to_join_is_not_waited_for() -> None:
    answer, end = Future[None](), threading.Event()
    answer.set_exception(LinkError("answered 404"))
    with pytest.raises(LinkError, match="404"):
        join(Kept(joining=lambda ranks: end.wait()), 1, answer, 60)
    end.set()


@pytest.mark.parametrize("joins", [True, False])
def test_a_server_that_does_not_join_is_waited_for_so_long(joins: bool) -> None:
    end = threading.Event()
    with pytest.raises(LinkError, match=r"did not join in 0\.05 s"):
        join(Kept(joining=lambda ranks: joins or end.wait()), 1, Future(), 0.05)
    end.set()


def test_what_fails_while_joining_is_raised() -> None:
    def joining(ranks: int) -> None:
        raise ValueError("NCCL error")

    with pytest.raises(ValueError, match="NCCL error"):
        join(Kept(joining=joining), 1, Future(), 60)


def of_files(policy: Policy, dtype: torch.dtype, folder: Path) -> dict[str, torch.Tensor]:
    """Read what is written to a disk for servers."""
    return stored(WeightsDirectory(folder / "disk").write(policy, 0, dtype))


def test_an_adapter_is_merged_under_the_names_of_files(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    write_adapter(tmp_path / "adapter", model)
    policy = load_policy(model, adapter=AdapterSource(path=tmp_path / "adapter"))
    right = of_files(policy, torch.bfloat16, tmp_path)
    stream, found = TensorStream(policy, torch.bfloat16), dict[str, torch.Tensor]()
    stream.give(found.update)
    assert stream.entries == entries_of(found)
    assert found.keys() == right.keys()
    assert same(found, {name: right[name] for name in found})


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_tied", "experts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_announced_is_what_files_have(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    policy = load_policy(
        expert_model(tmp_path / "model") if family == "experts" else make_model(tmp_path / "model", family)
    )
    right = of_files(policy, dtype, tmp_path)
    stream, found = TensorStream(policy, dtype), dict[str, torch.Tensor]()
    stream.give(found.update)
    assert stream.entries == entries_of(found)
    assert found.keys() == right.keys()
    assert same(found, {name: right[name] for name in found})


def test_what_the_first_rank_raises_ends_the_stream(tmp_path: Path) -> None:
    policy, calls = load_policy(make_model(tmp_path / "model", "llama")), [0]

    def take(tensors: Any) -> None:
        calls[0] += 1
        raise LinkError("broken")

    with pytest.raises(LinkError, match="broken"):
        TensorStream(policy, torch.float32).give(take)
    assert calls == [1]


def send_and_receive(config: dict[str, Any], folder: str) -> None:
    """The ranks are the trainer; beside its work, the last one is a server too."""
    given = Config.model_validate(config)
    ranks = join_ranks(given)
    stream, size = TensorStream(make_policy(given, ranks), torch.bfloat16), 1000
    info = ranks.share(lambda: update_info(stream.entries))
    if ranks.first:
        sender = Sender(Gloo(folder, 0), size)
        for _ in range(2):
            sender.begin(stream.entries)
            stream.give(sender.add)
            sender.finish()
        return
    found: list[dict[str, torch.Tensor]] = []

    def serve() -> None:
        wire = Gloo(folder, 1)
        found.extend(read(info, size, wire.receive) for _ in range(2))

    server = threading.Thread(target=serve) if ranks.rank == ranks.size - 1 else None
    if server is not None:
        server.start()
    for _ in range(2):
        stream.give(lambda tensors: None)
    if server is not None:
        server.join()
        assert same(found[0], found[1])
        save_file(found[1], Path(folder, "found.safetensors"))


@pytest.mark.parametrize(
    ("kind", "size", "parallel"),
    [
        ("qwen3_tied", 2, {}),
        pytest.param("qwen3_tied", 2, {"pipeline": 2}, marks=pytest.mark.long),  # both stages have the tied tensor
        pytest.param("llama", 2, {"tensor": 2}, marks=pytest.mark.long),
        pytest.param("experts", 2, {}, marks=pytest.mark.long),
        pytest.param("experts", 2, {"pipeline": 2}, marks=pytest.mark.release),
    ],
)
def test_what_ranks_send_is_what_one_process_has(
    kind: str, size: int, parallel: dict[str, int], tmp_path: Path
) -> None:
    model = expert_model(tmp_path / "model") if kind == "experts" else make_model(tmp_path / "model", kind)
    (tmp_path / "out").mkdir()
    on_ranks(size, send_and_receive, config_of(model, parallel), str(tmp_path / "out"))
    right = of_files(load_policy(model), torch.bfloat16, tmp_path)
    found = load_file(tmp_path / "out" / "found.safetensors")
    assert found.keys() == right.keys()
    assert same(found, {name: right[name] for name in found})
