"""A report: one page about what happened to a model on its way to a package, or about what differs between two."""

from inlay.insight.report.model import report_of_program
from inlay.insight.report.package import report_of_package
from inlay.insight.report.page import write_page

__all__ = ["report_of_package", "report_of_program", "write_page"]
