"""The LM head's loss, forward and backward, on one GPU: the bound, this head and its peers in one run.

    python benchmarks/head.py [--shapes 16384x4096x151936 ...] [--quick]

The bound is `6 · T · H · V / rate` at the bfloat16 matrix rate that the same run measures, twice: of the fastest of
some large products on a cool card (burst), and of products back to back (sustained), which is lower because the card
reaches its power limit. Everything is timed in rounds, the sustained rate too, each after one run that is not. Hidden
~ N(0, 1), weight ~ (2/√H) N(0, 1), labels drawn from the model, ratios within 5% of 1. Extra memory is the peak beyond
the inputs and the two gradients. Errors are against float64 on the same inputs: the largest of the log-probs', and the
relative norm of each gradient's, for cross entropy, which every row of the table can compute. Rows marked `grpo` and
`gspo` time those losses instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from truestep.head import passes
from truestep.head.chunked import HeadRows, forward_backward
from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import CrossEntropy, Grpo, Gspo, LabelLoss
from truestep.losses.labels import Labels
from truestep.losses.objective import Denominator, Objective
from truestep.types import Coefficients, PackedLabels, RowStatistics, StepTotals

SHAPES = ("16384x4096x151936", "32768x1024x151936", "8192x8192x128256", "16384x4096x151936/50")
DOCUMENT = 1000  # labels
ROUNDS = 7


@dataclass
class Case:
    hidden: torch.Tensor  # [T, H] bfloat16
    weight: torch.Tensor  # [V, H] bfloat16
    labels: torch.Tensor  # [T]
    advantages: torch.Tensor  # [T]
    old_logprobs: torch.Tensor  # [T]
    reference: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # log-probs and both gradients, float64

    @property
    def flops(self) -> float:
        return 6.0 * self.hidden.shape[0] * self.hidden.shape[1] * self.weight.shape[0]


@dataclass
class Outcome:
    logprobs: torch.Tensor | None
    hidden_gradient: torch.Tensor
    weight_gradient: torch.Tensor


def make_case(text: str) -> Case:
    shape, _, share = text.partition("/")
    tokens, hidden_size, vocabulary = (int(part) for part in shape.split("x"))
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device="cuda", generator=generator).bfloat16()
    weight = (
        torch.randn(vocabulary, hidden_size, device="cuda", generator=generator).mul_(2 / hidden_size**0.5).bfloat16()
    )
    if share:
        # Label rows alone go through the head; which ones they are is known before.
        kept = (
            torch.rand(tokens, device="cuda", generator=generator).argsort()[: tokens * int(share) // 100].sort().values
        )
        hidden = hidden[kept]
    labels, logprobs = [], []
    for rows in hidden.split(1024):
        log_p = (rows.float() @ weight.float().T).log_softmax(-1)
        labels.append(torch.multinomial(log_p.exp(), 1, generator=generator).squeeze(-1))
        logprobs.append(log_p.gather(-1, labels[-1][:, None]).squeeze(-1))
    noise = torch.rand(len(hidden), device="cuda", generator=generator) * 0.1 - 0.05
    advantages = torch.randn(len(hidden), device="cuda", generator=generator)
    return Case(hidden, weight, torch.cat(labels), advantages, torch.cat(logprobs) + noise)


def reference(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy's log-probs and gradients in float64, 512 rows at a time."""
    weight = case.weight.double()
    logprobs, hidden_gradient, weight_gradient = [], [], torch.zeros_like(weight)
    for rows, labels in zip(case.hidden.split(512), case.labels.split(512), strict=True):
        wide = rows.double()
        p = (wide @ weight.T).log_softmax(-1)
        logprobs.append(p.gather(-1, labels[:, None]).squeeze(-1))
        p.exp_().scatter_add_(-1, labels[:, None], -torch.ones_like(labels[:, None], dtype=p.dtype))
        p.div_(len(case.labels))
        hidden_gradient.append(p @ weight)
        weight_gradient.addmm_(p.T, wide)
    return torch.cat(logprobs), torch.cat(hidden_gradient).float(), weight_gradient.float()


def pack_case(case: Case, document: torch.Tensor, counts: torch.Tensor) -> PackedLabels:
    """The labels of a case, [T] each, in documents of `counts` labels."""
    return PackedLabels(
        rows=document,
        ids=case.labels,
        document=document,
        temperature=torch.ones(len(case.labels), device="cuda"),
        old_logprobs=case.old_logprobs,
        advantages=case.advantages,
        model_version=document,
        reference_logprobs=case.old_logprobs,
        num_labels=counts,
        reward=torch.zeros(len(counts), device="cuda"),
        rewards={},
        truncated=torch.zeros(len(counts), dtype=torch.bool, device="cuda"),
        has={},
    )


def ours(case: Case, label_loss: LabelLoss, entropy_bonus: float = 0.0, **settings: object) -> Outcome:
    tokens = len(case.labels)
    counts = torch.full((-(-tokens // DOCUMENT),), DOCUMENT, device="cuda")
    counts[-1] = tokens - DOCUMENT * (len(counts) - 1)
    document = torch.arange(tokens, device="cuda") // DOCUMENT
    objective = Objective(label_loss, Denominator("labels"), entropy_bonus=entropy_bonus)
    totals = StepTotals(len(counts), tokens, tokens)
    weight = torch.full((tokens,), 1 / tokens, device="cuda")
    packed = pack_case(case, document, counts)

    def loss(rows: slice, seen: RowStatistics) -> Coefficients:
        labels = Labels.of(packed[rows], seen, weight[rows])
        return objective.coefficients(labels, totals)

    head = HeadRows(
        case.hidden,
        case.weight,
        packed.ids,
        packed.temperature,
        HeadSettings(fp32=True, **settings),  # type: ignore[arg-type]
    )
    buffer = torch.zeros_like(case.weight, dtype=torch.float32)
    host_counts = [DOCUMENT] * (len(counts) - 1) + [tokens - DOCUMENT * (len(counts) - 1)]
    result = forward_backward(
        head, loss, weight_gradient=buffer, document_labels=host_counts if objective.whole_documents else None
    )
    assert result.hidden_gradient is not None
    return Outcome(result.statistics.logprobs, result.hidden_gradient, buffer)


def by_autograd(loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Case], Outcome]:
    def run(case: Case) -> Outcome:
        hidden, weight = case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()
        given = loss(hidden, weight, case.labels)
        per_label = given.detach() if given.ndim else None
        given.mean().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return Outcome(None if per_label is None else -per_label, hidden.grad, weight.grad)

    return run


def peers() -> dict[str, Callable[[Case], Outcome]]:
    found = {
        "float32 both sides, autograd": by_autograd(
            lambda h, w, y: functional.cross_entropy(h.float() @ w.float().T, y, reduction="none")
        ),
        "bfloat16 logits, autograd": by_autograd(
            lambda h, w, y: functional.cross_entropy(h @ w.T, y, reduction="none")
        ),
    }
    if hasattr(functional, "linear_cross_entropy"):
        found["torch linear_cross_entropy"] = by_autograd(
            lambda h, w, y: functional.linear_cross_entropy(h, w, y, reduction="none")
        )
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger-kernel"] = by_autograd(lambda h, w, y: liger_fused_linear_cross_entropy(h, w, y, reduction="mean"))
    except ImportError as error:
        print(f"liger-kernel is not here: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = by_autograd(lambda h, w, y: linear_cross_entropy(h, w, y, reduction="none"))
    except ImportError as error:
        print(f"cut-cross-entropy is not here: {error}")
    return found


def with_plain_products(case: Case) -> Outcome:
    """As on GPUs that are no Hopper: logits are stored."""
    serves = passes._product_serves
    passes._product_serves = lambda _: False  # type: ignore[assignment]
    try:
        return ours(case, CrossEntropy())
    finally:
        passes._product_serves = serves


def heads(quick: bool) -> dict[str, Callable[[Case], Outcome]]:
    found: dict[str, Callable[[Case], Outcome]] = {
        "truestep": lambda case: ours(case, CrossEntropy()),
        "truestep, grpo": lambda case: ours(case, Grpo(0.2, 0.2)),
        "truestep, gspo": lambda case: ours(case, Gspo(0.2, 0.2)),
        "truestep, grpo, entropy bonus": lambda case: ours(case, Grpo(0.2, 0.2), entropy_bonus=0.01),
        "truestep, split": lambda case: ours(case, CrossEntropy(), split_gradient=True),
    }
    for rows in (1280, 4000, 8192, 16384):
        found[f"truestep, {rows} rows"] = lambda case, rows=rows: ours(case, CrossEntropy(), chunk_size=rows)  # type: ignore[misc]
    found["truestep, product without softmax"] = with_plain_products
    found["truestep, torch passes"] = lambda case: ours(case, CrossEntropy(), kernels=False)
    return found if quick else found | peers()


def once(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_rate() -> float:
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / statistics.median(once(lambda: target.copy_(source)) for _ in range(10))


class Products:
    """The matrix rate, in FLOP/s of a large square product."""

    flops = 2 * 8192**3

    def __init__(self) -> None:
        self.a, self.b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))

    def burst(self) -> float:
        """Of the fastest on a cool card."""
        time.sleep(1)
        return self.flops / min(once(lambda: self.a @ self.b) for _ in range(20))

    def many(self) -> None:
        """About 100 ms of them."""
        for _ in range(64):
            self.a @ self.b


def errors(outcome: Outcome, case: Case) -> list[str]:
    assert case.reference is not None
    logprobs, hidden, weight = case.reference
    worst = "" if outcome.logprobs is None else f"{float((outcome.logprobs.double() - logprobs).abs().max()):.0e}"

    def relative(mine: torch.Tensor, exact: torch.Tensor) -> str:
        return f"{float((mine.float() - exact).norm() / exact.norm()):.1e}"

    return [worst, relative(outcome.hidden_gradient, hidden), relative(outcome.weight_gradient, weight)]


@dataclass
class Row:
    run: Callable[[Case], Outcome]
    extra: float  # GiB
    errors: list[str]
    times: list[float]


def first_run(name: str, run: Callable[[Case], Outcome], case: Case) -> Row:
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outcome = run(case)
    torch.cuda.synchronize()
    own = sum(item.numel() * item.element_size() for item in (outcome.hidden_gradient, outcome.weight_gradient))
    extra = (torch.cuda.max_memory_allocated() - before - own) / 2**30
    return Row(run, extra, ["", "", ""] if "grpo" in name or "gspo" in name else errors(outcome, case), [])


def measure(case: Case, quick: bool) -> None:
    """In rounds: whatever the card's temperature and power do to one row they do to all of them, and to the bound."""
    products = Products()
    burst = products.burst()
    rows, failed = {}, {}
    for name, run in heads(quick).items():
        try:
            rows[name] = first_run(name, run, case)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            failed[name] = str(error).splitlines()[0][:80]
    sustained = []
    for _ in range(ROUNDS):
        once(products.many)
        sustained.append(64 * products.flops / once(products.many))
        for row in rows.values():
            once(lambda row=row: row.run(case))  # type: ignore[misc]
            row.times.append(once(lambda row=row: row.run(case)))  # type: ignore[misc]
    rates = {"burst": burst, "sustained": statistics.median(sustained)}
    bounds = {kind: case.flops / rate for kind, rate in rates.items()}
    for kind, rate in rates.items():
        print(f"{kind}: {rate / 1e12:.0f} TFLOP/s, bound {bounds[kind] * 1e3:.1f} ms")
    print("\n| head | ms | x burst | x sustained | extra GiB | log-prob error | d hidden error | d weight error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        took = statistics.median(row.times)
        of_bounds = " | ".join(f"{took / bound:.2f}" for bound in bounds.values())
        print(f"| {name} | {took * 1e3:.1f} | {of_bounds} | {row.extra:.2f} | " + " | ".join(row.errors) + " |")
    for name, error in failed.items():
        print(f"| {name} | failed: {error} | | | | | | |", flush=True)


def profile(case: Case) -> str:
    """Where the time of this head goes, by kernel, in ms of one pass after a warm one."""
    work = heads(quick=True)["truestep, grpo"]
    work(case)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work(case)
        torch.cuda.synchronize()
    kinds = {"_statistics_kernel": "statistics", "_gradient_kernel": "gradient of the logits"}
    kinds |= {"_product_kernel": "product with the softmax", "_join_kernel": "sums of its parts"}
    spent: dict[str, float] = {}
    for event in seen.key_averages():
        matrix = any(word in event.key for word in ("gemm", "nvjet", "cutlass"))
        kind = "matrix products" if matrix else kinds.get(event.key, "the rest")
        spent[kind] = spent.get(kind, 0.0) + event.device_time_total / 1e3
    return "   ".join(f"{kind} {took:.1f} ms" for kind, took in sorted(spent.items(), key=lambda item: -item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--quick", action="store_true", help="without the peers")
    parser.add_argument("--profile", action="store_true", help="only where this head's time goes")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {copy_rate() / 1e12:.2f} TB/s")
    for text in given.shapes:
        case = make_case(text)
        if given.profile:
            print(f"{text}: {profile(case)}", flush=True)
            continue
        case.reference = reference(case)
        print(f"\n{text}")
        measure(case, given.quick)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
