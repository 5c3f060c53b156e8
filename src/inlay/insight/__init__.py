"""Views over what transforms did: why not, what it did to numbers, whose fault."""

from inlay.insight.explanation import Explanation, explain
from inlay.insight.findings import Finding

__all__ = ["Explanation", "Finding", "explain"]
