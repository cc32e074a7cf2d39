"""The head without logits: numerators of the softmax, of a plain product on a CPU, the real one on a Hopper GPU."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from head import plain_product
from head.head_cases import Expected, expected, largest_difference, make_coefficients, make_rows, relative
from oracles.step import oracle_step
from scoring import check_against_oracle, run_score, write_records
from selection import long_except
from step.test_score_oracle import OPTIONS, config_for, records_for
from truestep.head import passes
from truestep.head.chunked import HeadResult, HeadRows, forward, forward_backward
from truestep.head.logits import HeadSettings
from truestep.head.numerators import SLACK
from truestep.types import Coefficients

pytest.importorskip("triton")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    passes._kernels_run.cache_clear()
    plain_product.serve(monkeypatch)
    from truestep.head import numerator_kernels as kernels

    monkeypatch.setattr(kernels, "_GRADIENT_BLOCK", 16)  # several blocks a row
    monkeypatch.setattr(kernels, "_DOT_BLOCK", 4)
    yield
    passes._kernels_run.cache_clear()


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")


def run(rows: HeadRows, coefficients: Coefficients) -> tuple[HeadResult, torch.Tensor]:
    from truestep.head.numerator_passes import NumeratorPasses

    assert isinstance(rows.passes, NumeratorPasses)
    buffer = torch.zeros_like(rows.weight, dtype=torch.float32)
    return forward_backward(rows, lambda chunk, _: coefficients[chunk], weight_gradient=buffer), buffer


def check(rows: HeadRows, coefficients: Coefficients, wanted: Expected, statistic: float, gradient: float) -> None:
    result, buffer = run(rows, coefficients)
    for name in ("logprobs", "entropy", "logsumexp"):
        assert largest_difference(getattr(result.statistics, name), getattr(wanted, name)) < statistic, name
        # Nothing is kept where there is no backward pass, and the statistics are the same.
        assert torch.equal(getattr(forward(rows), name), getattr(result.statistics, name))
    assert relative(result.hidden_gradient, wanted.hidden_gradient) < gradient
    assert relative(buffer, wanted.weight_gradient) < gradient


@on_cpu
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("vocabulary", "with_b"), [(1, False), (2, True), (16, True), (17, False), (41, True)])
def test_both_gradients_equal_autograd(vocabulary: int, with_b: bool) -> None:
    for labels, chunk in ((0, None), (1, 4), (9, 4), (9, None)):
        settings = HeadSettings(scale=0.7, chunk_size=chunk, fp32=True)
        rows = make_rows(labels, vocabulary, dtype=torch.float32, settings=settings)
        coefficients = make_coefficients(labels, with_b=with_b, like=rows.hidden)
        check(rows, coefficients, expected(rows, coefficients), 1e-5, 1e-5)


def spread_rows(device: str = "cpu", dtype: torch.dtype = torch.float32) -> HeadRows:
    """Logits of 0 to 200 (all a row's own, exact in bfloat16), labels from the likeliest to the unlikeliest token, so
    that some rows are scaled down by far and others not at all."""
    vocabulary = 64
    ladder = torch.arange(vocabulary).float()
    steepness = torch.tensor([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, -4.0, 4.0, 2.0])
    labels = torch.tensor([0, 63, 0, 63, 10, 0, 63, 63, 62])
    hidden = torch.zeros(len(steepness), 8)
    hidden[:, 0] = steepness
    hidden[:, 1:] = torch.randn(len(steepness), 7, generator=torch.Generator().manual_seed(0)) * 0.1
    weight = torch.zeros(vocabulary, 8)
    weight[:, 0] = ladder
    weight[:, 1:] = torch.randn(vocabulary, 7, generator=torch.Generator().manual_seed(1))
    settings = HeadSettings(fp32=True)
    return HeadRows(
        hidden.to(device, dtype), weight.to(device, dtype), labels.to(device), torch.ones(9, device=device), settings
    )


@on_cpu
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("b", [None, -3.0])
@pytest.mark.parametrize("share", [1.0, 0.0, 1e-9, -1e-4, 1e6])
def test_labels_of_any_probability_and_coefficients_of_any_proportion(b: float | None, share: float) -> None:
    rows = spread_rows()
    logits = rows.hidden.double() @ rows.weight.double().T
    below = (logits.amax(1) - logits.gather(1, rows.label_ids[:, None]).squeeze(1)) / math.log(2)
    assert (below > SLACK + 100).any(), "some rows are shifted"
    assert (below < SLACK).any(), "others are not"
    ones = torch.ones(len(rows.label_ids))
    coefficients = Coefficients(share * ones, None if b is None else b * ones, ones)
    check(rows, coefficients, expected(rows, coefficients), 3e-5, 2e-5)


@on_cpu
@pytest.mark.usefixtures("plain")
def test_each_row_has_its_own_gradient_however_small_beside_others() -> None:
    """Row by row: a norm over all of them would hardly see one that vanished."""
    rows = spread_rows()
    ones = torch.ones(len(rows.label_ids))
    coefficients = Coefficients(1e-9 * ones, None, 1e-9 * ones)
    wanted = expected(rows, coefficients)
    result, _ = run(rows, coefficients)
    assert result.hidden_gradient is not None
    steps = 1e-9 * float(rows.weight.norm(dim=1).max())  # what a gradient of 1 in one logit gives
    for found, exact in zip(result.hidden_gradient, wanted.hidden_gradient, strict=True):
        assert float((found - exact).norm()) < 1e-5 * steps


@on_cpu
@pytest.mark.usefixtures("plain")
def test_rows_of_another_scale_than_their_slice_of_the_vocabulary() -> None:
    """A rank whose slice holds next to nothing of the probability is given statistics of the whole: whatever theirs
    are, its part of the gradient is p · a - c · onehot(y)."""
    rows = spread_rows()
    local = rows.passes
    for above in (0.0, 30.0, 60.0, 200.0, 2000.0):
        kept, mine = local.forward(rows[:], True)
        whole = replace(mine, logsumexp=mine.logsumexp + above)
        a, c = torch.full_like(mine.logprobs, 0.5), torch.full_like(mine.logprobs, 2.0)
        gradient = local.gradient(kept, whole, rows[:], Coefficients(a, None, c))
        z = rows.hidden.double() @ rows.weight.double().T
        exact = (z - whole.logsumexp.double()[:, None]).exp() * 0.5
        exact[torch.arange(len(z)), rows.label_ids] -= 2.0
        identity = torch.eye(rows.weight.shape[0])
        found = torch.full_like(exact, torch.nan, dtype=torch.float32)
        gradient.of_hidden_(identity, found)
        assert largest_difference(found, exact) < 1e-4
        buffer = torch.zeros(exact.shape[1], len(z))
        gradient.add_of_weight_(buffer, torch.eye(len(z)))
        assert largest_difference(buffer, exact.T) < 1e-4


@on_cpu
@pytest.mark.usefixtures("plain")
def test_labels_of_many_rows_are_summed_in_float32_whatever_their_order() -> None:
    from truestep.head import numerator_kernels as kernels

    generator = torch.Generator().manual_seed(2)
    for rows, labels in ((1, 1), (7, 1), (40, 3), (65, 50)):
        hidden = torch.randn(rows, 12, generator=generator)
        ids = torch.randint(labels, (rows,), generator=generator)
        c = torch.randn(rows, generator=generator) * (torch.rand(rows, generator=generator) > 0.2)
        buffer = torch.randn(labels + 2, 12, generator=generator)
        wanted = buffer.double()
        for row in range(rows):
            wanted[ids[row]] -= c[row].double() * hidden[row].double()
        kernels.subtract_labels_(buffer, hidden, ids, c)
        assert largest_difference(buffer, wanted) < 1e-5


@on_cpu
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("loss", long_except(["gspo", "grpo", "cross_entropy"], "gspo"))
def test_score_equals_the_oracle(loss: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """A loss of documents, one of labels, and one without ratios. The head sees a loss's coefficients and no more:
    `test_score_oracle` has them all."""
    model = tiny_model("qwen3_tied")
    records = records_for(model, loss)[:4]
    file = write_records(tmp_path / "rollouts.jsonl", records)
    config = config_for(model, file, {"type": loss, "entropy_bonus": 0.1, "z_loss": 0.01, **OPTIONS[loss]})
    config["model"]["head"] = {"logits_chunk_size": 7}
    config["data"]["tokens_per_microbatch"] = 50
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_step(model, records, config))


@pytest.mark.long
def test_the_product_compiles_for_a_hopper_gpu_without_one() -> None:
    worker = Path(__file__).parent / "compile_product.py"
    done = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "compiled"


@hopper
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("labels", "vocabulary", "hidden"),
    [(1, 1, 8), (1, 256, 64), (127, 255, 72), (128, 257, 64), (129, 1000, 200), (300, 5003, 512), (2100, 40_000, 264)],
)
def test_the_real_product_gives_what_the_plain_one_does(labels: int, vocabulary: int, hidden: int, keep: bool) -> None:
    from truestep.head import hopper_product as product
    from truestep.head import numerator_kernels as kernels

    rows = make_rows(labels, vocabulary, hidden, dtype=torch.bfloat16, device="cuda")
    factor = (3 / rows.temperature).float()
    reference = kernels.label_logits(rows.hidden, rows.weight, rows.label_ids) * factor
    given = (rows.hidden, rows.weight, rows.label_ids, factor, reference, keep)
    found, wanted = product.multiply(*given), plain_product.multiply(*given, part=256)
    assert (found.values is None) == (not keep)
    if found.values is not None:
        assert found.values.shape == wanted.values.shape
        assert relative(found.values, wanted.values) < 3e-3  # bfloat16's own
    assert relative(found.total, wanted.total) < 1e-5
    assert relative(found.weighted, wanted.weighted) < 1e-4
    assert largest_difference(found.shift, wanted.shift) < 1e-4
    assert largest_difference(found.label, wanted.label) < 1e-4
    again = product.multiply(*given)
    for name in ("values", "shift", "total", "weighted", "label"):
        one, other = getattr(found, name), getattr(again, name)
        assert one is None or torch.equal(one, other), f"{name} is another the second time"


@hopper
@pytest.mark.parametrize("with_b", [False, True])
@pytest.mark.parametrize("chunk", [100, None])
def test_gradients_on_a_hopper_gpu(chunk: int | None, with_b: bool) -> None:
    settings = HeadSettings(fp32=True, chunk_size=chunk, scale=0.7)
    rows = make_rows(500, 3001, 256, dtype=torch.bfloat16, device="cuda", settings=settings)
    coefficients = make_coefficients(500, with_b=with_b, like=rows.hidden)
    check(rows, coefficients, expected(rows, coefficients), 3e-5, 3e-3)


@hopper
@pytest.mark.parametrize("b", [None, -3.0])
@pytest.mark.parametrize("share", [1.0, 0.0, 1e-9, 1e6])
def test_labels_of_any_probability_on_a_hopper_gpu(b: float | None, share: float) -> None:
    rows = spread_rows("cuda", torch.bfloat16)
    ones = torch.ones(len(rows.label_ids), device="cuda")
    coefficients = Coefficients(share * ones, None if b is None else b * ones, ones)
    check(rows, coefficients, expected(rows, coefficients), 3e-5, 6e-3)


def test_the_kernels_are_compiled_once_for_any_number_of_labels() -> None:
    """And for rows that begin anywhere: a step with other ones would wait seconds for the compiler."""
    worker = Path(__file__).parent / "one_compilation.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, worker], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    kept_or_not = {"_join_kernel": 2, "_product_kernel": 2}  # numerators, where they fit and where they do not
    assert len(found) == 9 and found == {name: kept_or_not.get(name, 1) for name in found}
