"""The page of a run (report.html), and a comparison of several runs. It reads a run's files and nothing else.

page              the page; runs, tables: the files that it reads; static: its scripts and styles
verdicts          sentences on the health of a run, which the run itself says too while it goes on
health, figures   the page's verdicts and numbers; charts, plans, series, payload: its charts
rollouts          the viewer of rollouts; examples: evaluations; numbers: the table of all metrics
"""

from truestep.report.page import write_report

__all__ = ["write_report"]
