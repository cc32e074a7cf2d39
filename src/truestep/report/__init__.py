"""The report of one or several runs: a self-contained page, a stand-alone plot and a plot for the terminal."""

from truestep.report.page import write_report
from truestep.report.plot import write_plot
from truestep.report.terminal import text_plot

__all__ = ["text_plot", "write_plot", "write_report"]
