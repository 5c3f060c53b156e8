"""Schedule: critical-path list scheduling over measured times, and the fewest events that keep it right."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

from inlay.errors import UsageError
from inlay.program.pause import collector_paused
from inlay.streams.checking import reuses
from inlay.streams.order import Order, predecessors, successors
from inlay.streams.schedules import Event, Schedule, in_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.streams.work import Work


@collector_paused()
def schedule(work: Work, *, lanes: int = 2, event_seconds: float) -> Schedule:
    """Give each task to a lane: the one with the longest way to the end first, each where it can start first.

    To wait for another lane costs `event_seconds`, so a task leaves the lane of what it needs only when that pays. What
    would take no less time than the tasks in order is not done: the answer is then one lane.
    """
    if lanes < 1 or event_seconds < 0:
        raise UsageError(f"{lanes} lanes and {event_seconds} seconds an event are no lanes to plan for.")
    _refuse_unmeasured(work)
    before = predecessors(work)
    made = _listed(work, before, lanes, event_seconds)
    spread = Schedule(made)
    spread = reduced(replace(spread, events=edges_across(work, spread)))
    end = max((finish for _, finish in predicted(work, spread, event_seconds).values()), default=0.0)
    if len(made) <= 1 or end >= work.seconds:
        return in_order(work)
    return replace(spread, recorded=tuple(race.storage for race in reuses(work, spread, Order(spread))))


def _refuse_unmeasured(work: Work) -> None:
    for task in work.tasks:
        if task.seconds is None:
            raise UsageError(f"Nobody has measured {task.name}.", "Measure it, or say that it takes 0 seconds.")


def _listed(
    work: Work, before: Sequence[Sequence[int]], lanes: int, event_seconds: float
) -> tuple[tuple[str, ...], ...]:
    """The tasks of each lane in order; lanes that stay empty are left out."""
    after = successors(before)
    seconds = [task.seconds or 0.0 for task in work.tasks]
    ranks = _ranks(seconds, after)
    missing = [len(each) for each in before]
    ready = [(-ranks[place], place) for place, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    found: list[list[str]] = [[] for _ in range(lanes)]
    free, finish, home = [0.0] * lanes, [0.0] * len(work), [0] * len(work)
    while ready:
        _, place = heapq.heappop(ready)
        choice = range(1 if work.tasks[place].fixed else lanes)
        lane, start = _earliest(before[place], choice, free, finish, home, event_seconds)
        home[place], finish[place] = lane, start + seconds[place]
        free[lane] = finish[place]
        found[lane].append(work.tasks[place].name)
        for each in after[place]:
            missing[each] -= 1
            if not missing[each]:
                heapq.heappush(ready, (-ranks[each], each))
    return tuple(tuple(each) for each in found if each)


def _ranks(seconds: Sequence[float], after: Sequence[Sequence[int]]) -> list[float]:
    """For each task the longest way from its start to the end."""
    ranks = [0.0] * len(seconds)
    for place in reversed(range(len(seconds))):
        ranks[place] = seconds[place] + max((ranks[each] for each in after[place]), default=0.0)
    return ranks


def _earliest(
    needs: Sequence[int],
    choice: Sequence[int],
    free: Sequence[float],
    finish: Sequence[float],
    home: Sequence[int],
    event_seconds: float,
) -> tuple[int, float]:
    """The lane where a task can start first, and when; where several can, the lane of what it waits for longest."""
    latest = [float("-inf")] * len(free)
    for each in needs:
        if finish[each] > latest[home[each]]:
            latest[home[each]] = finish[each]
    near = max(range(len(latest)), key=latest.__getitem__) if needs else 0
    second = max((time for lane, time in enumerate(latest) if lane != near), default=float("-inf"))
    best, when = choice[0], float("inf")
    for lane in choice:
        others = second if lane == near else latest[near]
        start = max(free[lane], latest[lane], others + event_seconds)
        if start < when or (start == when and lane == near):
            best, when = lane, start
    return best, when


def edges_across(work: Work, schedule: Schedule) -> tuple[Event, ...]:
    """Every pair of tasks that must stay in order and is in two lanes: the events that one an edge would take."""
    lane, names = schedule.lane, [task.name for task in work.tasks]
    return tuple(
        Event(names[earlier], names[place])
        for place, needs in enumerate(predecessors(work))
        for earlier in needs
        if lane[names[earlier]] != lane[names[place]]
    )


def reduced(schedule: Schedule) -> Schedule:
    """The same order by the fewest events: the transitive reduction of events and lanes, lanes left as they are.

    >>> every = Event("a", "c"), Event("a", "d"), Event("b", "d")
    >>> print(reduced(Schedule((("a", "b"), ("c", "d")), every)))
    lane 0: a b
    lane 1: [a] c [b] d
    """
    order = Order(schedule)
    if order.circle:
        raise UsageError(f"The lanes wait for each other: {', '.join(order.circle)}.", "Take one of these events away.")
    kept = []
    for name, waited in schedule.waits.items():
        lane, place = order.lane[name], order.place[name]
        others = [*waited, schedule.lanes[lane][place - 1]] if place else waited
        for each in waited:
            implied = order.lane[each] == lane or any(order.before(each, other) for other in others)
            if not implied:
                kept.append(Event(each, name))
    return replace(schedule, events=tuple(kept))


def predicted(work: Work, schedule: Schedule, event_seconds: float) -> Mapping[str, tuple[float, float]]:
    """When each task would start and end, if all took the time that was measured and nothing else."""
    waits, lane = schedule.waits, schedule.lane
    free = [0.0] * len(schedule.lanes)
    times: dict[str, tuple[float, float]] = {}
    for name in Order(schedule).clock:
        start = max((times[each][1] + event_seconds for each in waits.get(name, ())), default=0.0)
        start = max(start, free[lane[name]])
        free[lane[name]] = start + (work[name].seconds or 0.0)
        times[name] = start, free[lane[name]]
    return times
