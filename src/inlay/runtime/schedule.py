"""The scheduler: which sequences compute what in the next step. A pure function of what it is given.

Every sequence that has begun to answer gets its next token in every step. Beside that, one prompt is read on by at most a
chunk, so a long prompt delays nobody by more than a chunk. Requests join when there is a slot and leave at any step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Limits:
    """What a package and its user allow."""

    slots: int
    """Sequences that can be in the cache at once."""
    chunk: int
    """Tokens of a prompt that are read in one step."""


@dataclass(frozen=True)
class Ask:
    """A request that waits for a slot."""

    id: int
    arrived: int
    """Its number in the order of arrival."""
    priority: int = 0
    """Higher ones are taken first."""


@dataclass(frozen=True)
class Sequence_:  # noqa: N801 - `Sequence` is another word
    """A sequence that has a slot."""

    id: int
    arrived: int
    slot: int
    left: int
    """Tokens of its prompt that were not read yet; 0: it answers."""
    priority: int = 0


@dataclass(frozen=True)
class Step:
    """What happens next."""

    join: tuple[tuple[int, int], ...] = ()
    """Requests that get a slot: id, slot."""
    answer: tuple[int, ...] = ()
    """Sequences that get a token each, in the order of their slots."""
    read: tuple[int, int] | None = None
    """The sequence whose prompt is read on, and by how many tokens."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.join or self.answer or self.read)


def schedule(waiting: Sequence[Ask], running: Sequence[Sequence_], limits: Limits) -> Step:
    """The next step.

    >>> limits = Limits(slots=2, chunk=64)
    >>> schedule([Ask(7, 0), Ask(8, 1), Ask(9, 2)], [], limits).join
    ((7, 0), (8, 1))
    >>> long, short = Sequence_(7, 0, slot=0, left=500), Sequence_(8, 1, slot=1, left=0)
    >>> schedule([], [long, short], limits)
    Step(join=(), answer=(8,), read=(7, 64))
    """
    taken = {each.slot for each in running}
    free = [slot for slot in range(limits.slots) if slot not in taken]
    joining = sorted(waiting, key=lambda each: (-each.priority, each.arrived))[: len(free)]
    answer = sorted((each for each in running if not each.left), key=lambda each: each.slot)
    reading = sorted((each for each in running if each.left), key=lambda each: (-each.priority, each.arrived))
    first = reading[0] if reading else None
    return Step(
        tuple((each.id, slot) for each, slot in zip(joining, free, strict=False)),
        tuple(each.id for each in answer),
        (first.id, min(first.left, limits.chunk)) if first else None,
    )
