"""Views over what transforms say of themselves: why something did not match."""

from inlay.insight.findings import Finding
from inlay.insight.near_misses import Explained, explain

__all__ = ["Explained", "Finding", "explain"]
