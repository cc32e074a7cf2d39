"""Copies of weights in host memory: each stays as it is for as long as somebody sends it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tiny import make_model
from truestep.generate.servers.host_copies import HostCopies, HostWeights
from truestep.generate.servers.weight_files import Publisher, WeightsDirectory
from truestep.model.loading.load import load_policy
from truestep.weight_transfer.packed import Entry, as_bytes

SHAPES = {"a": (3, 5), "scalar": (), "empty": (0, 4), "b": (7,), "count": (2,)}
DTYPES = {"a": torch.bfloat16, "b": torch.float32, "count": torch.int64}


def some(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(1, 100, shape, generator=generator).to(DTYPES.get(name, torch.float16))
        for name, shape in SHAPES.items()
    }


def entries_of(tensors: dict[str, torch.Tensor]) -> list[Entry]:
    return [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def copied(copies: HostCopies, seed: int) -> HostWeights:
    tensors = some(seed)
    copies.begin(entries_of(tensors))
    for name, tensor in tensors.items():
        copies.add({name: tensor})
    return copies.finish(str(seed))


def check(weights: HostWeights) -> None:
    right = some(int(weights.name))
    assert list(weights.tensors) == list(right)
    for name, value in right.items():
        found = weights.tensors[name]
        assert found.dtype == value.dtype and found.shape == value.shape
        assert torch.equal(as_bytes(found), as_bytes(value))


def test_what_somebody_has_is_not_written_over() -> None:
    copies, kept = HostCopies(torch.device("cpu")), []
    for seed in range(3):
        kept.append(copied(copies, seed))
    for weights in kept:
        check(weights)


def test_two_buffers_are_enough_however_often_weights_are_published() -> None:
    copies, places = HostCopies(torch.device("cpu")), set[int]()
    newest = None
    for seed in range(8):
        newest = copied(copies, seed)  # the one before is let go when this one is there
        places.add(newest.tensors["a"].data_ptr())
        check(newest)
    gc.collect()
    assert len(places) == 2


def test_what_was_begun_and_failed_is_begun_anew() -> None:
    copies = HostCopies(torch.device("cpu"))
    copies.begin(entries_of(some(0)))
    copies.add({"a": some(0)["a"]})
    with pytest.raises(KeyError):
        copies.add({"unknown": torch.zeros(1)})
    check(copied(copies, 1))


def test_a_policy_s_copy_stays_when_the_policy_changes(tmp_path: Path) -> None:
    policy = load_policy(make_model(tmp_path / "model", "llama"))
    publisher = Publisher(WeightsDirectory(tmp_path / "disk"), torch.float32, sends=True)
    weights = publisher.write(policy, 8)
    assert isinstance(weights, HostWeights) and weights.name.startswith("000000000008-")
    before = {name: value.clone() for name, value in weights.tensors.items()}
    with torch.no_grad():
        for value in policy.weights.master.values():
            value.add_(1)
    assert before and all(torch.equal(weights.tensors[name], value) for name, value in before.items())
    assert not (tmp_path / "disk").exists()
