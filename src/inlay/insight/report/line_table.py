"""Lines of programs, each distinct one kept once: what a transform leaves alone is not stored again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inlay.program.text.diff_rows import DiffRow

KINDS = ("same", "changed", "removed", "added")


@dataclass
class LineTable:
    """A table of lines.

    >>> lines = LineTable()
    >>> lines.add(["a = 1", "b = 2", "a = 1"])
    [0, 1, 0]
    >>> lines.texts
    ['a = 1', 'b = 2']
    """

    texts: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def intern(self, text: str) -> int:
        """The number of a line."""
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place

    def add(self, lines: Iterable[str]) -> list[int]:
        """The numbers of several lines."""
        return [self.intern(line) for line in lines]

    def rows(self, rows: Sequence[DiffRow]) -> list[int]:
        """A side-by-side difference: three numbers a row, its kind and its two lines; -1 where there is none.

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
