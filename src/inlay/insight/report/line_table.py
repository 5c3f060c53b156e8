"""Lines of programs, each distinct line stored once; unchanged lines are not repeated per transform."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inlay.program.text.diff_rows import DiffRow

KINDS = ("same", "changed", "removed", "added")


@dataclass
class LineTable:
    """A table of distinct lines.

    >>> lines = LineTable()
    >>> lines.add(["a = 1", "b = 2", "a = 1"])
    [0, 1, 0]
    >>> lines.texts
    ['a = 1', 'b = 2']
    """

    texts: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def intern(self, text: str) -> int:
        """Return the index of a line; add it if it is new."""
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place

    def add(self, lines: Iterable[str]) -> list[int]:
        """Return the indices of several lines."""
        return [self.intern(line) for line in lines]

    def rows(self, rows: Sequence[DiffRow]) -> list[int]:
        """Encode a side-by-side diff as three numbers per row: kind, left line, right line; -1 for no line.

        >>> from inlay.program.text.diff_rows import DiffRow
        >>> LineTable().rows([DiffRow("same", "a", "a"), DiffRow("added", "", "b")])
        [0, 0, 0, 3, -1, 1]
        """
        found: list[int] = []
        for row in rows:
            left = self.intern(row.left) if row.kind != "added" else -1
            right = self.intern(row.right) if row.kind != "removed" else -1
            found += (KINDS.index(row.kind), left, right)
        return found
