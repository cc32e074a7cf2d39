"""The sampler with a mixture of experts, on one GPU: tokens/s beside the bound and transformers' `generate`.

    python benchmarks/sampling_experts.py [--layers 12] [--rows 1 32 256] [--prompt 128] [--new 256] [--breakdown]
    python benchmarks/sampling_experts.py --replay      # log-probs beside training's, with and without replay
    python benchmarks/sampling_experts.py --tiny        # on a CPU: the script itself

Layers of Qwen3-30B-A3B's shape (128 experts, 8 active), random weights, bfloat16. The bound of a decode step is the
time that reading the weights takes, of experts those that its rows chose, and the cache, at the copy rate that the same
run measures; a prompt's tokens cost their products. The first of a case's runs compiles.

`--replay` lets the engine draw, and scores its documents as a step's first pass does: a mixture with the experts of the
record, the same mixture with its own choice, and a dense model of the same width. It prints the share of choices that
differ, the mean of ratio - 1 - log ratio, and the share of ratios further than 0.2 from 1 (which `grpo` may clip).
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from experts import write_model as write_mixture
from qwen import write_model as write_dense
from sampling import requests
from sampling_recurrent import breakdown, sample, timed

from truestep.generate.engine.cache import page_bytes
from truestep.generate.engine.engine import Engine, engine_of
from truestep.generate.generator import Completion
from truestep.generate.play import rollout_of, sequence_of
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.experts.routing import ExpertSettings
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import make_plan

DOCUMENTS = 64  # of `--replay`


class Bound:
    """The shortest times of decode steps, by rates that are measured here."""

    def __init__(self, policy: Policy, layers: list[Any], given: argparse.Namespace):
        size = 2 if given.tiny else 1024
        source = torch.empty(size * 2**20, dtype=torch.uint8, device=policy.device)
        target = torch.empty_like(source)
        a, b = (torch.randn(8 * size, 8 * size, device=policy.device).bfloat16() for _ in range(2))
        self.copy = 2 * source.numel() / statistics.median(timed(lambda: target.copy_(source))[0] for _ in range(10))
        self.product = 2 * len(a) ** 3 / statistics.median(timed(lambda: a @ b)[0] for _ in range(10))
        self.expert = 3 * given.hidden * given.intermediate
        weights = sum(parameter.numel() for parameter in policy.model.parameters())
        self.others = weights - given.layers * given.experts * self.expert - given.vocabulary * given.hidden
        self.active = self.others + given.layers * given.chosen * self.expert
        self.token = page_bytes(layers, 1, torch.bfloat16)

    def of(self, done: list[Completion], prompt: int, new: int) -> tuple[float, float]:
        """Return the seconds, and the mean number of experts that a layer reads in a step."""
        routes = np.stack([one.routes[prompt - 1 : prompt - 1 + new] for one in done if one.routes is not None])
        seconds = 2 * self.active * len(done) * prompt / self.product
        steps, layers = range(routes.shape[1]), range(routes.shape[2])
        active = [sum(len(np.unique(routes[:, at, layer])) for layer in layers) for at in steps]
        for at, experts in enumerate(active):
            moved = 2 * (self.others + experts * self.expert) + len(done) * self.token * (prompt + at)
            seconds += max(moved / self.copy, 2 * self.active * len(done) / self.product)
        return seconds, statistics.mean(active) / len(layers)


@contextmanager
def written(given: argparse.Namespace, dense: bool = False) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        if dense:
            write_dense(Path(directory), given, device=given.device)
        else:
            write_mixture(Path(directory), given)
        yield Path(directory)


def load(directory: Path, given: argparse.Namespace, **options: Any) -> Policy:
    return load_policy(directory, dtype="float32" if given.tiny else "bfloat16", device=given.device, **options)


def serve(policy: Policy) -> Engine:
    took, engine = timed(lambda: engine_of(policy))
    if not isinstance(engine, Engine):
        raise SystemExit(f"not served: {engine}")
    print(f"engine made in {took:.1f} s, layers compiled {engine.device.compiles}", flush=True)
    return engine


def rates(given: argparse.Namespace) -> None:
    with written(given) as directory:
        policy = load(directory, given)
        engine = serve(policy)
        bound = Bound(policy, engine.layers, given)
        print(f"copy {bound.copy / 1e12:.2f} TB/s, products {bound.product / 1e12:.0f} TFLOP/s")
        fastest = {}
        for rows in given.rows:
            for number in range(given.runs):
                took, done = timed(partial(sample, policy, engine, rows, given.prompt, given.new, given.vocabulary))
                least, experts = bound.of(done, given.prompt, given.new)
                fastest[rows] = took
                print(
                    f"{rows} rows, run {number}: {rows * given.new / took:,.0f} tokens/s, {took:.2f} s, "
                    f"{least / took:.0%} of the bound ({experts:.0f} experts of a layer read in a step)",
                    flush=True,
                )
            if given.breakdown:
                breakdown(policy, engine, rows, given.prompt, given.vocabulary)
        del policy, engine
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
        if given.peer:
            _peer(directory, given, fastest)


def _peer(directory: Path, given: argparse.Namespace, ours: dict[int, float]) -> None:
    dtype = torch.float32 if given.tiny else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, device_map=given.device, experts_implementation="grouped_mm"
    )
    model.generation_config.eos_token_id = None
    for rows in given.rows:
        asked = requests(rows, given.prompt, vocabulary=given.vocabulary)
        ids = torch.tensor([request.token_ids for request in asked], device=given.device)
        draw = partial(
            model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0,
            min_new_tokens=given.new, max_new_tokens=given.new,
        )  # fmt: skip
        took = min(timed(draw)[0] for _ in range(2))
        print(f"{rows} rows, transformers: {rows * given.new / took:,.0f} tokens/s, ours {took / ours[rows]:.2f} x")


def replay(given: argparse.Namespace) -> None:
    for width in given.widths:
        sized = argparse.Namespace(**{**vars(given), "hidden": width, "intermediate": width * 3 // 8})
        with written(sized) as directory:
            policy = load(directory, sized)
            documents = drawn(policy, sized)
            compare(f"width {width}, experts of the record", policy, documents)
            policy = load(directory, sized, experts=ExpertSettings(replay="off"))
            compare(f"width {width}, the router's choice", policy, documents)
        sized.intermediate, sized.heads = 3 * width, 16
        with written(sized, dense=True) as directory:
            policy = load(directory, sized)
            compare(f"width {width}, dense", policy, drawn(policy, sized))


def drawn(policy: Policy, given: argparse.Namespace) -> list[Any]:
    many = 4 if given.tiny else DOCUMENTS
    done = sample(policy, serve(policy), many, given.prompt, given.new, given.vocabulary)
    asked = requests(many, given.prompt, vocabulary=given.vocabulary)
    return [
        rollout_of(sequence_of(request.token_ids, one), id=str(number))
        for number, (request, one) in enumerate(zip(asked, done, strict=True))
    ]


def compare(name: str, policy: Policy, documents: list[Any]) -> None:
    runner = StepRunner(policy, Objective(Grpo(0.2, 0.2), Denominator("labels")), "full", keep_scores=True)
    groups = [list(range(at, min(at + 16, len(documents)))) for at in range(0, len(documents), 16)]
    found = runner.accumulate(make_plan(documents, groups, 0))
    old = [document.logprobs[document.loss_mask] for document in documents]
    new = [score.logprobs for score in found.scores]
    off = np.concatenate([np.asarray(a, dtype=np.float64) - b for a, b in zip(new, old, strict=True)])
    ratio = np.exp(off)
    print(
        f"{name}: choices that differ {found.line().get('route_disagreement', 0):.2%}, k3 "
        f"{(ratio - 1 - off).mean():.2e}, further than 0.2 from 1: {(abs(ratio - 1) > 0.2).mean():.3%}, mean ratio "
        f"{ratio.mean():.5f}",
        flush=True,
    )


TINY = {
    "layers": 2, "hidden": 32, "intermediate": 24, "experts": 8, "chosen": 2, "heads": 4, "keys": 2, "vocabulary": 509,
    "prompt": 7, "new": 5, "rows": [1, 3], "widths": [32], "device": "cpu",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (
        ("layers", 12), ("hidden", 2048), ("intermediate", 768), ("experts", 128), ("chosen", 8), ("heads", 32),
        ("keys", 4), ("vocabulary", 151_936), ("prompt", 128), ("new", 256), ("runs", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048], help="of --replay")
    parser.add_argument("--scale", type=float, default=0.02, help="of the random weights")
    for name in ("replay", "breakdown", "peer", "tiny"):
        parser.add_argument(f"--{name}", action="store_true")
    given = argparse.Namespace(device="cuda", **vars(parser.parse_args()))
    if given.tiny:
        vars(given).update(TINY)
    logging.basicConfig(level=logging.WARNING)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {given.layers} layers")
    (replay if given.replay else rates)(given)


if __name__ == "__main__":
    main()
