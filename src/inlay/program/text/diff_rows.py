"""Rows of a side-by-side diff: built from two texts, and selected for display."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from keyword import iskeyword
from typing import TYPE_CHECKING

from inlay.program.text.alignment import align

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WORD = re.compile(r"(?<![\w.'])([A-Za-z_]\w*)((?:\.\w+|\[\d+\])*)")
_NAMESPACE = re.compile(r"(?:import )?(\w+)(?: = torch\.ops\.\w+)?$")
_ASSIGNMENT = re.compile(r"\s*(def \w+|for |return|[\w, ]+ = )")


@dataclass(frozen=True)
class DiffRow:
    """One line of a side-by-side diff: `same`, `changed`, `removed`, `added`, or a count of `skipped` lines."""

    kind: str
    left: str = ""
    right: str = ""


def build_rows(left: Sequence[str], right: Sequence[str]) -> Iterator[DiffRow]:
    """Align two texts function by function if both have the same functions, else as a whole."""
    ours, theirs = _functions(left), _functions(right)
    if list(ours) == list(theirs):
        for name, lines in ours.items():
            yield from _align_rows(lines, theirs[name])
    else:
        yield from _align_rows(left, right)


def _functions(lines: Sequence[str]) -> dict[str, list[str]]:
    """Return lines by function; the lines before the first function have an empty name."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in lines:
        if line.startswith("def "):
            name = line.partition("(")[0]
        found.setdefault(name, []).append(line)
    return found


def _align_rows(left: Sequence[str], right: Sequence[str]) -> Iterator[DiffRow]:
    i = j = 0
    for a, b in [*align(left, right), (len(left), len(right))]:
        yield from _changes(left[i:a], right[j:b])
        if a < len(left):
            yield DiffRow("same", left[a], right[b])
        i, j = a + 1, b + 1


def _changes(old: Sequence[str], new: Sequence[str]) -> Iterator[DiffRow]:
    """Pair lines that assign the same name; pair the others in order."""
    i = j = 0
    names = [[_assignment_target(line) for line in side] for side in (old, new)]
    for a, b in [*align(*names), (len(old), len(new))]:
        for step in range(max(a - i, b - j)):
            before = old[i + step] if i + step < a else None
            after = new[j + step] if j + step < b else None
            kind = "removed" if after is None else "added" if before is None else "changed"
            yield DiffRow(kind, before or "", after or "")
        if a < len(old):
            yield DiffRow("changed", old[a], new[b])
        i, j = a + 1, b + 1


def _assignment_target(line: str) -> str:
    found = _ASSIGNMENT.match(line)
    return found.group(1) if found else line


def excerpt(
    rows: Sequence[DiffRow], selected: Sequence[bool], context: int, *, titles: bool = False, gaps: bool = True
) -> Iterator[DiffRow]:
    """Yield the selected rows with `context` rows around them.

    With `titles`, the first line of their function is included. Omitted rows that differ are always counted; with
    `gaps`, equal ones are counted too.
    """
    near = [False] * len(rows)
    function = 0
    for index, (row, keep) in enumerate(zip(rows, selected, strict=True)):
        function = index if row.left.startswith("def ") else function
        if keep:
            low, high = max(0, index - context), min(len(rows), index + context + 1)
            near[low:high] = [True] * (high - low)
            near[function] = near[function] or (titles and function > 0)
    left_out: list[DiffRow] = []
    for row, keep in zip(rows, near, strict=True):
        if not keep:
            left_out.append(row)
            continue
        yield from _gap_row(left_out, gaps=gaps)
        left_out = []
        yield row
    if any(row.kind != "same" for row in left_out):
        yield from _gap_row(left_out, gaps=gaps)


def _gap_row(rows: Sequence[DiffRow], *, gaps: bool) -> Iterator[DiffRow]:
    """Yield a row that counts these rows; a single row is shown instead."""
    alike = sum(row.kind != "same" for row in rows)
    if len(rows) == 1 and (gaps or alike):
        yield rows[0]
    elif alike:
        equal = f", {len(rows) - alike} equal" if len(rows) > alike else ""
        yield DiffRow("skipped", f"… {len(rows)} lines: {alike} changed like lines above{equal}")
    elif rows and gaps:
        yield DiffRow("skipped", f"… {len(rows)} equal lines")


def mark_first_changes(rows: Sequence[DiffRow]) -> list[bool]:
    """Mark the rows that show a kind of change for the first time."""
    namespaces = _namespaces(rows)
    seen: set[tuple[str, ...]] = set()
    first: list[bool] = []
    for row in rows:
        key = (row.kind, *(normalize_line(side, namespaces) for side in drop_equal_notes(row.left, row.right)))
        first.append(row.kind != "same" and key not in seen)
        seen.add(key)
    return first


def normalize_line(line: str, namespaces: frozenset[str]) -> str:
    """Return a line without names of values and weights, so that equal operations on different values compare equal.

    >>> normalize_line("    add_3 = add_1 + aten.linear(mul_2, w.mlp.up.weight).view(batch, 4)", frozenset({"aten"}))
    '_ = _ + aten.linear(_, _).view(_, 4)'
    """

    def plain(found: re.Match[str]) -> str:
        name, rest = found.groups()
        after = line[found.end() : found.end() + 2]
        if name in namespaces or iskeyword(name) or (after[:1] == "(" and not rest):
            return found.group()
        if after[:1] == "=" and after != "==" and not rest:
            return name
        kept = re.search(r"\.\w+$" if after[:1] == "(" else r"^(\[\d+\])+$", rest)
        return "_" + (kept.group() if kept else "")

    code, mark, note = line.strip().partition("  # ")
    line = code
    return _WORD.sub(plain, code) + mark + note


def _namespaces(rows: Sequence[DiffRow]) -> frozenset[str]:
    """Return the namespaces that the texts import before their first function."""
    lines = chain.from_iterable((row.left, row.right) for row in rows if not row.left.startswith(" "))
    return frozenset(found.group(1) for line in lines if (found := _NAMESPACE.match(line)))


def drop_equal_notes(left: str, right: str) -> tuple[str, str]:
    """Remove type notes unless only they differ; with notes, most lines would have to be wrapped."""
    codes = [_code(side) for side in (left, right)]
    return (left, right) if codes[0] == codes[1] and left != right else (codes[0], codes[1])


def _code(line: str) -> str:
    code, mark, note = line.rpartition("  # ")
    return code if mark and not note.startswith("×") else line
