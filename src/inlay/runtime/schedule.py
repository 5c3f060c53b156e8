"""The scheduler: which sequences compute what in the next step. A pure function of what it is given.

Every sequence that has begun to answer gets its next token in every step. Beside that, prompts are read on by at most a
chunk, so a long prompt delays nobody by more than a chunk. Requests join when there is a slot and leave at any step.
What it is given and what it gives are tuples: they are made at every step, and those are made quickly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Limits:
    """What a package and its user allow."""

    slots: int
    """Sequences that can be in the cache at once."""
    chunk: int
    """Tokens of prompts that are read in one step while others wait for their next token."""
    alone: int
    """The same when nobody waits."""
    batches: tuple[int, ...] = ()
    """Sizes of batches for which there is code of its own: others are filled up to the next of them."""


class Ask(NamedTuple):
    """A request that waits for a slot."""

    id: int
    arrived: int
    """Its number in the order of arrival."""
    priority: int = 0
    """Higher ones are taken first."""
    owner: str = ""
    """Whose it is; among equal priorities those are taken first who have the fewest slots."""


class Running(NamedTuple):
    """A sequence that has a slot."""

    id: int
    arrived: int
    slot: int
    left: int
    """Tokens of its prompt that were not read yet; 0: it answers."""
    priority: int = 0
    owner: str = ""


class Step(NamedTuple):
    """What happens next."""

    join: tuple[tuple[int, int], ...] = ()
    """Requests that get a slot: id, slot."""
    answer: tuple[int, ...] = ()
    """Sequences that get a token each, in the order of their slots."""
    padding: tuple[int, ...] = ()
    """Free slots that fill up the batch."""
    read: tuple[tuple[int, int], ...] = ()
    """Sequences whose prompts are read on, and by how many tokens."""


def schedule(waiting: Iterable[Ask], running: Sequence[Running], limits: Limits) -> Step:
    """The next step.

    >>> limits = Limits(slots=2, chunk=64, alone=512)
    >>> schedule([Ask(7, 0), Ask(8, 1), Ask(9, 2)], [], limits).join
    ((7, 0), (8, 1))
    >>> long, short = Running(7, 0, slot=0, left=500), Running(8, 1, slot=1, left=0)
    >>> schedule([], [long, short], limits)
    Step(join=(), answer=(8,), padding=(), read=((7, 64),))
    >>> schedule([], [long], limits).read
    ((7, 500),)
    >>> greedy, other = [Ask(id, id, owner="a") for id in range(4)], Ask(9, 9, owner="b")
    >>> schedule([*greedy, other], [], limits).join
    ((0, 0), (9, 1))
    """
    taken = {each.slot for each in running}
    free = [slot for slot in range(limits.slots) if slot not in taken]
    joining = _joining(list(waiting), running, len(free))
    answer = sorted((each for each in running if not each.left), key=lambda each: each.slot)
    return Step(
        tuple((each.id, slot) for each, slot in zip(joining, free, strict=False)),
        tuple(each.id for each in answer),
        tuple(_padding(len(answer), free[len(joining) :], limits.batches)),
        tuple(_reading(running, limits.chunk if answer else limits.alone)),
    )


def _joining(waiting: list[Ask], running: Sequence[Running], most: int) -> list[Ask]:
    """Who gets a slot: by priority, then who has the fewest, then who came first."""
    has = Counter(each.owner for each in running)
    has[""] = 0
    joining: list[Ask] = []
    while waiting and len(joining) < most:
        first = min(waiting, key=lambda each: (-each.priority, has[each.owner], each.arrived))
        has[first.owner] += bool(first.owner)
        waiting.remove(first)
        joining.append(first)
    return joining


def _reading(running: Sequence[Running], most: int) -> Iterable[tuple[int, int]]:
    for each in sorted(running, key=lambda each: (-each.priority, each.arrived)):
        if each.left and most:
            count = min(each.left, most)
            most -= count
            yield each.id, count


def _padding(count: int, free: Sequence[int], batches: Sequence[int]) -> Sequence[int]:
    """Slots to fill a batch up to a size that there is code for; none where that cannot be done."""
    wanted = min((size for size in batches if size >= count), default=count) - count if count else 0
    return free[:wanted] if wanted <= len(free) else ()
