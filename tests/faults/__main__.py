"""Plants faults in copies of the repository, one at a time, and tells which of them the tests catch.

make faults                                all of them
make faults only="clip-side muon-*"        some, by name or pattern; or by room
PYTHONPATH=src:tests python -m faults --help
"""

from __future__ import annotations

import argparse
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

from faults.listed import PLANTED, REPOSITORY, Fault, read_faults
from faults.planting import BROKEN, CAUGHT, MISSED, NOT_PLANTED, Outcome, import_first, run_all


def main() -> int:
    options = _parse()
    faults = [fault for fault in read_faults(options.list) if _is_wanted(fault, options.only)]
    if not faults:
        print(f"no fault is named {' or '.join(options.only)}", file=sys.stderr)
        return 2
    if options.show:
        for fault in faults:
            print(f"{fault.room:12} {fault.name:32} {fault.what}")
        return 0
    if not options.bare:
        import_first(options.repository)
    began = time.monotonic()
    outcomes = run_all(
        faults, options.repository, seed=options.seed, jobs=options.jobs, limit=options.limit, tell=_tell
    )
    _sum_up(outcomes, time.monotonic() - began)
    return int(any(outcome.result != CAUGHT for outcome in outcomes))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="names, patterns of names, or rooms")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are planted")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one test may take")
    parser.add_argument("--show", action="store_true", help="list the faults and plant none")
    parser.add_argument("--list", type=Path, default=PLANTED, help="the folder of the list")
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="what is copied")
    parser.add_argument("--bare", action="store_true", help="import nothing beforehand: for a repository without torch")
    return parser.parse_args()


def _is_wanted(fault: Fault, only: list[str]) -> bool:
    return not only or any(fnmatchcase(fault.name, word) or fault.room == word for word in only)


def _tell(outcome: Outcome) -> None:
    by = outcome.test.removeprefix("tests/")
    print(f"{outcome.result:12} {outcome.seconds:6.1f} s  {outcome.fault.name:34} {by}", flush=True)
    if outcome.told:
        print("    " + outcome.told.strip().replace("\n", "\n    "), flush=True)


def _sum_up(outcomes: list[Outcome], seconds: float) -> None:
    counts = {
        kind: sum(outcome.result == kind for outcome in outcomes) for kind in (CAUGHT, MISSED, NOT_PLANTED, BROKEN)
    }
    print(f"\n{len(outcomes)} faults in {seconds:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    for outcome in outcomes:
        if outcome.result != CAUGHT:
            print(f"{outcome.result:12} {outcome.fault.name}: {outcome.fault.what} {outcome.told.strip()[-300:]}")


if __name__ == "__main__":
    sys.exit(main())
