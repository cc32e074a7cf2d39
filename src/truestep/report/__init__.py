"""The page about one run, or about several compared."""

from truestep.report.page import write_report

__all__ = ["write_report"]
