"""What a run's age and the size of its data cost a step. Each section measures one thing that grows.

    python benchmarks/growth.py [SECTION ...]      # without one, all

Every section prints a table: what grows, its size, and what one step or start costs then.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from truestep.rollouts.stream.ids import SeenIds

_STEP = 256  # documents


def _memory() -> float:
    """The private memory of this process, in MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) / 1024


def ids(sizes: tuple[int, ...] = (10_000, 1_000_000, 5_000_000)) -> None:
    """A step of a stream: 256 new ids are looked up and added, and the step's state is noted."""
    print("stream ids: 256 new documents a step\n")
    print("| ids seen | step | save | restart | memory | file |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream_ids.bin"
        before = _memory()
        known, count = SeenIds(path), 0
        for size in sizes:
            for number in range(count, size):
                known.add(f"document-{number}")
            known.state()
            memory = _memory() - before
            steps, saves = [], []
            for step in range(50):
                names = [f"{size}-{step}-{number}" for number in range(_STEP)]
                began = time.perf_counter()
                for name in names:
                    known.add(name)
                steps.append(time.perf_counter() - began)
                began = time.perf_counter()
                state = known.state()
                saves.append(time.perf_counter() - began)
            count = size
            again = SeenIds(path)
            began = time.perf_counter()
            again.restore(state)
            restart = time.perf_counter() - began
            assert not again.add("document-0")
            again.close()
            del again
            print(
                f"| {size:,} | {1000 * statistics.median(steps):.2f} ms | {1000 * statistics.median(saves):.2f} ms "
                f"| {restart:.2f} s | {memory:.0f} MiB | {path.stat().st_size / 2**20:.0f} MiB |",
                flush=True,
            )


SECTIONS: dict[str, Callable[[], None]] = {"ids": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []])
    for name in parser.parse_args().sections or SECTIONS:
        SECTIONS[name]()
        print()


if __name__ == "__main__":
    main()
