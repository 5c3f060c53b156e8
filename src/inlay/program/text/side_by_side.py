"""A diff as lines of text: old and new line side by side, or one below the other if they do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from inlay.program.text.diff_rows import drop_equal_notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from inlay.program.text.diff import Diff
    from inlay.program.text.diff_rows import DiffRow

_MARKS = {"removed": "-", "added": "+"}
_SEPARATOR = " │ "
_LINES = 60
"""One screen: a short diff gets less context if it would be longer."""


@dataclass(frozen=True)
class DiffLine:
    """A line to print. `kind` is the kind of its row, or `count`; a `changed` line consists of two halves."""

    kind: str
    text: str
    right_start: int = 0
    """Where the second half of a changed line starts."""


def diff_lines(diff: Diff, width: int = 120, context: int | None = None) -> list[DiffLine]:
    """Return the difference of two programs as lines to print.

    With `context`, all differences with that many equal lines around them. Without it, each kind of change once, with
    as much context as fits on a screen.
    """
    if diff.is_equal:
        return [DiffLine("count", f"The programs are identical: {diff.node_counts[0]} nodes.")]
    counts = list(_counts(diff, width))
    if context is not None:
        return [*_lay_out(diff.hunks(context), width), *counts]
    lines: list[DiffLine] = []
    for around, gaps in ((2, True), (1, True), (0, True), (0, False)):
        lines = [*_lay_out(diff.summary(around, gaps=gaps), width), *_summary_line(diff), *counts]
        if len(lines) <= _LINES:
            break
    return lines


def _lay_out(rows: Iterable[DiffRow], width: int) -> Iterator[DiffLine]:
    half = (width - 2 - len(_SEPARATOR)) // 2
    for row in rows:
        left, right = drop_equal_notes(row.left, row.right)
        if row.kind == "changed" and max(len(left), len(right)) <= half:
            yield DiffLine("changed", f"~ {left:<{half}}{_SEPARATOR}{right}", 2 + half)
        elif row.kind == "changed":
            yield from _wrap_line("removed", left, width)
            yield from _wrap_line("added", right, width)
        else:
            yield from _wrap_line(row.kind, right if row.kind == "added" else left, width)


def _wrap_line(kind: str, text: str, width: int) -> Iterator[DiffLine]:
    mark = _MARKS.get(kind, " ")
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    for part in wrap(text, width - 2, subsequent_indent=indent, break_on_hyphens=False) or [""]:
        yield DiffLine(kind, f"{mark} {part}".rstrip())


def _summary_line(found: Diff) -> Iterator[DiffLine]:
    differ = sum(row.kind != "same" for row in found.rows)
    ways = sum(found.first_change_mask)
    if ways < differ:
        yield DiffLine("count", f"{differ} lines differ by {ways} kinds of change; each kind is shown at least once.")


def _counts(found: Diff, width: int) -> Iterator[DiffLine]:
    changes = ", ".join(f"{count:+d} {name}" for name, count in found.operator_deltas.items())
    text = f"nodes {found.node_counts[0]} → {found.node_counts[1]}" + (f"; {changes}" if changes else "")
    yield from (DiffLine("count", part) for part in wrap(text, width, break_on_hyphens=False))
    for sentence in found.binding_changes:
        yield from (DiffLine("count", part) for part in wrap(sentence, width, break_on_hyphens=False))
    if not found.binding_changes and not changes and not any(found.hunks(0)):
        yield DiffLine("count", "The text is identical; types or the order of operands differ.")
