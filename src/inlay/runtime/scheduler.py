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
    max_prefill_tokens: int
    """Tokens of prompts that are read in one step while others wait for their next token."""
    max_prefill_only_tokens: int
    """The same when nobody waits."""
    batches: tuple[int, ...] = ()
    """Sizes of batches for which there is code of its own: others are filled up to the next of them."""


class WaitingRequest(NamedTuple):
    """A request that waits for a slot."""

    id: int
    arrival: int
    """Its number in the order of arrival."""
    priority: int = 0
    """Higher ones are taken first."""
    owner: str = ""
    """Whose it is; among equal priorities those are taken first who have the fewest slots."""


class RunningSequence(NamedTuple):
    """A sequence that has a slot."""

    id: int
    arrival: int
    slot: int
    prefill_tokens_left: int
    """Tokens of its prompt that were not read yet; 0: it answers."""
    priority: int = 0
    owner: str = ""


class StepPlan(NamedTuple):
    """What happens next."""

    admit: tuple[tuple[int, int], ...] = ()
    """Requests that get a slot: id, slot."""
    decode: tuple[int, ...] = ()
    """Sequences that get a token each, in the order of their slots."""
    padding: tuple[int, ...] = ()
    """Free slots that fill up the batch."""
    prefill: tuple[tuple[int, int], ...] = ()
    """Sequences whose prompts are read on, and by how many tokens."""


def schedule(waiting: Iterable[WaitingRequest], running: Sequence[RunningSequence], limits: Limits) -> StepPlan:
    """The next step.

    >>> limits = Limits(slots=2, max_prefill_tokens=64, max_prefill_only_tokens=512)
    >>> schedule([WaitingRequest(7, 0), WaitingRequest(8, 1), WaitingRequest(9, 2)], [], limits).admit
    ((7, 0), (8, 1))
    >>> long = RunningSequence(7, 0, slot=0, prefill_tokens_left=500)
    >>> short = RunningSequence(8, 1, slot=1, prefill_tokens_left=0)
    >>> schedule([], [long, short], limits)
    StepPlan(admit=(), decode=(8,), padding=(), prefill=((7, 64),))
    >>> schedule([], [long], limits).prefill
    ((7, 500),)
    >>> greedy, other = [WaitingRequest(id, id, owner="a") for id in range(4)], WaitingRequest(9, 9, owner="b")
    >>> schedule([*greedy, other], [], limits).admit
    ((0, 0), (9, 1))
    """
    taken = {each.slot for each in running}
    free = [slot for slot in range(limits.slots) if slot not in taken]
    joining = _select_admitted(list(waiting), running, len(free))
    answer = sorted((each for each in running if not each.prefill_tokens_left), key=lambda each: each.slot)
    return StepPlan(
        tuple((each.id, slot) for each, slot in zip(joining, free, strict=False)),
        tuple(each.id for each in answer),
        tuple(_padding(len(answer), free[len(joining) :], limits.batches)),
        tuple(_split_prefill(running, limits.max_prefill_tokens if answer else limits.max_prefill_only_tokens)),
    )


def _select_admitted(
    waiting: list[WaitingRequest], running: Sequence[RunningSequence], most: int
) -> list[WaitingRequest]:
    """Who gets a slot: by priority, then who has the fewest, then who came first."""
    has = Counter(each.owner for each in running)
    has[""] = 0
    joining: list[WaitingRequest] = []
    while waiting and len(joining) < most:
        first = min(waiting, key=lambda each: (-each.priority, has[each.owner], each.arrival))
        has[first.owner] += bool(first.owner)
        waiting.remove(first)
        joining.append(first)
    return joining


def _split_prefill(running: Sequence[RunningSequence], most: int) -> Iterable[tuple[int, int]]:
    for each in sorted(running, key=lambda each: (-each.priority, each.arrival)):
        if each.prefill_tokens_left and most:
            count = min(each.prefill_tokens_left, most)
            most -= count
            yield each.id, count


def _padding(count: int, free: Sequence[int], batches: Sequence[int]) -> Sequence[int]:
    """Slots to fill a batch up to a size that there is code for; none where that cannot be done."""
    wanted = min((size for size in batches if size >= count), default=count) - count if count else 0
    return free[:wanted] if wanted <= len(free) else ()
