"""The page of a run (report.html), a comparison of several runs, and plots. It reads a run's files and nothing else.

page              the page; runs, tables: the files that it reads; static: its scripts and styles
verdicts          sentences on the health of a run, which the run itself says too while it goes on
health, figures   the page's verdicts and numbers; charts, plans, series, payload: its charts
browser           the viewer of rollouts; examples: evaluations; numbers: the table of all metrics
serve             the page of a run that goes on
plot, terminal    one plot as SVG or as text
"""

from truestep.report.page import write_report
from truestep.report.plot import write_plot
from truestep.report.terminal import text_plot

__all__ = ["text_plot", "write_plot", "write_report"]
