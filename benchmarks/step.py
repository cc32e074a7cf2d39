"""One training step on one GPU: how far it is from the matrix rate of the same run, and what memory it takes.

    python benchmarks/step.py [--layers 28 --hidden 1024 --optimizer adamw_8bit --offload states ...]

A random model of Qwen3's shape (with --gemma2 of Gemma 2's, softcap and windows; with --qwen35 of Qwen3.5-4B's, where
three layers in four keep a state), packed documents of which half are labels, GRPO, bfloat16 compute, a float32 head.
`--profile` lists what the time of one step is spent on, kernel by kernel. The bound counts matrix products alone:
6 · weights · tokens for the layers, 6 · hidden · vocabulary · labels for the head, attention's over the pairs that a
causal document has, and those of recurrences by chunks. `--trl` trains the same documents with TRL first, as it comes
and at its best settings, which it looks for.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from beside_trl import print_beside, run_trl
from qwen import QWEN35, delta_rule_flops, write_gemma2, write_model, write_qwen35
from torch.autograd import DeviceType

from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.adapter import AdapterSettings, AdapterSource
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.update.gradient_clipping import clip_scale, gradient_norm
from truestep.step.update.optimizer import kernels_serve, make_adamw, make_adamw_8bit, make_muon, prepare, update
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.step.update.optimizers.by_weight import Home
from truestep.step.update.optimizers.muon import MuonOptions
from truestep.types import Rollout
from truestep.weights.finite import UpdateCheck
from truestep.weights.protocol import Weights


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="timed, after two that are not")
    levels = ["full", "selective", "elementwise"]
    parser.add_argument("--activation-checkpointing", nargs="?", const="full", default=False, choices=levels)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--chunk", type=int, metavar="ROWS", help="logits_chunk_size; without it: auto")
    parser.add_argument("--optimizer", choices=["adamw", "adamw_8bit", "muon"], default="adamw")
    parser.add_argument("--offload", choices=["none", "states", "all"], default="none", help="optimizer.offload")
    parser.add_argument("--offload-room", type=float, default=0.0, help="optimizer.offload_room, GiB")
    parser.add_argument("--heads", type=int, default=16, help="of queries; there are 8 of keys and values")
    parser.add_argument("--untied", action="store_true", help="the head is not the embedding")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter on all linear layers, and it alone")
    parser.add_argument("--model", type=Path, help="where the model is, or is written to for other runs of its shape")
    parser.add_argument("--attention", choices=["auto", "flash", "torch"], default="auto", help="model.attention")
    parser.add_argument("--lengths", default="1000", help="of documents: about so many tokens each, or log-normal")
    parser.add_argument("--all-labels", action="store_true", help="every token is a label, not the second half")
    parser.add_argument("--gemma2", action="store_true", help="Gemma 2's layers: softcap, every second with a window")
    parser.add_argument("--qwen35", action="store_true", help="Qwen3.5-4B's layers; --layers says how many of its 32")
    parser.add_argument("--profile", type=int, metavar="N", default=0, help="name the N kernels that take longest")
    parser.add_argument("--ns-dtype", choices=["float32", "bfloat16"], default="float32", help="of muon")
    parser.add_argument("--update-check", action="store_true", help="also time steps whose weights are looked at after")
    parser.add_argument("--trl", action="store_true", help="measure TRL on the same documents (`make peers`)")
    parser.add_argument("--trl-seconds", type=float, default=220, help="no row of TRL begins after so long")
    parser.add_argument("--trl-only", nargs="+", metavar="WORDS", help="of TRL's rows, those that have one of these")
    given = parser.parse_args()
    if given.trl and (given.lora is not None or given.optimizer != "adamw" or given.gemma2 or given.qwen35):
        parser.error("--trl trains all weights of Qwen3's shape with AdamW")
    if given.qwen35:
        given.vocabulary, given.heads = QWEN35["vocab_size"], QWEN35["num_attention_heads"]
    return given


def document(name: str, ids: np.ndarray, labels: int, generator: np.random.Generator) -> Rollout:
    """A document whose last tokens are its labels, with one advantage."""
    mask = np.arange(len(ids)) >= len(ids) - labels
    return Rollout(
        id=name,
        input_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -12, 0).astype(np.float32),
        advantages=np.where(mask, generator.normal(), 0).astype(np.float32),
    )


def make_documents(given: argparse.Namespace) -> list[Rollout]:
    """Documents that fill the micro-batches to within a document."""
    generator = np.random.default_rng(0)
    documents, left = (
        [],
        given.tokens * given.micro_batches * (100 if given.lengths == str(given.tokens) else 97) // 100,
    )
    while left > 200:
        length = min(draw_length(generator, given), left)
        left -= length
        ids = generator.integers(0, given.vocabulary, length)
        labels = length - (1 if given.all_labels else length // 2)
        documents.append(document(str(len(documents)), ids, labels, generator))
    return documents


def draw_length(generator: np.random.Generator, given: argparse.Namespace) -> int:
    """Log-normal: a median of 700 tokens, and one in forty is longer than 5,000."""
    if given.lengths == "log-normal":
        return int(np.clip(generator.lognormal(np.log(700), 1.0), 16, given.tokens))
    mean = int(given.lengths)
    return mean if mean >= given.tokens // 4 else int(generator.integers(mean * 6 // 10, mean * 14 // 10))


def matrix_rate() -> float:
    """FLOP/s of a large bfloat16 product in this run."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [_time(lambda: a @ b) for _ in range(15)]
    return 2 * 8192**3 / statistics.median(times[5:])


def _time(work: Callable[[], object], wait: Callable[[], None] = torch.cuda.synchronize) -> float:
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def flops(policy_parameters: int, embedding: int, documents: list[Rollout], given: argparse.Namespace) -> float:
    tokens = sum(document.num_tokens for document in documents)
    labels = sum(document.num_labels for document in documents)
    pairs = sum(document.num_tokens**2 / 2 for document in documents)
    layers = (6 if given.lora is None else 4) * (policy_parameters - embedding * (2 if given.untied else 1)) * tokens
    whole = given.activation_checkpointing == "full"
    if whole:
        layers = layers * 4 / 3
    head_size = 256 if given.gemma2 or given.qwen35 else 128
    attending = given.layers // 4 if given.qwen35 else given.layers
    mixing = attending * 4 * given.heads * head_size * pairs
    if given.qwen35:
        mixing += (given.layers - attending) * delta_rule_flops(32, 128) * tokens
    mixing *= 3 * (4 / 3 if whole else 1)
    return layers + (6 if given.lora is None else 4) * embedding * labels + mixing


def make_optimizer(weights: Weights, given: argparse.Namespace) -> torch.optim.Optimizer:
    adamw = AdamWOptions((0.9, 0.999), 1e-8, 0.0)
    home = Home(given.offload != "none", round(given.offload_room * 2**30))
    kernels = kernels_serve(weights, eight_bits=given.optimizer == "adamw_8bit")
    if given.optimizer == "muon":
        muon = MuonOptions(0.95, True, 5, "match_rms_adamw", 0.0, getattr(torch, given.ns_dtype))
        return make_muon(weights, muon, adamw, home, kernels=kernels)
    return (make_adamw_8bit if given.optimizer == "adamw_8bit" else make_adamw)(weights, adamw, home, kernels=kernels)


def write(path: Path, given: argparse.Namespace) -> None:
    if given.qwen35:
        write_qwen35(path, QWEN35, given.layers, device="cuda")
    else:
        (write_gemma2 if given.gemma2 else write_model)(path, given, device="cuda")


def load(path: Path, given: argparse.Namespace) -> Policy:
    return load_policy(
        path,
        dtype="bfloat16",
        device="cuda",
        head=HeadSettings(fp32=True, chunk_size=given.chunk),
        activation_checkpointing=given.activation_checkpointing,
        compiled=given.compile,
        attending=given.attention,
        adapter=None if given.lora is None else AdapterSource(AdapterSettings(given.lora, given.lora)),
        masters_on_host=given.offload == "all",
    )


def main() -> None:
    given = options()
    rate = matrix_rate()
    with tempfile.TemporaryDirectory() as directory:
        path = given.model or Path(directory)
        if not (path / "config.json").exists():
            write(path, given)
        torch.cuda.empty_cache()
        documents = make_documents(given)
        # It comes first, while the GPU's memory is free.
        steps, seconds = min(given.steps, 3), given.trl_seconds
        theirs = run_trl(path, documents, steps, seconds, given.trl_only) if given.trl else []
        policy = load(path, given)
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    plan = plan_exactly(documents, StepRule(len(documents), False, 1, 1, given.tokens), 0)
    objective = Objective(Grpo(0.2, 0.2), Denominator("labels"))
    runner = StepRunner(policy, objective)
    optimizer = make_optimizer(policy.weights, given)

    def step() -> None:
        runner.accumulate(plan)
        norm = gradient_norm(policy.weights, meanwhile=partial(prepare, optimizer))
        update(optimizer, policy.weights, 1e-6, clip_scale(norm, 1.0))

    step()
    step()
    warm = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.cuda.reset_peak_memory_stats()
    # What goes back to the host beside the next step is that step's to wait for.
    times = [_time(step, torch.cuda.current_stream().synchronize) for _ in range(given.steps)]
    peak = torch.cuda.max_memory_allocated()
    norms = statistics.median(_time(lambda: gradient_norm(policy.weights)) for _ in range(3))
    updates = statistics.median(_time(lambda: update(optimizer, policy.weights, 1e-6)) for _ in range(3))
    forward_backward = statistics.median(_time(lambda: runner.accumulate(plan)) for _ in range(3))
    bound = flops(parameters, policy.head_weight.numel(), documents, given) / rate
    median, tokens = statistics.median(times), plan.totals.num_tokens
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}")
    print(
        f"{parameters / 1e9:.2f}B weights, {tokens:,} tokens, {plan.totals.num_labels:,} labels, "
        f"{len(documents)} documents, {len(plan.micro_batches)} micro-batches"
    )
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"attention        {policy.attends.story}")
    print(f"compiled graphs  {graphs:8d}, of them {graphs - warm} after the second step")
    print(f"matrix rate      {rate / 1e12:8.0f} TFLOP/s")
    print(f"bound            {bound:8.3f} s")
    print(f"step             {median:8.3f} s   {median / bound:.2f} x bound   {tokens / median:,.0f} tokens/s")
    print(f"forward+backward {forward_backward:8.3f} s   {forward_backward / bound:.2f} x bound")
    print(f"gradient's norm  {norms:8.3f} s")
    print(f"update           {updates:8.3f} s   {given.optimizer}, offload: {given.offload}")
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.is_cuda)
    trained = sum(gradient.numel() for gradient in policy.weights.gradients.values())
    lasting = (parameters * 2 + trained * ((0 if given.offload == "all" else 4) + 4) + states) / 2**30
    print(
        f"peak memory      {peak / 2**30:8.1f} GiB, {peak / parameters:.2f} bytes a weight; of it weights, gradients, "
        f"optimizer and compute copy {lasting:.1f}"
    )
    if given.update_check:
        print_update_check(step, lambda: update(optimizer, policy.weights, 1e-6), policy.weights, given.steps)
    if given.trl:
        print_beside(theirs, tokens / median, compiled=given.compile)
    if given.profile:
        profile(step, given.profile)
        print_waits(step)


def print_update_check(
    step: Callable[[], None], update_weights: Callable[[], None], weights: Weights, count: int
) -> None:
    """Print what it costs to look at all weights after an update, as the trainer does: steps and updates with it and
    without it, in turns."""
    check = UpdateCheck(weights)

    def checked(work: Callable[[], None]) -> None:
        work()
        check.ask(1e-6)

    def step_and_look() -> None:
        check.ruined()  # of the step before: the trainer reads it a step later too
        checked(step)

    wait = torch.cuda.current_stream().synchronize
    steps = [(_time(step, wait), _time(step_and_look, wait)) for _ in range(count)]
    updates = [(_time(update_weights), _time(lambda: checked(update_weights))) for _ in range(10)]
    start = time.perf_counter()
    check.ask(1e-6)
    host = time.perf_counter() - start
    read = sum(part.nbytes for part in weights.computed().values())
    for what, pairs in (("step", steps), ("update", updates)):
        without, with_it = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{what + ', checked':16} {with_it:8.4f} s   {without:.4f} s without: {with_it - without:+.4f} s, "
            f"{(with_it - without) / without:+.2%}"
        )
    print(f"weights read     {read / 2**30:8.2f} GiB by the check; {host * 1e3:.2f} ms of the host's time")


SHORT = 20  # microseconds: what the GPU waits between kernels that it was asked for early enough

# Kernels by what they do: the first kind whose words occur in a kernel's name has it.
KINDS = {
    "compiled elementwise": ("triton_",),  # its name may have that of attention, which reads what it makes
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "cutlass", "nvjet", "sm90_xmma"),
    "copies": ("copy", "Memcpy", "memcpy", "cat", "Memset"),
    "optimizer": ("multi_tensor", "foreach", "adam", "_update_kernel"),
    "head": ("kernel_numerators", "numerators", "_statistics", "_gradient"),
}


def profile(step: Callable[[], None], names: int) -> None:
    """Print what one step's time on the GPU is spent on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = [(row.key, row.self_device_time_total / 1e3, row.count) for row in found.key_averages()]
    kinds: Counter[str] = Counter()
    for name, spent, _ in rows:
        kinds[next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")] += spent
    print(f"{'busy':24} {sum(kinds.values()):8.1f} ms")
    print("\n".join(f"{kind:24} {spent:8.1f} ms" for kind, spent in kinds.most_common()))
    for name, spent, count in sorted(rows, key=lambda row: -row[1])[:names]:
        print(f"{spent:8.1f} ms {count:6d} x {name[:110]}")
    # Even with those of the GPU alone, there are calls of the host among the events, and spans of several kernels.
    on_gpu = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    print_idle([event for event in on_gpu if not event.is_user_annotation], names)


def print_idle(events: Any, names: int) -> None:
    """Print how long the GPU has nothing to do, and behind which kernels longest."""
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    idle, end, last = [], spans[0][1], spans[0][2]
    for start, stop, name in spans[1:]:
        if start > end:
            idle.append((start - end, end - spans[0][0], last, name))
        if stop > end:
            end, last = stop, name
    short = [gap for gap, *_ in idle if gap < SHORT]
    whole = end - spans[0][0]
    print(f"{'idle':24} {sum(gap for gap, *_ in idle) / 1e3:8.1f} ms of {whole / 1e3:.1f}")
    print(f"{'of it below 20 us':24} {sum(short) / 1e3:8.1f} ms in {len(short):,} pieces")
    for gap, at, before, after in sorted(idle, reverse=True)[:names]:
        print(f"{gap / 1e3:8.2f} ms at {at / 1e3:8.1f} behind {before[:60]} before {after[:60]}")


def print_waits(step: Callable[[], None]) -> None:
    """Print where the host waits for the GPU within one step."""
    torch.cuda.set_sync_debug_mode("warn")
    places: Counter[str] = Counter()

    def note(message: object, *_: object, **__: object) -> None:
        if "synchronizing" in str(message):
            ours = [frame for frame in traceback.extract_stack() if "truestep" in frame.filename]
            places[" < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[:-4:-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        step()
    torch.cuda.set_sync_debug_mode("default")
    for place, count in places.most_common():
        print(f"the host waits   {count:8d} x {place}")


if __name__ == "__main__":
    main()
