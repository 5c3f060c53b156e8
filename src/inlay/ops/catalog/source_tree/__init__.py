"""Operators, Triton kernels and patterns in a source tree, found by static analysis. None of its code is executed."""

from inlay.ops.catalog.source_tree.entry import TreeEntry, TreeEntryKind, entries_for
from inlay.ops.catalog.source_tree.scan import TreeScan, scan_tree

__all__ = ["TreeEntry", "TreeEntryKind", "TreeScan", "entries_for", "scan_tree"]
