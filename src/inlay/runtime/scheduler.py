"""The scheduler: a pure function that plans the next engine step.

Every sequence in the decode phase gets a token in every step. The same step prefills at most one chunk of prompt
tokens, so a long prompt delays decoding by one chunk at most. Requests join when a slot is free and leave at any step.
Inputs and plans are tuples, because they are created at every step and tuples are cheap.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Limits:
    """Limits of the package and of the engine settings."""

    slots: int
    """Sequences that can run at once."""
    max_prefill_tokens: int
    """Maximum prefill tokens in a step that also decodes."""
    max_prefill_only_tokens: int
    """Maximum prefill tokens in a step without decode."""
    batches: tuple[int, ...] = ()
    """Batch sizes that have a bucket. Other batches are padded to the next of them."""


class WaitingRequest(NamedTuple):
    """A request that waits for a slot."""

    id: int
    arrival: int
    """Its number in the order of arrival."""
    priority: int = 0
    """Higher priorities are admitted first."""
    owner: str = ""
    """The tenant. Among equal priorities, the owner with the fewest slots comes first."""


class RunningSequence(NamedTuple):
    """A sequence that has a slot."""

    id: int
    arrival: int
    slot: int
    prefill_tokens_left: int
    """Prompt tokens that are not computed yet; 0 in the decode phase."""
    priority: int = 0
    owner: str = ""
    drafted_tokens: int = 0
    """Tokens that this step verifies. They are rows of the decode batch too."""


class StepPlan(NamedTuple):
    """The plan of one step."""

    admit: tuple[tuple[int, int], ...] = ()
    """Requests that get a slot: id, slot."""
    decode: tuple[int, ...] = ()
    """Sequences that decode one token, ordered by slot."""
    padding: tuple[int, ...] = ()
    """Free slots used as padding rows of the decode batch."""
    prefill: tuple[tuple[int, int], ...] = ()
    """Sequences to prefill: id, number of tokens."""


def schedule(waiting: Iterable[WaitingRequest], running: Sequence[RunningSequence], limits: Limits) -> StepPlan:
    """Plan the next step.

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
        tuple(_padding(sum(1 + each.drafted_tokens for each in answer), free[len(joining) :], limits.batches)),
        tuple(_split_prefill(running, limits.max_prefill_tokens if answer else limits.max_prefill_only_tokens)),
    )


def _select_admitted(
    waiting: list[WaitingRequest], running: Sequence[RunningSequence], most: int
) -> list[WaitingRequest]:
    """Return the requests that get a slot, by priority, then fewest slots of the owner, then arrival."""
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
    """Return free slots that pad a batch to a size that has a bucket; none if there are not enough."""
    wanted = min((size for size in batches if size >= count), default=count) - count if count else 0
    return free[:wanted] if wanted <= len(free) else ()
