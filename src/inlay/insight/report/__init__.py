"""A report: one page about what happened to a model on its way to a package, or about what differs between two."""

from inlay.insight.report.model_report import report_program
from inlay.insight.report.package_report import report_package
from inlay.insight.report.page import write_page

__all__ = ["report_package", "report_program", "write_page"]
