"""What keeping rollouts and splitting a step's time cost: milliseconds a step, and the share of a real step that is.

    python benchmarks/kept.py

A step has 256 documents in groups of 8. Its tokens are those of a tokenizer of bytes (BPE, 8,000 tokens), trained on
the pages of docs; the recorder has its default options. All of its time is the run's own: none is hidden behind a GPU.
The step it is held against is the shortest that there can be: the forward and backward passes of a model of 1.7 billion
weights at 400 TFLOP/s, which is an H200 at 40% of its peak, and no sampling at all.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from truestep.config.sections import RolloutsConfig
from truestep.metrics.spent import Stopwatch
from truestep.rollouts.kept.recorder import RolloutRecorder
from truestep.rollouts.kept.rows import choose
from truestep.step.compute.groups import measure_answers
from truestep.types import DocumentScore, Rollout, StepPlan, StepTotals

DOCUMENTS, GROUP, STEPS = 256, 8, 40
LENGTHS = (256, 1024, 4096)
WEIGHTS, SPEED = 1.7e9, 400e12
DOCS = Path(__file__).parents[1] / "docs"


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8000, show_progress=False)
    tokenizer.train([str(page) for page in sorted(DOCS.glob("*.md"))], trainer)
    return tokenizer


def make_plan(tokenizer: Tokenizer, length: int) -> tuple[StepPlan, list[DocumentScore]]:
    ids = tokenizer.encode("".join(page.read_text() for page in sorted(DOCS.glob("*.md")))).ids
    random = np.random.default_rng(0)
    documents, scores = [], []
    for number in range(DOCUMENTS):
        start = int(random.integers(len(ids) - length - 100))
        mask = np.arange(length + 100) >= 100
        logprobs = np.where(mask, -random.random(length + 100), 0).astype(np.float32)
        documents.append(
            Rollout(
                id=f"{number // GROUP}-{number % GROUP}",
                input_ids=np.array(ids[start : start + length + 100]),
                loss_mask=mask,
                logprobs=logprobs,
                advantages=mask * np.float32(random.normal()),
                reward=float(random.random()),
                group_id=str(number // GROUP),
                model_version=np.zeros(length + 100, np.int64),
                truncated=False,
            )
        )
        scores.append(DocumentScore(documents[-1].id, logprobs[mask] + np.float32(0.01), -logprobs[mask]))
    totals = StepTotals(DOCUMENTS, DOCUMENTS * length, DOCUMENTS * (length + 100))
    return StepPlan(tuple(documents), tuple((index,) for index in range(DOCUMENTS)), totals, 0), scores


def milliseconds(work: Callable[[int], object]) -> float:
    taken = []
    for step in range(1, STEPS + 1):
        start = time.perf_counter()
        work(step)
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.fmean(taken)


def pieces(step: int) -> None:
    """Mark the pieces of a step of 32 micro-batches."""
    stopwatch = Stopwatch()
    for _ in range(32):
        with stopwatch.measure("forward"), stopwatch.measure("head"):
            pass
        with stopwatch.measure("backward"):
            pass
    stopwatch.drain()


def make_recorder(folder: Path, tokenizer: Tokenizer) -> RolloutRecorder:
    def decode(ids: Sequence[int], plain: bool) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=plain))

    return RolloutRecorder(folder, **RolloutsConfig().model_dump(), decode=decode, say=print, writes=True)


def main() -> None:
    tokenizer = make_tokenizer()
    print(f"{'tokens':>7} {'keep ms':>8} {'write ms':>9} {'metrics ms':>11} {'step s':>7} {'share':>7}")
    for length in LENGTHS:
        plan, scores = make_plan(tokenizer, length)
        chosen = [scores[place] for place in choose(plan.documents, RolloutsConfig().documents)]
        with tempfile.TemporaryDirectory() as folder:
            recorder = make_recorder(Path(folder), tokenizer)
            keep(recorder, plan, chosen, 0)
            recorder.sync()  # Parquet's library is imported
            kept = milliseconds(partial(keep, recorder, plan, chosen))
            start = time.perf_counter()
            recorder.sync()
            written = 1000 * (time.perf_counter() - start) / STEPS
        measured = milliseconds(partial(measure, plan))
        step = 6 * WEIGHTS * DOCUMENTS * (length + 100) / SPEED
        share = (kept + written + measured) / 1000 / step
        print(f"{length:>7} {kept:>8.2f} {written:>9.2f} {measured:>11.2f} {step:>7.2f} {share:>7.2%}")


def keep(recorder: RolloutRecorder, plan: StepPlan, scores: Sequence[DocumentScore], step: int) -> None:
    recorder.wanted(plan)
    recorder.trained(step, plan, scores)


def measure(plan: StepPlan, step: int) -> None:
    measure_answers(plan.documents)
    pieces(step)


if __name__ == "__main__":
    main()
