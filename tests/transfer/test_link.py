"""Tensors over a link: what is announced is what is sent, and arrives as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tiny import expert_model, make_model
from truestep.policy.loading.load import load_policy
from truestep.policy.save import stream_tensors
from truestep.policy.tensor_stream import TensorStream
from truestep.transfer.link import LinkError, Sender, Sending
from truestep.transfer.packed import Entry, as_bytes, chunks_of, update_info

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

    def __init__(self, sending: Callable[[], Sending] = Done) -> None:
        self.messages: list[torch.Tensor] = []
        self._sending = sending

    def send(self, content: torch.Tensor) -> Sending:
        self.messages.append(content.clone())
        return self._sending()


class Gloo:
    """A wire between processes of one machine."""

    device = torch.device("cpu")

    def __init__(self, folder: str, rank: int):
        store = dist.FileStore(str(Path(folder, "store")), 2)
        self._group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    def send(self, content: torch.Tensor) -> Sending:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        sent: Sending = self._group.broadcast([content], options)
        return sent

    def receive(self, size: int) -> torch.Tensor:
        content = torch.empty(size, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([content], options).wait()
        return content


def read(info: dict[str, Any], size: int, receive: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read tensors by a plain loop, as a server does that knows the announcement and the size of a chunk."""
    found, waiting, total = dict[str, torch.Tensor](), list[tuple[str, torch.dtype, list[int], int]](), 0

    def take() -> None:
        content, begin = receive(total), 0
        for name, dtype, shape, count in waiting:
            found[name] = content[begin : begin + count].clone().view(dtype).view(shape)
            begin += count

    for name, dtype_name, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
        dtype = getattr(torch, dtype_name)
        count = torch.empty(shape, dtype=dtype, device="meta").nbytes
        waiting.append((name, dtype, shape, count))
        total += count
        if total > size:
            take()
            waiting, total = [], 0
    if total:
        take()
    for name, dtype, shape, _ in waiting:
        found.setdefault(name, torch.empty(shape, dtype=dtype))
    return found


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
    with pytest.raises(LinkError, match="not given"):
        sender.finish()
    sender.add({"a": torch.zeros(2)})
    with pytest.raises(LinkError, match="c was not announced"):
        sender.add({"c": torch.zeros(2)})


def test_a_server_that_takes_nothing_is_waited_for_so_long() -> None:
    sender = Sender(Kept(Never), patience=0.05)
    sender.begin([Entry("a", torch.float32, (2,))])
    sender.add({"a": torch.zeros(2)})
    began = time.monotonic()
    with pytest.raises(LinkError, match=r"not taken in 0\.05 s"):
        sender.finish()
    assert time.monotonic() - began < 5


def test_what_a_server_says_meanwhile_ends_the_waiting() -> None:
    def watch() -> None:
        raise LinkError("it answered 500")

    sender = Sender(Kept(Never), watch=watch)
    sender.begin([Entry("a", torch.float32, (2,))])
    sender.add({"a": torch.zeros(2)})
    with pytest.raises(LinkError, match="500"):
        sender.finish()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_tied", "experts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_announced_is_what_files_have(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    policy = load_policy(
        expert_model(tmp_path / "model") if family == "experts" else make_model(tmp_path / "model", family)
    )
    right: dict[str, torch.Tensor] = {}
    stream_tensors(policy, dtype, right.update)
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
