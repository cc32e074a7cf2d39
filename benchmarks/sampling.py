"""The embedded sampler on one GPU: the bound, this engine, transformers' `generate` and its continuous batching.

    python benchmarks/sampling.py [--quick] [--only NAME ...]

The bound is the time that reading weights and cache takes at the copy rate that the same run measures, or, where that
is longer, the products of the rows at its matrix rate. The model has random weights in bfloat16 and Qwen3's shape
(1.72B parameters); no token ends a completion, so lengths are what is asked for. Each section prints as soon as it is
done, and one that fails says so and ends nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from truestep.generate.engine.engine import Counts, Engine, Limits, Session, engine_of
from truestep.generate.engine.pages import PagePool
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import Completion, DrawOptions, Generate, Request
from truestep.head.logits import HeadSettings
from truestep.model.fast.fused_attention import RECORD
from truestep.model.fast.fused_layers import fuse_layers, settle_layers
from truestep.model.mixers import attention
from truestep.model.policy import ModelFacts, Policy
from truestep.rollouts.packing import pack_tokens
from truestep.step.compute.exact import score_exactly
from truestep.types import Rollout
from truestep.weights.whole import WholeWeights

VOCABULARY = 151_936
PLACE = "cuda"
START = time.perf_counter()


def make_policy(dtype: torch.dtype, tied: bool = True, **shape: int) -> Policy:
    config = Qwen3Config(tie_word_embeddings=tied, max_position_embeddings=32_768, **shape)
    torch.set_default_dtype(dtype)
    with torch.device(PLACE):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    with torch.no_grad(), attention.using(model, RECORD):
        fuse_layers(model)
    settle_layers(model)
    model.set_attn_implementation(attention.NAME)
    place = torch.empty(0, device=PLACE).device
    return Policy(model, Path(), HeadSettings(), WholeWeights(model, dtype), ModelFacts.of(model, place))


SIZES = {"0.6B": (1024, 3072, 28, 16), "1.7B": (2048, 6144, 28, 16), "8B": (4096, 12_288, 36, 32)}


def sized(name: str) -> Policy:
    """Make a policy of Qwen3's shape of a size, in bfloat16."""
    hidden, wide, layers, heads = SIZES[name]
    return make_policy(
        torch.bfloat16,
        tied=name != "8B",
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
    )


def requests(count: int, length: int, group: int = 1, vocabulary: int = VOCABULARY) -> list[Request]:
    generator = np.random.default_rng(1)
    prompts = [tuple(generator.integers(0, vocabulary, length).tolist()) for _ in range(-(-count // group))]
    return [Request(prompts[number // group], options(1), (3, number)) for number in range(count)]


def options(new: int, temperature: float = 1.0) -> DrawOptions:
    return DrawOptions(temperature, new, frozenset())


def complete(
    policy: Policy, asked: Sequence[Request], draw: DrawOptions, settings: EngineSettings | None = None
) -> list[Completion]:
    async def work(request: Request, generate: Generate) -> Completion:
        return await generate(replace(request, options=draw))

    return EngineGenerator(policy, settings).map(asked, work)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


class Rates:
    """Copies in bytes a second, read and written, and products in FLOP/s."""

    def __init__(self) -> None:
        source = torch.empty(2**30, dtype=torch.uint8, device=PLACE)
        target = torch.empty_like(source)
        a, b = (torch.randn(8192, 8192, device=PLACE, dtype=torch.bfloat16) for _ in range(2))
        self.copy = 2 * 2**30 / statistics.median(timed(lambda: target.copy_(source))[0] for _ in range(10))
        self.product = 2 * 8192**3 / statistics.median(timed(lambda: a @ b)[0] for _ in range(10))

    def bound(self, policy: Policy, rows: int, prompt: int, new: int) -> float:
        """The seconds that rows of one length take at the least."""
        config = policy.model.config
        weights = sum(parameter.numel() for parameter in policy.model.parameters())
        token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # bytes in the cache
        step = max(2 * weights / self.copy, 2 * weights * rows / self.product)
        cache = sum(rows * token * (prompt + at) / self.copy for at in range(new))
        return new * step + cache + 2 * weights * rows * prompt / self.product


def sample(
    policy: Policy, asked: Sequence[Request], lengths: Sequence[int], rows: int = 1024
) -> tuple[float, float, Counts]:
    """The seconds until the first token is known and until all are, and what was done."""
    engine = engine_of(policy)
    assert isinstance(engine, Engine), engine
    longest = max(len(request.token_ids) + new for request, new in zip(asked, lengths, strict=True))
    torch.cuda.synchronize()
    start = time.perf_counter()
    first = 0.0
    with engine.session(policy, Limits(min(rows, len(asked)), longest)) as session:
        for number, (request, new) in enumerate(zip(asked, lengths, strict=True)):
            session.submit(number, replace(request, options=options(new)))
        while session.busy:
            session.step()
            if not first and session.counts.drawn_tokens >= len(asked):
                first = time.perf_counter() - start
        torch.cuda.synchronize()
        return first, time.perf_counter() - start, session.counts


@contextlib.contextmanager
def section(name: str, only: Sequence[str], limit: float) -> Iterator[bool]:
    at = time.perf_counter() - START
    wanted = (not only or name in only) and at < limit
    print(f"\n== {name} (at {at:.0f} s){'' if wanted else ': left out'}", flush=True)
    try:
        yield wanted
    except Exception:
        print(f"{name} FAILED\n{traceback.format_exc()[-3000:]}", flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def check_float32() -> None:
    """Greedy and drawn tokens of a small float32 model, against a plain loop; log-probs against training's."""
    policy = make_policy(
        torch.float32,
        vocab_size=5003,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    with torch.no_grad():
        for parameter in policy.model.parameters():  # far from uniform: log-probs that say something
            if parameter.ndim > 1:
                parameter.normal_(0, 0.06)
    report_engine(policy)
    generator = np.random.default_rng(2)
    asked = [
        Request(tuple(generator.integers(0, 5003, n).tolist()), options(1), (9, n))
        for n in (1, 30, 63, 64, 65, 200, 700, 64)
    ]
    for temperature in (0.0, 1.0):
        how = options(100, temperature)
        mine, plain = complete(policy, asked, how), complete(policy, asked, how, EngineSettings(engine=False))
        same = sum(a.token_ids == b.token_ids for a, b in zip(mine, plain, strict=True))
        worst = worst_difference(policy, asked, mine, temperature or 1.0)
        print(
            f"temperature {temperature}: {same} of {len(asked)} as the plain loop's; log-probs off training's by "
            f"{worst:.1e}"
        )


def logprobs_of_training(policy: Policy, request: Request, answer: Completion, temperature: float) -> torch.Tensor:
    ids = np.array([*request.token_ids, *answer.token_ids])
    with torch.no_grad():
        hidden = policy.hidden(pack_tokens([ids], 1))[len(request.token_ids) - 1 : -1]
        z = (hidden.float() @ policy.head_weight.float().T) / temperature
        tokens = torch.tensor(answer.token_ids, device=z.device)
        return z.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1).cpu()


def worst_difference(
    policy: Policy, asked: Sequence[Request], answers: Sequence[Completion], temperature: float
) -> float:
    pairs = zip(asked, answers, strict=True)
    return max(
        float((logprobs_of_training(policy, request, answer, temperature) - torch.tensor(answer.logprobs)).abs().max())
        for request, answer in pairs
    )


def report_engine(policy: Policy) -> None:
    took, engine = timed(lambda: engine_of(policy))
    if not isinstance(engine, Engine):
        print(f"NOT SERVED: {engine}")
        return
    device = engine.device
    print(
        f"engine made in {took:.1f} s: attention {device.attend.__module__.rpartition('.')[2]}, draw "
        f"{device.draw.__module__.rpartition('.')[2]}, layers compiled {device.compiles}, graphs {device.graphs}, "
        f"chunks behind earlier tokens fused {device.past}"
    )


def main_case(policy: Policy, rates: Rates, quick: bool, rows: int = 256, prompt: int = 128, new: int = 256) -> float:
    asked = requests(rows, prompt)
    bound = rates.bound(policy, rows, prompt, new)
    print(f"{rows} prompts of {prompt}, {new} new tokens: bound {rows * new / bound:,.0f} tokens/s")
    rate = 0.0
    for number in range(2 if quick else 4):
        first, took, counts = sample(policy, asked, [new] * rows)
        rate = counts.drawn_tokens / took
        print(
            f"run {number}: {rate:,.0f} tokens/s, {took:.2f} s, all first tokens after {first:.2f} s, {counts.steps} "
            f"steps, {bound / took:.0%} of the bound",
            flush=True,
        )
    graphs = engine_of(policy).graphs  # type: ignore[union-attr]
    print(f"graphs: {0 if graphs is None else len(graphs)}")
    return rate


def generate(policy: Policy, rate: float, quick: bool) -> None:
    asked = requests(256, 128)
    ids = torch.tensor([request.token_ids for request in asked], device=PLACE)
    new = 96 if quick else 256
    with torch.no_grad(), policy.plain_attention():
        how = {"attention_mask": torch.ones_like(ids), "do_sample": True, "pad_token_id": 0, "top_k": 0}
        policy.model.generate(ids, max_new_tokens=4, **how)
        took, _ = timed(lambda: policy.model.generate(ids, max_new_tokens=new, min_new_tokens=new, **how))
    theirs = 256 * new / took
    print(f"transformers generate: {theirs:,.0f} tokens/s of {new} new ones; ours is {rate / theirs:.1f} times that")


def continuous(policy: Policy, rate: float, quick: bool) -> None:
    """Transformers' own continuous batching, of the same requests."""
    asked = [list(request.token_ids) for request in requests(256, 128)]
    new = 64 if quick else 256
    how = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad(), attention.using(policy.model, "sdpa"):
        policy.model.generate_batch(asked[:4], generation_config=how)
        took, found = timed(lambda: policy.model.generate_batch(asked, generation_config=how))
    made = sum(len(output.generated_tokens) for output in found.values())
    print(
        f"transformers continuous batching: {made / took:,.0f} tokens/s, {made} of {256 * new} tokens; ours is "
        f"{rate / (made / took):.1f} times that"
    )


def exact_case(policy: Policy, quick: bool) -> None:
    """`sampler.exact` and without: the rate, and how far training's log-probs are from the sampler's."""
    new = 64 if quick else 256
    asked = requests(256, 128)
    for exact in (False, True):
        how = EngineSettings(exact=exact)
        made, _ = timed(lambda how=how: engine_of(policy, how.exact))
        took = min(timed(lambda how=how: complete(policy, asked, options(new), how))[0] for _ in range(2))
        answers = complete(policy, asked, options(new), how)
        pairs = zip(asked, answers, strict=True)
        documents = [
            Rollout(str(number), np.array([*one.input_ids, *other.token_ids]), np.arange(128 + new) >= 128)
            for number, (one, other) in enumerate(pairs)
        ]
        groups = [range(first, first + 32) for first in range(0, 256, 32)]
        score = partial(score_exactly, policy, documents, groups)
        score()
        scored, found = timed(score)
        theirs = torch.cat([found[number] for number in range(256)]).cpu()
        ours = torch.cat([torch.tensor(answer.logprobs, dtype=torch.float32) for answer in answers])
        off, worst = int((ours != theirs).sum()), float((ours - theirs).abs().max())
        print(
            f"exact {exact}: {256 * new / took:,.0f} tokens/s (engine made in {made:.0f} s); {off} of {len(ours)} "
            f"labels differ from training's exact ones, by {worst:.1e} at most; training's exact pass "
            f"{256 * (128 + new) / scored:,.0f} tokens/s",
            flush=True,
        )


KINDS = {
    "_attend_kernel": "attention",
    "_join_kernel": "joins",
    "_store_kernel": "new keys and values",
    "_turn_kernel": "turned heads",
    "_draw_kernel": "draw",
    "triton_": "compiled elementwise",
    "nvjet": "products",
    "gemm": "products",
    "cutlass": "products",
    "splitK": "products",
}


@contextlib.contextmanager
def half_way(policy: Policy, rows: int, prompt: int, new: int) -> Iterator[Session]:
    """A session whose rows have all drawn half of their tokens."""
    engine = engine_of(policy)
    assert isinstance(engine, Engine)
    with engine.session(policy, Limits(rows, prompt + new)) as session:
        for number, request in enumerate(requests(rows, prompt)):
            session.submit(number, replace(request, options=options(new)))
        for _ in range(new // 2):
            session.step()
        yield session


def profiled(session: Session, steps: int) -> tuple[float, Any]:
    """The seconds of some steps, and the kernels of as many more."""
    took, _ = timed(lambda: [session.step() for _ in range(steps)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        timed(lambda: [session.step() for _ in range(steps)])
    return took, seen.key_averages()


def breakdown(policy: Policy, rows: int = 256, prompt: int = 128, new: int = 256) -> None:
    """Where the GPU's time of a step goes, over 30 steps in the middle."""
    spent: dict[str, float] = {}
    others: dict[str, float] = {}
    with half_way(policy, rows, prompt, new) as session:
        took, kernels = profiled(session, 30)
        host = time.perf_counter()
        plan = session._scheduler.plan()
        session._lines(plan.rows, len(plan.rows), session._tables.shape[1])
        host = time.perf_counter() - host
    for event in kernels:
        kind = next((kind for word, kind in KINDS.items() if word in event.key), "other kernels")
        spent[kind] = spent.get(kind, 0.0) + event.device_time_total / 30e3
        if kind == "other kernels":
            others[event.key[:70]] = event.device_time_total / 30e3
    print(
        f"a step of {rows} rows at about {prompt + new // 2} tokens: {took / 30 * 1e3:.2f} ms; plan and lines on the "
        f"host {host * 1e3:.2f}"
    )
    print("   ".join(f"{kind} {ms:.2f} ms" for kind, ms in sorted(spent.items(), key=lambda item: -item[1])))
    print("   ".join(f"{name} {ms:.3f}" for name, ms in sorted(others.items(), key=lambda item: -item[1])[:8]))


def joins(policy: Policy) -> None:
    """What it costs that completions join: steps of 240 rows, of which one computes 16 prompts."""
    engine = engine_of(policy)
    assert isinstance(engine, Engine)
    with engine.session(policy, Limits(256, 1024)) as session:
        for number, request in enumerate(requests(240, 128)):
            session.submit(number, replace(request, options=options(800)))
        for _ in range(20):
            session.step()
        plain, _ = timed(lambda: [session.step() for _ in range(10)])
        for at in range(3):
            for number, request in enumerate(requests(16, 128)):
                session.submit(1000 * at + 1000 + number, replace(request, options=options(12)))
            torch.cuda.synchronize()
            start = time.perf_counter()
            session.step()
            host = time.perf_counter() - start
            for _ in range(9):
                session.step()
            torch.cuda.synchronize()
            took = time.perf_counter() - start
            for _ in range(10):
                session.step()
    print(
        f"10 steps of 240 rows: {plain * 1e3:.1f} ms; where 16 join: {took * 1e3:.1f} ms, {host * 1e3:.1f} of the host"
    )


def lengths_case(policy: Policy, quick: bool) -> None:
    generator = np.random.default_rng(4)
    for count in (1024,) if quick else (256, 1024):
        uneven = np.exp(generator.normal(0, 0.8, count))
        for _ in range(20):  # cut at 1024, with a mean of 256
            uneven = np.minimum(uneven * 256 / uneven.mean(), 1024)
        lengths = np.maximum(uneven.round(), 1).astype(int).tolist()
        rates = {}
        for rows in (256, 1024) if count > 256 else (256,):
            for name, each in (("equal", [256] * count), ("log-normal", lengths)):
                for _ in range(2):
                    _, took, counts = sample(policy, requests(count, 128), each, rows)
                rates[name] = counts.drawn_tokens / took
                print(
                    f"{count} requests, {rows} rows, {name}: {rates[name]:,.0f} tokens/s, {counts.steps} steps, "
                    f"preempted {counts.preemptions}",
                    flush=True,
                )
            print(f"log-normal is at {rates['log-normal'] / rates['equal']:.0%} of equal")


def groups_case(policy: Policy) -> None:
    shared = requests(128, 2048, group=8)
    alone = requests(128, 2048)
    for name, asked in (("each alone", alone), ("groups of 8", shared)) * 2:
        first, _, counts = sample(policy, asked, [1] * 128)  # the first tokens are all
        print(f"128 prompts of 2,048, {name}: all first tokens after {first:.2f} s, {counts.prompt_tokens:,} computed")


def turns_case(
    policy: Policy, new: int, others: int, conversations: int = 64, turns: int = 8, prompt: int = 2048
) -> None:
    """Conversations of several turns at once. Each turn goes on from the tokens before; or all is computed again."""
    generator = np.random.default_rng(6)
    prompts = [tuple(generator.integers(0, VOCABULARY, prompt).tolist()) for _ in range(conversations)]
    said = generator.integers(0, VOCABULARY, (conversations, turns, others)).tolist()  # what others say between turns
    draw, longest = options(new), prompt + turns * (new + others)
    plain = PagePool.find
    for keeps in (False, True, False, True):
        PagePool.find = plain if keeps else lambda self, digests: []  # type: ignore[method-assign]
        service = EngineGenerator(policy, EngineSettings(rows=conversations, longest=longest))

        async def talk(number: int, generate: Generate) -> int:
            ids = prompts[number]
            for turn in range(turns):
                answer = await generate(Request(ids, draw, (number, turn), session=str(number)))
                ids = (*ids, *answer.token_ids, *said[number][turn])
            return turns * new

        took, drawn = timed(lambda service=service, talk=talk: service.map(range(conversations), talk))
        spent = service.spent
        needed = conversations * (prompt + (turns - 1) * (new + others))
        print(
            f"{conversations} conversations of {turns} turns of {new} drawn and {others} other tokens behind {prompt}, "
            f"{'cache kept' if keeps else 'all computed again'}: {took:.2f} s, {sum(drawn) / took:,.0f} tokens/s; "
            f"{spent.prompt_tokens:,} prompt tokens computed ({spent.prompt_tokens / needed:.3f} of the new ones), "
            f"{spent.cached_tokens:,} found",
            flush=True,
        )
    PagePool.find = plain  # type: ignore[method-assign]


def arrivals_case(policy: Policy, count: int = 8192, rows: int = 256, new: int = 256) -> None:
    """Requests that come at random times, as fast as the engine can serve them, against all at once. The first and the
    last `new` steps are half full, so the share that they lose falls with `count`."""
    asked, draw = requests(count, 128), options(new)
    span = 0.0
    for name, number in (("warm-up", 2 * rows), ("at once", count), ("at random times", count)):
        delays = np.random.default_rng(7).uniform(0, 0.8 * span, number)
        service = EngineGenerator(policy, EngineSettings(rows=rows))

        async def come(number: int, generate: Generate, delays: np.ndarray = delays) -> int:
            if delays[number]:
                await asyncio.sleep(float(delays[number]))
            return len((await generate(replace(asked[number], options=draw))).token_ids)

        took, made = timed(lambda service=service, come=come, number=number: service.map(range(number), come))
        span = took if name == "at once" else 0.0
        print(f"{number} requests, {name}: {sum(made) / took:,.0f} tokens/s")


def bfloat16_case(policy: Policy) -> None:
    asked = requests(16, 128)
    answers = complete(policy, asked, options(128))
    ratios = torch.cat(
        [
            (logprobs_of_training(policy, request, answer, 1.0) - torch.tensor(answer.logprobs)).exp()
            for request, answer in zip(asked, answers, strict=True)
        ]
    )
    far = float(((ratios - 1).abs() > 0.2).float().mean())
    print(f"bfloat16: mean ratio to training's {float(ratios.mean()):.5f}, {far:.2%} further than 0.2 from 1")


def attention_rate(rates: Rates) -> None:
    """The attention kernel alone, over the cache of one layer, in a graph."""
    from truestep.generate.engine import attend_kernels
    from truestep.generate.engine.attend import Rows
    from truestep.generate.engine.cache import LayerShape, PagedCache

    place = torch.empty(0, device=PLACE).device
    for rows, length in ((256, 320), (256, 1100), (1024, 384), (32, 2000)):
        width = -(-length // 64)
        cache = PagedCache.make([LayerShape(8, 128, 128, 16)], rows * width, 64, torch.bfloat16, place)
        cache.locate()
        lines = torch.zeros(rows, 3 + width, dtype=torch.int64, device=place)
        lines[:, 3:] = torch.randperm(rows * width, device=place).view(rows, width)
        lines[:, 0], lines[:, 1], lines[:, 2] = lines[:, -1], (length - 1) % 64, length
        step = Rows(cache, lines[:, 0], lines[:, 1], lines[:, 2], lines[:, 3:], length, attend_kernels.attend)
        q = torch.randn(rows, 16, 128, device=place, dtype=torch.bfloat16)
        k, v = (torch.randn(rows, 8, 128, device=place, dtype=torch.bfloat16) for _ in range(2))
        work = lambda: attend_kernels.attend(step, 0, q, k, v, 0.09, None, None)  # noqa: B023, E731
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                work()
        took = statistics.median(timed(graph.replay)[0] for _ in range(5)) / 20
        rate = rows * length * 8 * 128 * 4 / took
        print(
            f"attention of {rows} rows at {length}: {took * 1e6:.0f} us, {rate / 1e12:.2f} TB/s, copy "
            f"{rates.copy / 1e12:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within 200 seconds")
    parser.add_argument("--only", nargs="+", default=[], help="sections")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    limit = 170.0 if given.quick else 1e9
    rates = Rates()
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {rates.copy / 1e12:.2f} TB/s, products "
        f"{rates.product / 1e12:.0f} TFLOP/s"
    )
    with section("attention", given.only, limit) as wanted:
        if wanted:
            attention_rate(rates)
    policy = sized("1.7B")
    rate = 0.0
    with section("engine", [], limit):
        report_engine(policy)
    with section("main", given.only, limit) as wanted:
        if wanted:
            rate = main_case(policy, rates, given.quick)
    with section("breakdown", given.only, limit) as wanted:
        if wanted:
            breakdown(policy)
    with section("joins", given.only, limit) as wanted:
        if wanted:
            joins(policy)
    with section("generate", given.only, limit) as wanted:
        if wanted:
            generate(policy, rate, given.quick)
    with section("continuous", given.only, limit) as wanted:
        if wanted:
            continuous(policy, rate, given.quick)
    with section("exact", given.only, limit) as wanted:
        if wanted:
            exact_case(policy, given.quick)
    with section("lengths", given.only, limit) as wanted:
        if wanted:
            lengths_case(policy, given.quick)
    with section("bfloat16", given.only, limit) as wanted:
        if wanted:
            bfloat16_case(policy)
    with section("groups", given.only, limit) as wanted:
        if wanted:
            groups_case(policy)
    with section("turns", given.only, limit) as wanted:
        if wanted:
            turns_case(policy, 100, 20)
            turns_case(policy, 1, 100)  # the prompts alone
    with section("arrivals", given.only, limit) as wanted:
        if wanted:
            arrivals_case(policy)
    del policy
    for name, case in (("0.6B", (256, 128, 256)), ("8B", (128, 1024, 512))):
        with section(name, given.only, limit) as wanted:
            if wanted:
                other = sized(name)
                report_engine(other)
                main_case(other, rates, given.quick, *case)
                breakdown(other, *case)
                del other
    with section("float32", given.only, limit + 20) as wanted:
        if wanted:
            check_float32()
    print(f"\n{time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
