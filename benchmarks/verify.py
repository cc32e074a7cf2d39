"""How long `truestep verify` takes as a user types it, starting included: an example under every layout of four ranks.

    python benchmarks/verify.py [--examples grpo gspo] [--repeats 3]

The aim is two minutes for an example on two cores with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
AIM = 120.0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))
    parser.add_argument("--examples", nargs="+", choices=names, default=["grpo", "gspo"])
    parser.add_argument("--repeats", type=int, default=1)
    return parser.parse_args()


def time_verify(example: str, output: Path) -> tuple[float, int]:
    """The seconds that the command took, and the number of layouts that it went through."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "truestep", "verify", f"examples/{example}.yaml", "--output", str(output)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    return seconds, len(json.loads((output / "verify.json").read_text(encoding="utf-8"))["layouts"])


def main() -> None:
    given = options()
    print(f"{os.cpu_count()} cores; load before the first run: {os.getloadavg()[0]:.1f}")
    print(f"{'example':16}{'layouts':>8}{'seconds':>10}{'of the aim':>12}")
    with tempfile.TemporaryDirectory() as scratch:
        for example in given.examples:
            runs = [time_verify(example, Path(scratch) / f"{example}-{number}") for number in range(given.repeats)]
            seconds = statistics.median(seconds for seconds, _ in runs)
            print(f"{example:16}{runs[0][1]:8}{seconds:10.1f}{seconds / AIM:12.0%}", flush=True)


if __name__ == "__main__":
    main()
