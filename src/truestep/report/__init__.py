"""The report of a run (report.html), and the comparison of several runs. It reads only the runs' files.

page              the HTML page
runs, tables      read the files of a run
parts, static     scripts and styles of the page
generations       the changes of ranks, as a table and as marks on charts
verdicts          judgements of a run; during training they are warnings
health, figures   the page's verdicts and key numbers
chart_specs       the metrics of each chart, and how they are drawn
charts            charts with their lines
series, payload   points of lines, and the data for the script
rollouts          the viewer of rollouts
examples          evaluations
sources           the table of sources of prompts
numbers           the table of all metrics
drawing, style    SVG files, and colours
formats           numbers and durations as text
"""

from truestep.report.page import write_report

__all__ = ["write_report"]
