"""The fused kernels against the torch passes and the oracles: on a GPU for real, elsewhere in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from head.head_cases import expected, largest_difference, make_coefficients, make_rows, relative
from oracles.step import oracle_step
from scoring import check_against_oracle, run_score, write_records
from selection import long_except
from step.test_score_oracle import OPTIONS, config_for, records_for
from truestep.head import passes
from truestep.head.chunked import HeadRows, forward_backward
from truestep.head.logits import HeadSettings
from truestep.types import Coefficients

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    passes._kernels_run.cache_clear()
    from truestep.head import kernels

    # Several blocks a row, the last one partly filled; of the statistics, several times four.
    monkeypatch.setattr(kernels, "_STATISTICS_BLOCK", 8)
    monkeypatch.setattr(kernels, "_GRADIENT_BLOCK", 16)
    yield
    passes._kernels_run.cache_clear()


def run(rows: HeadRows, coefficients: Coefficients) -> tuple[Any, torch.Tensor]:
    buffer = torch.zeros_like(rows.weight, dtype=torch.float32)
    return forward_backward(rows, lambda chunk, _: coefficients[chunk], weight_gradient=buffer), buffer


# One token, a whole block, one more than that, and more than four blocks of the statistics.
@pytest.mark.parametrize(
    ("vocabulary", "with_b", "softcap"),
    [(1, False, None), (2, True, 2.0), (16, False, 2.0), (17, True, None), (41, True, 2.0), (41, False, None)],
)
def test_both_gradients_equal_autograd(vocabulary: int, with_b: bool, softcap: float | None) -> None:
    for labels, chunk in ((0, None), (1, 4), (9, 4), (9, None)):
        settings = HeadSettings(softcap=softcap, scale=0.7, chunk_size=chunk, fp32=True)
        rows = make_rows(labels, vocabulary, dtype=torch.float32, device=DEVICE, settings=settings)
        coefficients = make_coefficients(labels, with_b=with_b, like=rows.hidden)
        assert isinstance(passes.passes_for(settings, rows.hidden, rows.weight), passes.FusedPasses)
        wanted = expected(rows, coefficients)
        result, buffer = run(rows, coefficients)
        assert largest_difference(result.statistics.logprobs, wanted.logprobs) < 1e-5
        assert largest_difference(result.statistics.entropy, wanted.entropy) < 1e-5
        assert largest_difference(result.statistics.logsumexp, wanted.logsumexp) < 1e-5
        assert relative(result.hidden_gradient, wanted.hidden_gradient) < 1e-5
        assert relative(buffer, wanted.weight_gradient) < 1e-5


@pytest.mark.parametrize("softcap", [None, 50.0, 1e4])
@pytest.mark.parametrize("b", [None, -3.0])
def test_extreme_logits_stay_finite(softcap: float | None, b: float | None) -> None:
    product = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4], [0.0, 88.0, -104.0]])
    settings = HeadSettings(softcap=softcap)
    rows = HeadRows(
        product.to(DEVICE),
        torch.eye(3, device=DEVICE),
        torch.tensor([1, 0, 2, 1], device=DEVICE),
        torch.ones(4, device=DEVICE),
        settings,
    )
    ones = torch.ones(4, device=DEVICE)
    coefficients = Coefficients(ones, None if b is None else b * ones, 2 * ones)
    result, buffer = run(rows, coefficients)
    reference, reference_buffer = run(replace(rows, settings=replace(settings, kernels=False)), coefficients)
    # A float32 of size 1e4 has steps of 1e-3.
    assert largest_difference(result.statistics.logprobs, reference.statistics.logprobs) < 2e-3
    assert largest_difference(result.statistics.entropy, reference.statistics.entropy) < 2e-3
    assert torch.isfinite(buffer).all()
    assert relative(result.hidden_gradient, reference.hidden_gradient) < 1e-2
    assert relative(buffer, reference_buffer) < 1e-2


@pytest.mark.parametrize("fp32", [True, False])
def test_half_precision_logits_and_weights(fp32: bool) -> None:
    settings = HeadSettings(fp32=fp32, chunk_size=5)
    rows = make_rows(12, 40, 32, dtype=torch.bfloat16, device=DEVICE, settings=settings)
    coefficients = make_coefficients(12, like=rows.hidden)
    wanted = expected(rows, coefficients)
    result, buffer = run(rows, coefficients)
    assert largest_difference(result.statistics.logprobs, wanted.logprobs) < (1e-4 if fp32 else 5e-2)
    assert relative(result.hidden_gradient, wanted.hidden_gradient) < (3e-3 if fp32 else 3e-2)
    assert relative(buffer, wanted.weight_gradient) < (3e-3 if fp32 else 3e-2)


@pytest.mark.parametrize(
    ("kind", "loss"),
    long_except(
        [("gemma2", "gspo"), ("gemma2", "cross_entropy"), ("gemma2", "dppo"), ("qwen3_tied", "grpo")],
        ("gemma2", "gspo"),
        ("qwen3_tied", "grpo"),
    ),
)
def test_score_with_kernels_equals_the_oracle(
    kind: str, loss: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Losses of each kind of coefficients: kernels see these and no more. `test_score_oracle` has every loss."""
    model = tiny_model(kind)
    records = records_for(model, loss)[: 12 if DEVICE == "cuda" else 3]
    file = write_records(tmp_path / "rollouts.jsonl", records)
    config = config_for(model, file, {"type": loss, "entropy_bonus": 0.1, "z_loss": 0.01, **OPTIONS[loss]})
    config["model"]["head"] = {"logits_chunk_size": 7}
    config["data"]["tokens_per_microbatch"] = 50
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_step(model, records, config))


def test_without_triton_the_torch_passes_serve_silently() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import os, torch; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from truestep.head import passes\nfrom truestep.head.logits import HeadSettings\n"
        "assert isinstance(passes.passes_for(HeadSettings(), torch.zeros(1, 1), torch.zeros(1, 1)), passes.TorchPasses)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (7, 61), (40, 700), (5000, 3001) if DEVICE == "cuda" else (33, 1100)]
)
def test_rows_move_to_the_front_where_they_lie(rows: int, width: int) -> None:
    from truestep.head.kernels import to_front_

    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, width + 3, generator=generator).to(DEVICE, torch.float16)
    for share in (0.0, 0.1, 0.6, 1.0):
        values = wide.clone()[:, :width]
        index = (torch.rand(rows, generator=generator) < share).nonzero().flatten().to(DEVICE)
        moved = to_front_(values, index)
        assert torch.equal(moved, wide[index, :width])
        assert moved.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        assert torch.equal(values[len(index) :], wide[len(index) :, :width]), "what lies behind stays"
