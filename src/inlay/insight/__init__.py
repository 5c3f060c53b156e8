"""Views over what transforms did: why not, what it did to numbers, whose fault."""

from inlay.insight.findings import Finding
from inlay.insight.near_misses import Explained, explain

__all__ = ["Explained", "Finding", "explain"]
