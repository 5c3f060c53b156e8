"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    Where the pieces are cut makes no difference: of several stop strings the one that is complete first counts.

    >>> stops = StopStrings(["END"])
    >>> stops.add("The E"), stops.add("arth EN"), stops.add("D of it"), stops.found
    ('The ', 'Earth ', '', True)
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if isinstance(strings, str) or not all(strings):
            raise UsageError("Stop strings are a list of texts, none of them empty.", 'Such as ["\\n\\n", "User:"].')
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that may be shown after one more piece."""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._strings if (start := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop`, short of all of it, that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
