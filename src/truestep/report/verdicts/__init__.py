"""The judgement of a run, from its numbers alone: the same for a run that goes on and for its report."""

import numpy as np

from truestep.report.verdicts.beside import beside
from truestep.report.verdicts.evidence import Evidence, Level, Verdict
from truestep.report.verdicts.state import state

__all__ = ["Evidence", "Level", "Verdict", "judge"]


def judge(evidence: Evidence) -> list[Verdict]:
    """Give the verdict on what is learnt, and behind it those that stand beside it."""
    with np.errstate(all="ignore"):  # numbers may be of any size; those that overflow show nothing
        learns = state(evidence)
        return [learns, *beside(evidence, learns)]
