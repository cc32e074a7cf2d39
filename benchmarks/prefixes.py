"""Shared prefixes on one GPU: steps with `data.share_prefixes` off and on, on the same documents.

    python benchmarks/prefixes.py --hidden 2048 --intermediate 6144 --compile [--shapes 2048+512 8192+512] [--rounds 3]
    python benchmarks/prefixes.py --tiny --long 512 --branches 16 4 1   # on a CPU: the script itself

For each shape, PREFIX+ANSWER tokens in groups of `--group`: tokens of documents a second and the peak of memory
beyond weights, gradients and optimizer, off and on in turn, and how far the gradients of one step are apart. `agents`
are documents of `--turns` turns: what a turn thinks is stripped from what later turns see, so each turn is a sequence
that begins with what was visible before. With `--qwen35` three layers in four keep a state. `--trl` trains the same
documents with TRL first. `--long` is one tree of a prefix of so many tokens and 16 answers of 1,024, recomputed, beside
two of its documents alone, whose time counts eight times. `--branches` are how many of its answers a micro-batch has
room for: with fewer than 16, each micro-batch computes the prefix again. `--random-steps` runs steps of random trees
with compiled layers and counts graphs that are compiled after the fifth. `--count` computes nothing: it says how many
tokens a step would compute, by the room of a micro-batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from beside_trl import print_beside, run_trl
from qwen import QWEN35, write_model, write_qwen35

from step import document, make_optimizer, matrix_rate
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.rollouts.prefixes import forest_of
from truestep.run.assemble.step import least_saved
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.update.gradient_clipping import clip_scale, gradient_norm
from truestep.step.update.optimizer import prepare, update
from truestep.types import Rollout, StepPlan, sequences_of

VOCABULARY = 151_936


def groups(prefix: int, answer: int, group: int, count: int, vocabulary: int) -> list[Rollout]:
    generator = np.random.default_rng(0)
    documents = []
    for number in range(count):
        shared = generator.integers(0, vocabulary, prefix)
        for member in range(group):
            ids = np.concatenate([shared, generator.integers(0, vocabulary, answer)])
            documents.append(document(f"{number}-{member}", ids, answer, generator))
    return documents


def agents(count: int, turns: int, end: int, vocabulary: int) -> list[Rollout]:
    """Documents of several sequences, as rows of their own: the step counts the same labels. A turn sees `end / turns`
    new tokens, of which an eighth are the visible answer of the turn before; it thinks for a quarter of that."""
    generator = np.random.default_rng(1)
    documents = []
    for number in range(count):
        visible = np.zeros(0, np.int64)
        for turn in range(turns):
            new = end // turns
            visible = np.concatenate([visible, generator.integers(0, vocabulary, new - new // 8)])
            answer = generator.integers(0, vocabulary, new // 8)
            thought = generator.integers(0, vocabulary, new // 4)
            ids = np.concatenate([visible, thought, answer])
            documents.append(document(f"{number}-{turn}", ids, len(thought) + len(answer), generator))
            visible = np.concatenate([visible, answer])
    return documents


def again(plan: StepPlan, computed: int) -> int:
    """Return how many of the computed tokens are of prefixes that another micro-batch computes too."""
    return 0 if plan.distinct is None else max(0, computed - plan.distinct)


def count_tokens(given: argparse.Namespace) -> None:
    """Print how many tokens a step of agents' trees and of one long prefix computes, by the room of a micro-batch."""
    prefix = given.long or 65_536
    trees = {
        f"{given.agents or 16} agents": agents(given.agents or 16, given.turns, given.end, given.vocabulary),
        f"{prefix}+16x1024": groups(prefix, 1024, 16, 1, given.vocabulary),
    }
    for name, documents in trees.items():
        tokens, longest = (size(document.num_tokens for document in documents) for size in (sum, max))
        for room in (1.0, 1.05, 1.1, 1.25, 1.5, 2.0):
            budget = int(room * longest)
            plan = plan_exactly(documents, StepRule(len(documents), False, 1, 1, budget, share="auto"), 0)
            forests = [(members, forest_of(plan, members)) for members in plan.micro_batches]
            computed = sum(
                sum(plan.sequences[index].num_tokens for index in members) if forest is None else forest.tokens
                for members, forest in forests
            )
            repeated = again(plan, computed)
            print(
                f"{name:15} micro-batches of {budget:9,} tokens, {room:.2f} of the longest document: {len(forests):3}, "
                f"{computed:9,} of {tokens:,} tokens computed ({tokens / computed:.2f} x fewer), {repeated:,} again"
            )


class Bench:
    def __init__(self, policy: Policy, given: argparse.Namespace):
        self.policy, self.given = policy, given
        self.runner = StepRunner(policy, Objective(Grpo(0.2, 0.2), Denominator("labels")))
        self.optimizer = make_optimizer(policy.weights, given)
        self.gpu = policy.device.type == "cuda"

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def plan(self, documents: list[Rollout], budget: int, share: str) -> StepPlan:
        rule = StepRule(
            len(documents), False, 1, 1, budget, even_length=self.policy.facts.even_length, share=share,
            least_of_auto=least_saved(self.policy.device),
        )  # fmt: skip
        return plan_exactly(documents, rule, 0)

    def step(self, plan: StepPlan) -> float:
        self.wait()
        start = time.perf_counter()
        self.runner.accumulate(plan)
        norm = gradient_norm(self.policy.weights, meanwhile=partial(prepare, self.optimizer))
        update(self.optimizer, self.policy.weights, 0.0, clip_scale(norm, 1.0))
        self.wait()
        return time.perf_counter() - start

    def compare(self, name: str, documents: list[Rollout], budget: int) -> dict[str, Any]:
        tokens = sum(sequence.num_tokens for sequence in sequences_of(documents))
        plans = {share: self.plan(documents, budget, share) for share in ("off", "auto")}
        times: dict[str, list[float]] = {share: [] for share in plans}
        peaks: dict[str, float] = {}
        gradients, computed = {}, {}
        for share, plan in plans.items():
            self.step(plan)
            if self.gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            computed[share] = self.runner.accumulate(plan).line()["computed_tokens"]
            gradients[share] = [gradient.clone() for gradient in self.policy.weights.gradients.values()]
            peaks[share] = (torch.cuda.max_memory_allocated() - before) / 2**30 if self.gpu else 0.0
        off = sum(float((a - b).double().norm() ** 2) for a, b in zip(*gradients.values(), strict=True)) ** 0.5
        size = sum(float(a.double().norm() ** 2) for a in gradients["off"]) ** 0.5
        del gradients
        for _, (share, plan) in itertools.product(range(self.given.rounds), plans.items()):
            times[share].append(self.step(plan))
        median = {share: statistics.median(each) for share, each in times.items()}
        found = {
            "shape": name,
            "documents": len(documents),
            "tokens": tokens,
            "computed_tokens": computed,
            "micro_batches": {share: len(plan.micro_batches) for share, plan in plans.items()},
            "seconds": times,
            "peak_gib": peaks,
            "gradients_apart": off / size,
        }
        print(
            f"{name:12} off {median['off']:7.3f} s {tokens / median['off']:9,.0f} tokens/s {peaks['off']:6.1f} GiB   "
            f"auto {median['auto']:7.3f} s {tokens / median['auto']:9,.0f} tokens/s {peaks['auto']:6.1f} GiB   "
            f"{median['off'] / median['auto']:.2f} x, {tokens / computed['auto']:.2f} x fewer tokens computed   "
            f"gradients {off / size:.1e} apart",
            flush=True,
        )
        return found

    def compare_long(self, prefix: int, answer: int, counts: list[int]) -> list[dict[str, Any]]:
        """`counts`: of how many of the 16 answers a micro-batch has room for beside their prefix."""
        documents = groups(prefix, answer, 16, 1, self.given.vocabulary)
        shape, off = f"{prefix}+16x{answer}", self.measure(self.plan(documents[:2], prefix + answer, "off"), 8)
        print(f"{shape:12} off {off['seconds']:.2f} s (of two documents), {off['peak_gib']:.1f} GiB", flush=True)
        found = [{"shape": shape, "off": off}]
        for count in counts:
            plan = self.plan(documents, prefix + count * answer, "auto")
            assert (plan.sharing is not None) == (count > 1) and len(plan.micro_batches) == -(-16 // count)
            tree = self.measure(plan)
            repeated = again(plan, tree["computed_tokens"])
            print(
                f"{shape:12} auto, {count:2} answers a micro-batch {tree['seconds']:.2f} s, "
                f"{tree['peak_gib']:.1f} GiB, {tree['computed_tokens']:,} tokens computed, {repeated:,} again   "
                f"{off['seconds'] / tree['seconds']:.2f} x",
                flush=True,
            )
            found.append({"shape": shape, "answers": count, "again": repeated, "auto": tree})
        return found

    def measure(self, plan: StepPlan, factor: int = 1) -> dict[str, Any]:
        """Measure a step. Its time and its tokens count `factor` times."""
        computed = self.runner.accumulate(plan).line()["computed_tokens"]
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = self.step(plan)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.gpu else 0.0
        return {"seconds": factor * seconds, "peak_gib": peak, "computed_tokens": factor * computed}

    def random_trees(self, steps: int, budget: int, vocabulary: int) -> int:
        """Return how many graphs were compiled after the fifth step."""
        generator, early = np.random.default_rng(2), 0
        counted = torch._dynamo.utils.counters["stats"]
        for number in range(steps):
            documents = []
            for group in range(int(generator.integers(1, 6))):
                top = max(2, budget // 8)
                shared = generator.integers(0, vocabulary, int(generator.integers(1, top)))
                for member in range(int(generator.integers(1, 9))):
                    at = int(generator.integers(0, len(shared) + 1)) if generator.random() < 0.3 else len(shared)
                    ids = np.concatenate(
                        [shared[:at], generator.integers(0, vocabulary, int(generator.integers(2, top)))]
                    )
                    documents.append(document(f"{number}-{group}-{member}", ids, len(ids) // 2, generator))
            self.step(self.plan(documents, budget, "auto"))
            if number == 4:
                early = counted["unique_graphs"]
        assert counted["unique_graphs"] > 0, "no layer was compiled"
        return int(counted["unique_graphs"] - early)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--tokens", type=int, default=24_576, help="of a micro-batch")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--shapes", nargs="*", default=["2048+512", "8192+512", "512+2048", "128+512"])
    parser.add_argument("--agents", type=int, default=0, metavar="N", help="documents of many turns")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--end", type=int, default=24_576, help="visible tokens at the end of an agent's document")
    parser.add_argument(
        "--long", type=int, default=0, metavar="TOKENS", help="one long prefix with 16 answers of 1,024"
    )
    parser.add_argument("--branches", type=int, nargs="+", default=[16], help="answers of --long in one micro-batch")
    parser.add_argument("--count", action="store_true", help="count the tokens of --agents and --long; no model")
    parser.add_argument("--random-steps", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--activation-checkpointing", nargs="?", const="full", default=False)
    parser.add_argument("--attention", choices=["auto", "flash", "torch"], default="auto")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--qwen35", action="store_true", help="Qwen3.5-4B's layers; --layers says how many of its 32")
    parser.add_argument("--trl", action="store_true", help="train the documents of each shape with TRL first")
    parser.add_argument("--trl-seconds", type=float, default=220, help="no row of TRL begins after so long")
    parser.add_argument("--trl-only", nargs="+", metavar="WORDS", help="of TRL's rows, those that have one of these")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.random_steps and not given.compile:
        parser.error("--random-steps counts graphs: it needs --compile")
    if given.qwen35:
        given.vocabulary = QWEN35["vocab_size"]
    if given.tiny:
        given.layers, given.hidden, given.intermediate, given.heads, given.vocabulary = 2, 64, 128, 8, 997
        given.tokens, given.groups, given.rounds, given.end = 1024, 2, 1, 480
        given.shapes, given.agents, given.turns = ["64+16", "8+16"], 2, 4
    given.untied, given.optimizer, given.offload, given.offload_room = False, "adamw", "none", 0.0
    return given


def documents_of(shape: str, given: argparse.Namespace) -> list[Rollout]:
    prefix, answer = map(int, shape.split("+"))
    return groups(prefix, answer, given.group, given.groups, given.vocabulary)


def main() -> None:
    given = options()
    if given.count:
        count_tokens(given)
        return
    place = "cpu" if given.tiny else "cuda"
    with tempfile.TemporaryDirectory() as directory:
        path = given.model or Path(directory)
        if not (path / "config.json").exists():
            if given.qwen35:
                write_qwen35(path, QWEN35, given.layers, device=place)
            else:
                write_model(path, given, device=place)
        theirs = {
            shape: run_trl(path, documents_of(shape, given), 3, given.trl_seconds, given.trl_only)
            for shape in (given.shapes if given.trl else ())
        }
        policy = load_policy(
            path,
            dtype="float32" if given.tiny else "bfloat16",
            device=place,
            activation_checkpointing=given.activation_checkpointing or bool(given.long),
            compiled=given.compile,
            attending=given.attention,
        )
    bench, found = Bench(policy, given), []
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; attention: {policy.attends.story}")
    if not given.tiny:
        print(f"{torch.cuda.get_device_name()}, matrix rate {matrix_rate() / 1e12:.0f} TFLOP/s", flush=True)
    for shape in given.shapes:
        found.append(bench.compare(shape, documents_of(shape, given), given.tokens))
        if given.trl:
            median = statistics.median(found[-1]["seconds"]["auto"])
            print_beside(theirs[shape], found[-1]["tokens"] / median, compiled=given.compile)
    if given.agents:
        documents = agents(given.agents, given.turns, given.end, given.vocabulary)
        longest = max(document.num_tokens for document in documents)
        found.append(bench.compare("agents", documents, max(given.tokens, longest * 3 // 2)))
    if given.long:
        found += bench.compare_long(given.long, 64 if given.tiny else 1024, given.branches)
    if given.random_steps:
        late = bench.random_trees(given.random_steps, given.tokens, given.vocabulary)
        print(f"{given.random_steps} steps of random trees: {late} graphs compiled after the fifth")
        found.append({"random_steps": given.random_steps, "late_graphs": late})
    if "OUT" in os.environ:
        name = f"prefixes-{time.time():.0f}.json"
        (Path(os.environ["OUT"]) / name).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
