"""Assertions for your own transforms: they fire where they should, not where they must not, and keep the numbers."""

from inlay.testing.rewrites import assert_rewrites, assert_untouched, op_counts, program_of

__all__ = ["assert_rewrites", "assert_untouched", "op_counts", "program_of"]
