"""Diagnostics of transforms: near misses, numerics, bisection, fusion candidates and reports."""

from inlay.insight.explanation import Explanation, explain
from inlay.insight.findings import Finding

__all__ = ["Explanation", "Finding", "explain"]
