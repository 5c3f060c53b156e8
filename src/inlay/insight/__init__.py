"""Views over what transforms say of themselves: why something did not match."""

from inlay.insight.explain import Explained, explain
from inlay.insight.findings import Finding

__all__ = ["Explained", "Finding", "explain"]
