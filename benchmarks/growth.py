"""Measure what must cost no more in a large run than in a small one.

    python benchmarks/growth.py            # every section
    python benchmarks/growth.py packing    # one

Each section prints a figure of this project beside the same figure of a tenth of the size: what grows shows.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def best(work: Callable[[], object], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def show(what: str, seconds: float) -> None:
    print(f"{what}: {1e3 * seconds:.3f} ms", flush=True)


# ---- prompts: what choosing the prompts of a step costs


def prompts() -> None:
    from truestep.sampler.groups import prompt_of

    for count in (100_000, 1_000_000):
        many = range(count)  # stands for the list of prompts: they are only picked from
        start = time.perf_counter()
        prompt_of(0, many, 0)
        show(f"prompts, {count:,}: the first step of an epoch", time.perf_counter() - start)
        show(f"prompts, {count:,}: 128 groups", best(lambda many=many: [prompt_of(n, many, 0) for n in range(128)]))


# ---- rejects: what ten more lines of rejected.jsonl cost, and the place in it that a save asks for


def rejects() -> None:
    from truestep.rollouts.rejects import write_rejected
    from truestep.run_directory import RunDirectory
    from truestep.types import Rejected

    for count in (100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            one = Rejected(
                "data/rollouts.jsonl", 7, "loss_mask has 4 values: expected 5, one for each of input_ids", "id"
            )
            write_rejected(folder, [one] * count)
            ten = [one] * 10
            show(f"rejects, {count:,}: ten more", best(lambda f=folder, t=ten: write_rejected(f, t, append=True)))
            show(f"rejects, {count:,}: the place for a save", best(RunDirectory(Path(folder)).rejected_bytes))


# ---- packing: micro-batches of one step


def packing() -> None:
    from truestep.rollouts.packing import balance, first_fit_decreasing

    draw = random.Random(0)
    for count in (10_000, 100_000):
        lengths = [min(16384, int(draw.lognormvariate(6.5, 1)) + 1) for _ in range(count)]
        show(f"packing, {count:,} documents: first fit", best(lambda n=lengths: first_fit_decreasing(n, 16384), 3))
        costs = [length * (1 + length / 20_000) for length in lengths]
        show(
            f"packing, {count:,} documents: balanced over 8 ranks",
            best(lambda n=lengths, c=costs: balance(n, c, 16384, 8), 3),
        )


SECTIONS = {"prompts": prompts, "rejects": rejects, "packing": packing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    for name in parser.parse_args().sections or SECTIONS:
        SECTIONS[name]()


if __name__ == "__main__":
    main()
