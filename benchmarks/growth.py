"""What grows with a run's age and size, each figure beside its goal: `python benchmarks/growth.py [SECTION ...]`.

A section is a function that prints its figures with `figure`. Without arguments all of them run.
"""

import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECTIONS: dict[str, Callable[[], None]] = {}


def section(function: Callable[[], None]) -> Callable[[], None]:
    SECTIONS[function.__name__] = function
    return function


@contextmanager
def measured(found: list[float]) -> Iterator[None]:
    """Add the wall seconds and the processor seconds of the block to a list."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    found += [time.perf_counter() - wall, time.process_time() - processor]


def figure(name: str, value: float, unit: str, goal: float) -> None:
    mark = "ok" if value <= goal else "MISSED"
    print(f"  {name:<60} {value:10.4g} {unit:<4} (goal {goal:g} {unit}) {mark}", flush=True)


def write_run(directory: Path, steps: int, documents: int) -> None:
    """Write the files of a run as the trainer does, with as many metrics."""
    from truestep.files.whole import json_line

    names = ["loss", "new_logprobs", "old_logprobs", "grad_norm", "ratio_new_old", "kl_new_old", "reward", "entropy"]
    names += ["clipped_ratio_fraction", "advantage", "max_advantage", "min_advantage", "effective_sample_size"]
    names += ["learning_rate", "tokens_per_second", "step_time", "data_wait_time", "staleness", "max_staleness"]
    names += [f"own_{index}" for index in range(11)]
    directory.mkdir(parents=True)
    with (directory / "metrics.jsonl").open("w") as metrics, (directory / "ledger.jsonl").open("w") as ledger:
        for step in range(1, steps + 1):
            seen = step * documents
            line = {name: 1.0 + ((step * 7919 + index) % 1009) / 3.0 for index, name in enumerate(names)}
            counts = {"num_documents": documents, "documents_seen": seen, "num_tokens": 70_000, "num_labels": 60_000}
            metrics.write(json_line({"step": step, **line, **counts}))
            ids = [f"rollouts-{step}.jsonl:{index}" for index in range(documents)]
            ledger.write(
                json_line({"step": step, "documents": ids, "num_documents": documents, "documents_seen": seen})
            )
    with (directory / "evaluation.jsonl").open("w") as evaluations:
        for step in range(0, steps + 1, max(1, steps // 1000)):
            examples = [{"prompt": "p" * 200, "completion": "c" * 1000, "reward": 1.0}] * 8
            rewards = {"greedy_reward": step / steps, "sampled_reward": step / steps, "num_prompts": 200}
            evaluations.write(
                json_line({"step": step, "documents_seen": step * documents, "examples": examples} | rewards)
            )
    (directory / "config.yaml").write_text(json.dumps({"schedule": {"docs_per_step": documents}}))


@section
def report() -> None:
    """Time the report of a run of 100,000 steps with 6.4 million documents, and the memory that it takes."""
    from truestep.report import write_report

    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder) / "short", 10_000, 64)
        write_run(Path(folder) / "long", 100_000, 64)
        found: list[float] = []
        write_report([Path(folder) / "short"], Path(folder) / "short.html")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        with measured(found):
            write_report([Path(folder) / "long"], Path(folder) / "long.html")
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figure("report of 100,000 steps, wall time", found[0], "s", 10)
        figure("report of 100,000 steps, processor time", found[1], "s", 10)
        figure("peak memory over that of a tenth of the run", after - before, "MiB", 400)


@section
def ids() -> None:
    """Time what a step of 256 documents costs a stream that has seen many ids."""
    from truestep.rollouts.stream.ids import SeenIds

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream_ids.bin"
        known, count = SeenIds(path), 0
        for size in (10_000, 1_000_000, 5_000_000):
            for number in range(count, size):
                known.add(f"document-{number}")
            known.state()
            count = size
            steps, saves = [], []
            for step in range(50):
                names = [f"{size}-{step}-{number}" for number in range(256)]
                began = time.perf_counter()
                for name in names:
                    known.add(name)
                added = time.perf_counter()
                state = known.state()  # of a step that is saved: what is new goes to the disk
                steps.append(added - began)
                saves.append(time.perf_counter() - began)
            figure(f"ids of a step, {size:,} ids seen", 1000 * statistics.median(steps), "ms", 1.0)
            figure(f"ids of a step that is saved, {size:,} ids seen", 1000 * statistics.median(saves), "ms", 1.0)
            again = SeenIds(path)
            began = time.perf_counter()
            again.restore(state)
            figure(f"restart, {size:,} ids seen", time.perf_counter() - began, "s", 3.0)
            assert not again.add("document-0")
            again.close()


@section
def prompts() -> None:
    """Time how the prompts of a step of 128 groups are chosen among a million."""
    from truestep.environments.prompts import Prompt
    from truestep.generate.order import OrderOptions, PromptOrder

    for count in (100_000, 1_000_000):
        order = PromptOrder([Prompt(str(number), "", {}, (1,)) for number in range(count)], 0, OrderOptions())
        order.next()  # the order of a pass is made once
        steps = []
        for _ in range(50):
            began = time.perf_counter()
            for _ in range(128):
                order.next()
            steps.append(time.perf_counter() - began)
        figure(f"prompts of a step, {count:,} prompts", 1000 * statistics.median(steps), "ms", 2.0)


@section
def rejects() -> None:
    """Time what ten more rejected records cost, and the place in rejected.jsonl that a save asks for."""
    from truestep.rollouts.rejects import write_rejected
    from truestep.run.directory import RunDirectory
    from truestep.types import Rejected

    one = Rejected("data/rollouts.jsonl", 7, "loss_mask has 4 values: expected 5, one for each of input_ids", "id")
    for count in (100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            write_rejected(folder, [one] * count)
            appends = []
            for _ in range(20):
                began = time.perf_counter()
                write_rejected(folder, [one] * 10, append=True)
                RunDirectory(Path(folder)).rejected_bytes()
                appends.append(time.perf_counter() - began)
            figure(f"ten rejects appended to {count:,}", 1000 * statistics.median(appends), "ms", 1.0)


@section
def packing() -> None:
    """Time how the documents of a step are packed into micro-batches."""
    from truestep.rollouts.packing import balance, first_fit_decreasing

    draw = random.Random(0)
    for count in (10_000, 100_000):
        lengths = [min(16384, int(draw.lognormvariate(6.5, 1)) + 1) for _ in range(count)]
        costs = [length * (1 + length / 20_000) for length in lengths]
        found: list[float] = []
        with measured(found):
            first_fit_decreasing(lengths, 16384)
        with measured(found):
            balance(lengths, costs, 16384, 8)
        figure(f"first fit of {count:,} documents, processor time", found[1], "s", 1.0)
        figure(f"balanced micro-batches of {count:,} documents, processor time", found[3], "s", 1.0)


def main() -> None:
    for name in sys.argv[1:] or SECTIONS:
        print(f"{name}: {SECTIONS[name].__doc__}", flush=True)
        SECTIONS[name]()


if __name__ == "__main__":
    main()
