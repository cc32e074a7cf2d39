"""The report of a run (report.html), and the comparison of several runs. It reads only the runs' files.

page              the HTML page; runs, tables: read the files of a run; parts, static: scripts and styles
verdicts          judgements of a run, also used as warnings while it trains
health, figures   the page's verdicts and key numbers
plans, charts     the charts' metrics and lines; series, payload: their points, and the data for the script
rollouts          the viewer of rollouts; examples: evaluations; numbers: the table of all metrics
drawing           SVG files; style: the colours; formats: numbers and durations as text
"""

from truestep.report.page import write_report

__all__ = ["write_report"]
