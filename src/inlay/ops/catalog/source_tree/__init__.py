"""Operators, Triton kernels and patterns in a source tree, found by static analysis. None of its code is executed."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.ops.catalog.source_tree import cpp_file, python_file
from inlay.ops.catalog.source_tree.entry import TreeEntry, TreeEntryKind, entries_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["TreeEntry", "TreeEntryKind", "TreeScan", "entries_for", "scan_tree"]

LARGEST_FILE = 4 << 20
MOST_FILES = 200_000
_SUFFIXES = (".py", ".cpp", ".cc", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".inl")


@dataclass
class TreeScan:
    """The entries of one source tree, and what was not read."""

    root: str
    entries: list[TreeEntry] = field(default_factory=list)
    """In order of name."""
    files: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason → number of source files or folders that were not read."""
    seconds: float = 0.0

    @property
    def coverage(self) -> str:
        """How many files were read and skipped, as a sentence."""
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.skipped.items())) or "none"
        return f"{self.root}: {self.files:,} source files read in {self.seconds:.1f} s; skipped: {skipped}."

    def to_json(self) -> dict[str, Any]:
        """Return the scan as JSON data."""
        counts = Counter(each.kind.value for each in self.entries)
        return vars(self) | {"counts": counts, "entries": [each.to_json() for each in self.entries]}


def scan_tree(root: Path, on_step: Callable[[str], None] = lambda step: None) -> TreeScan:
    """Return what is registered in the Python, C++ and CUDA files of a folder."""
    if not root.is_dir():
        raise UsageError(f"--tree: {root} is not a folder.", "Give the folder of a checkout or an unpacked package.")
    scan = TreeScan(str(root))
    start = reported = time.perf_counter()
    for path in _source_files(scan.root, scan.skipped):
        read = python_file.read if path.endswith(".py") else cpp_file.read
        try:
            with open(path, "rb") as file:
                data = file.read(LARGEST_FILE + 1)
            if len(data) > LARGEST_FILE or b"\0" in data:
                scan.skipped["over 4 MiB" if len(data) > LARGEST_FILE else "binary"] += 1
                continue
            scan.entries += read(data, os.fsencode(path).decode("utf-8", "backslashreplace"))
            scan.files += 1
        except OSError:
            scan.skipped["unreadable"] += 1
        except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
            scan.skipped["not valid Python"] += 1
        if time.perf_counter() - reported > 2.0:
            reported = time.perf_counter()
            on_step(f"reading {scan.root}: {scan.files:,} files")
    scan.entries.sort(key=lambda each: (each.name, each.path, each.line))
    scan.seconds = round(time.perf_counter() - start, 3)
    return scan


def _source_files(root: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the regular source files of a folder. Links are not followed, hidden and test folders are not entered."""
    todo, seen = [root], 0
    while todo:
        try:
            with os.scandir(todo.pop()) as opened:
                entries = sorted(opened, key=lambda each: each.name)
        except OSError:
            skipped["unreadable"] += 1
            continue
        for entry in entries:
            seen += 1
            if seen > MOST_FILES:
                skipped[f"or more folders after {MOST_FILES:,} files"] += len(todo) + 1
                return
            if entry.is_dir(follow_symlinks=False):
                if entry.name in ("test", "tests") or entry.name.startswith("."):
                    skipped["hidden folders" if entry.name.startswith(".") else "test folders"] += 1
                else:
                    todo.append(entry.path)
            elif entry.name.endswith(_SUFFIXES) and entry.is_file(follow_symlinks=False):
                yield entry.path
            elif entry.name.endswith(_SUFFIXES):
                skipped["links or special files"] += 1
