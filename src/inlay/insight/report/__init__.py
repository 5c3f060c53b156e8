"""HTML reports: what a build does to a model, the contents of a package, or the differences of two programs."""

from inlay.insight.report.model_report import report_program
from inlay.insight.report.package_report import report_package
from inlay.insight.report.page import write_page

__all__ = ["report_package", "report_program", "write_page"]
