"""A sink that judges a run while it trains. It prints each warning once, and again only if the problem has gone and
come back."""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from truestep.report.tables import LARGEST_VALUE, Reasons, finite
from truestep.report.verdicts import judge
from truestep.report.verdicts.evidence import Evidence, Verdict
from truestep.text import printable

_GONE = 10  # a verdict counts as gone after this many steps without it
# The first 10 steps are judged one by one, later ones at most every two seconds. A judgement takes a millisecond.
_EACH, _OFTEN = 10, 2.0
LONGEST_QUOTE = 60  # the largest number of characters of a quoted completion


class Lines:
    """The numbers of lines that have a step, in one column per name, in the order of the lines."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))  # step, value, step, value, ...
        self._new: list[Mapping[str, Any]] = []  # lines that are not in the columns yet
        for line in lines:
            self._read(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. Its numbers are read later, when a column is needed, because it is faster to read many lines at
        once."""
        self._new.append(line)

    def _read_new(self) -> None:
        new, self._new = self._new, []
        for line in new:
            self._read(line)

    def _read(self, line: Mapping[str, Any]) -> None:
        step = finite(line, "step")
        if step is None:
            return
        columns = self._columns
        for name, value in line.items():
            # Inlined instead of `finite`, for speed: a line has a hundred values.
            if type(value) in (float, int) and -LARGEST_VALUE < value < LARGEST_VALUE:
                columns[name].extend((step, value))

    @property
    def names(self) -> list[str]:
        self._read_new()
        return list(self._columns)

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        self._read_new()
        if name not in self._columns:
            return np.empty(0), np.empty(0)
        steps, values = np.frombuffer(self._columns[name]).reshape(-1, 2).T.copy()
        return steps, values


def most_common(completions: Iterable[object]) -> str | None:
    """Quote the most common completion, cut to `LONGEST_QUOTE` characters."""
    counts = Counter(text for text in completions if isinstance(text, str))
    if not counts:
        return None
    return f"`{printable(counts.most_common(1)[0][0], LONGEST_QUOTE)}`"


class Watching:
    """A sink that judges the run after each step and each evaluation."""

    def __init__(
        self,
        say: Callable[[str], None],
        record: Callable[[dict[str, Any]], None],
        *,
        rejected_in: str,
        pass_reward: float | None = None,
        updates: int = 1,
        steps: Iterable[Mapping[str, Any]] = (),
        evaluations: Iterable[Mapping[str, Any]] = (),
        warnings: Iterable[Mapping[str, Any]] = (),
    ):
        """Make the sink. `say` prints a warning and `record` writes it to warnings.jsonl. `steps`, `evaluations` and
        `warnings` are the lines of earlier starts."""
        self._say, self._record = say, record
        self._rejected_in, self._pass_reward, self._updates = rejected_in, pass_reward, updates
        self._steps, self._evaluations, self._rejected = Lines(steps), Lines(evaluations), Reasons()
        self._completions: list[object] = []
        # Maps the kinds of verdicts that were printed to the last step at which each held.
        self._standing = {str(warning.get("kind")): math.inf for warning in warnings}
        self._count = 0  # steps since the start
        self._unjudged = 0.0  # seconds of the steps since the last judgement
        self._fault: str | None = None  # the error message of a failed judgement, which is printed once

    def step(self, line: Mapping[str, Any]) -> None:
        self._steps.add(line)
        took = finite(line, "step_time")
        self._unjudged += _OFTEN if took is None else took
        self._count += 1
        if self._count <= _EACH or self._unjudged >= _OFTEN:
            self._unjudged = 0.0
            self._tell(line["step"])

    def evaluation(self, line: Mapping[str, Any]) -> None:
        self._evaluations.add(line)
        self._unjudged = 0.0
        self._tell(line["step"])

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self._completions = [row.get("completion") for row in rows if not row.get("rejected")]

    def rejected(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self._rejected.add(reason)

    def close(self) -> None: ...

    def judged(self) -> list[Verdict]:
        """Return the verdicts on the lines so far."""
        return judge(
            Evidence(
                cache(self._steps.column),  # verdicts ask for the same columns
                cache(self._evaluations.column),
                self._steps.names,
                rejected=self._rejected.counts,
                rejected_in=self._rejected_in,
                pass_reward=self._pass_reward,
                updates=self._updates,
                quote=lambda: most_common(self._completions),
            )
        )

    @property
    def sentence(self) -> str:
        """The verdict on what the policy learned, and the titles of warnings; empty if nothing is known."""
        if self._fault is not None:
            return ""
        learnt, *others = self.judged()
        said = [] if learnt.kind in ("early", "unknown") else [learnt.sentence]
        said += [f"{other.title}." for other in others if other.level in ("bad", "warning")]
        return " ".join(said)

    def _tell(self, step: int) -> None:
        try:
            self._tell_of(step)
        except Exception as error:  # an error of a judgement must not end the run
            if self._fault is None:
                self._fault = printable(f"{type(error).__name__}: {error}")
                self._say(f"warning: after step {step}: the run cannot be judged: {self._fault}; training goes on")

    def _tell_of(self, step: int) -> None:
        found = {verdict.kind: verdict for verdict in self.judged() if verdict.level in ("bad", "warning")}
        for kind, last in list(self._standing.items()):
            self._standing[kind] = step if kind in found else min(last, step)
            if step - self._standing[kind] >= _GONE:
                del self._standing[kind]
        for kind, verdict in found.items():
            if kind in self._standing:
                continue
            self._standing[kind] = step
            self._say(f"warning: after step {step}: {verdict.text}")
            said = {"kind": kind, "level": verdict.level, "title": verdict.title, "text": verdict.text}
            self._record({"step": step, **said})
