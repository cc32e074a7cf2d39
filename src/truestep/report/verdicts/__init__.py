"""Verdicts on a run, from its metrics. A run in progress and its report use the same verdicts.

evidence          the metrics of a run in the form that verdicts use: trends, windows, held-out rewards
state             the one verdict on what the policy learns
beside            further verdicts, such as slow rewards or cut-off completions
watching          a sink that judges a run while it trains, and warns
"""

import numpy as np

from truestep.report.verdicts.beside import beside
from truestep.report.verdicts.evidence import Evidence, Level, Verdict
from truestep.report.verdicts.state import state

__all__ = ["Evidence", "Level", "Verdict", "judge"]


def judge(evidence: Evidence) -> list[Verdict]:
    """Return the verdict on what the policy learns, followed by the other verdicts."""
    with np.errstate(all="ignore"):  # metrics of any size may overflow here; then there is no verdict on them
        learns = state(evidence)
        return [learns, *beside(evidence, learns)]
