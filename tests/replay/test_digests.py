"""Digests of documents and of weights, against plain loops over their numbers."""

from __future__ import annotations

import itertools
import random
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from interpreted import use
from tiny import make_model
from truestep.model.loading.load import load_policy
from truestep.rollouts.digests import digest_of
from truestep.run.directory import RunDirectory
from truestep.run.weight_lines import WeightLines, read_weight_lines
from truestep.types import Rollout, Turn
from truestep.weights.digests import Answer, Squares, Trace, digest, digest_of_box, run_of
from truestep.weights.tensor_parts import Box

SHAPES = ((5,), (4, 6), (3, 4, 5), (2, 3, 4, 2), ())


def plain_digest(values: torch.Tensor) -> int:
    """Loop over a whole weight's numbers, by their bytes."""
    size = values.element_size()
    total = 0
    for place, number in enumerate(values.reshape(-1)):
        content = number.reshape(1).view(torch.uint8).numpy().tobytes()
        total += (2 * place + 1) * struct.unpack("<i" if size == 4 else "<h", content)[0]
    return total % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_a_weight_add_up_to_the_digest_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every way to cut a weight along one dimension, along its first and last, and along two inner ones."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = plain_digest(whole)
    cuts = [{d: at} for d in range(len(shape)) for at in range(shape[d] + 1)]
    if len(shape) == 2:
        cuts += [{0: first, 1: last} for first in range(1, shape[0]) for last in range(1, shape[1])]
    if len(shape) > 2:
        cuts += [{1: 1, 2: at} for at in range(1, shape[2])] + [{0: 1, 1: 2, len(shape) - 1: 1}]
    for cut in cuts or [{}]:
        total = 0
        for sides in itertools.product(*((0, 1) for _ in cut)):
            spans = [(0, size) for size in shape]
            for (dimension, at), side in zip(cut.items(), sides, strict=True):
                spans[dimension] = (0, at) if side == 0 else (at, shape[dimension])
            part = whole[tuple(slice(*span) for span in spans)]
            total += int(digest_of_box(part, Box(tuple(a for a, _ in spans), tuple(part.shape)), shape))
        assert total % 2**64 == expected, cut


def test_a_flipped_bit_and_two_numbers_that_change_places_are_seen() -> None:
    generator = random.Random(2)
    weight = torch.randn(7, 9, generator=torch.Generator().manual_seed(3))
    run = run_of(Box((0, 0), (7, 9)), (7, 9))
    assert run is not None
    before = int(digest(weight, run))
    for bit in range(32):
        changed = weight.clone()
        place = generator.randrange(63)
        changed.view(-1).view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
        assert int(digest(changed, run)) != before
    for one, other in [(0, 1), (0, 9), (5, 50)]:
        changed = weight.clone().view(-1)
        changed[[one, other]] = changed[[other, one]]
        assert int(digest(changed, run)) != before


@pytest.mark.parametrize(
    ("dtype", "whole_shape", "boxes"),
    [
        (torch.float32, (90, 100), [Box((0, 0), (90, 100)), Box((30, 0), (17, 100)), Box((0, 40), (90, 33))]),
        (torch.float16, (90, 100), [Box((0, 0), (90, 100)), Box((30, 0), (17, 100)), Box((0, 40), (90, 33))]),
        # sizes and addresses are multiples of 16: reads take 16 bytes
        (torch.float32, (96, 112), [Box((0, 0), (96, 112)), Box((32, 0), (16, 112)), Box((0, 48), (96, 32))]),
    ],
)
def test_the_kernel_adds_up_what_plain_torch_does(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, whole_shape: tuple[int, int], boxes: list[Box]
) -> None:
    device = use("kernels", monkeypatch)
    from truestep.weights import digest_kernel

    monkeypatch.setattr(digest_kernel, "_BLOCKS", 2)  # so that a weight has several programs
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(*whole_shape, generator=generator).to(dtype)
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(b.start, b.shape, strict=True))].contiguous() for b in boxes]
    runs = [run for box in boxes if (run := run_of(box, whole_shape)) is not None]
    assert len(runs) == 3
    table_parts = [part.to(device) for part in parts]
    table = digest_kernel.Table(table_parts, [(run.width, run.stride, run.start) for run in runs])
    assert table._aligned == (whole_shape == (96, 112))
    sums, squares = table.add_up()
    assert sums.tolist() == [int(digest(part, run)) for part, run in zip(parts, runs, strict=True)]
    assert squares.tolist() == pytest.approx([float(part.double().square().sum()) for part in parts], rel=1e-5)


def test_a_digest_does_not_depend_on_how_many_numbers_are_added_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    runs = [run_of(Box((3, 0), (20, 30)), (60, 30)), run_of(Box((0, 4), (40, 30)), (40, 50))]
    for run in runs:
        assert run is not None
        found = set()
        for at_once in (7, 64, 1 << 15):
            monkeypatch.setattr("truestep.weights.digests._AT_ONCE", {"cpu": at_once})
            found.add(int(digest(weight[: run.rows * run.width // 30], run)))
        assert len(found) == 1


def test_where_the_kernel_fails_plain_torch_makes_the_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(load_policy(make_model(tmp_path / "model", "llama"), device="cpu").weights)
    expected = trace.now()

    class OnGpu:
        """The weights, said to be on a GPU."""

        device = SimpleNamespace(type="cuda")

        def __getattr__(self, name: str) -> Any:
            return getattr(trace.weights, name)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(Trace, "_by_kernel", fail)
    failing, parts = Trace(OnGpu()), dict(trace.weights.master)  # type: ignore[arg-type]
    for _ in range(2):
        ((names, digests, squares),) = failing._added_up(parts)
        assert {name: int(value) % 2**64 for name, value in zip(names, digests, strict=True)} == expected
        assert names == list(parts) and len(squares) == len(parts)
    assert failing._kernel_fails


def test_norms_are_those_of_their_own_weights_in_whatever_order_gradients_come(tmp_path: Path) -> None:
    trace = Trace(load_policy(make_model(tmp_path / "model", "llama"), device="cpu").weights)
    some = list(reversed(trace.names))[:-2]  # two weights have no gradient on this rank
    trace.ask(Squares(some, torch.arange(1, len(some) + 1, dtype=torch.float64) ** 2))
    assert trace.latest is not None
    measured = trace.latest.read()
    assert list(measured.digests) == trace.names
    assert measured.gradient_norms == dict.fromkeys(trace.names, 0.0) | {name: at for at, name in enumerate(some, 1)}
    for name, weight in trace.weights.master.items():
        assert measured.weight_norms[name] == pytest.approx(float(weight.detach().double().norm()), rel=1e-5)
        assert measured.digests[name] == plain_digest(weight.detach())


def test_lines_are_read_by_the_names_that_they_were_written_with(tmp_path: Path) -> None:
    """A run may go on with other trained weights."""
    directory = RunDirectory(tmp_path)
    for step, names in enumerate((["a", "b"], ["a"], ["a", "b", "c"]), 1):
        trace: Any = SimpleNamespace(names=names, latest=None)
        lines = WeightLines(directory, trace, {})
        lines.started()
        numbers = torch.arange(step, step + len(names))
        trace.latest = Answer(names, numbers, torch.ones(2, len(names), dtype=torch.float64))
        lines.updated(step, 0)
        lines.close()
    found = read_weight_lines(directory)
    assert [line.measured.digests for line in found.values()] == [{"a": 1, "b": 2}, {"a": 2}, {"a": 3, "b": 4, "c": 5}]
    next(tmp_path.glob("weight_names-*.json")).unlink()
    assert len(read_weight_lines(directory)) == 2, "a line without its names is left out"


def some_document() -> Rollout:
    mask = np.array([False, False, True, True, False, True])
    return Rollout(
        "a",
        np.arange(6),
        mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        advantages=np.where(mask, 1.5, 0).astype(np.float32),
        reward=1.0,
        group_id="g",
        model_version=np.where(mask, 8, 0),
        reference_logprobs=np.where(mask, -0.25, 0).astype(np.float32),
        rewards={"right": 1.0},
        fields={"weight": np.where(mask, 2.0, 0).astype(np.float32)},
        token_fields={"routed_experts": np.zeros((5, 2, 1), np.uint8)},
        document_fields={"level": np.array(3)},
        turns=(Turn(2, 4, "assistant", 0.5),),
        metadata={"seconds": 0.1},
    )


def flipped(array: np.ndarray, place: Any) -> np.ndarray:
    changed = array.copy()
    changed[place] += 1
    return changed


def test_a_documents_digest_sees_every_value_that_is_trained_on() -> None:
    """8 digits are of tokens and labels, 8 of all other values; what is no data changes none."""
    document = some_document()
    before = digest_of(document)
    assert len(before) == 16
    assert digest_of(replace(document, metadata={}, chosen=np.zeros(6, np.uint8))) == before
    assert digest_of(replace(document, recomputed_logprobs=document.logprobs)) == before
    of_tokens = [
        replace(document, input_ids=flipped(document.input_ids, 0)),
        replace(document, loss_mask=~document.loss_mask),
        replace(document, starts=(0, 3), record_ids=("x", "y")),
    ]
    assert all(digest_of(one)[:8] != before[:8] for one in of_tokens)
    assert document.logprobs is not None and document.advantages is not None and document.model_version is not None
    of_values = [
        replace(document, logprobs=flipped(document.logprobs, 3)),
        replace(document, advantages=flipped(document.advantages, 5)),
        replace(document, model_version=flipped(document.model_version, 2)),
        replace(document, reference_logprobs=None),
        replace(document, reward=1.0000001),
        replace(document, rewards={"right": 1.0, "short": 0.0}),
        replace(document, temperature=0.9),
        replace(document, truncated=False),
        replace(document, turns=()),
        replace(document, fields={"weight": flipped(document.fields["weight"], 2)}),
        replace(document, token_fields={"routed_experts": flipped(document.token_fields["routed_experts"], (4, 1, 0))}),
        replace(document, document_fields={"level": np.array(4)}),
    ]
    for one in of_values:
        assert digest_of(one)[:8] == before[:8] and digest_of(one)[8:] != before[8:]
    assert digest_of(document, own_reference=True) == digest_of(replace(document, reference_logprobs=None))
    assert digest_of(document, own_reference=True) != before
