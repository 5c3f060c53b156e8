"""Critical-path list scheduling with measured times, and the fewest events that keep a schedule correct."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

from inlay.errors import UsageError
from inlay.program.gc_pause import pause_gc
from inlay.streams.happens_before import HappensBefore, build_order, predecessors, successors
from inlay.streams.race_check import find_reuses
from inlay.streams.schedule import Event, Schedule, serial_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.streams.work_graph import WorkGraph

_NO_TIME = float("-inf")


@pause_gc()
def plan_schedule(work: WorkGraph, *, lanes: int = 2, event_seconds: float) -> Schedule:
    """Assign tasks to lanes: the task with the longest path to the end first, each in the lane where it starts first.

    A wait for another lane costs `event_seconds`, so a task changes lanes only if that pays. If the schedule is not
    predicted to be faster than the tasks in program order, the result is one lane.
    """
    if lanes < 1 or event_seconds < 0:
        raise UsageError(f"Got {lanes} lanes and {event_seconds} s per event, expected at least 1 lane and 0 s.")
    work.require_times()
    before = predecessors(work)
    made = _assign_lanes(work, before, lanes, event_seconds)
    order = HappensBefore(made, _cross_lane_needs(before, made))
    waits = _reduce_waits(order)
    if len(made) <= 1 or max(finish for _, finish in _times(work, order, waits, event_seconds)) >= work.seconds:
        return serial_schedule(work)
    names = [task.name for task in work.tasks]
    return Schedule(
        tuple(tuple([names[task] for task in tasks]) for tasks in made),
        tuple([Event(names[one], names[two]) for two, waited in waits.items() for one in waited]),
        tuple(work.storages[storage].name for storage, _, _ in find_reuses(work, order)),
    )


def _assign_lanes(
    work: WorkGraph, before: Sequence[Sequence[int]], lanes: int, event_seconds: float
) -> list[list[int]]:
    """Return the tasks of each lane in order, without empty lanes."""
    after = successors(before)
    seconds = [task.seconds or 0.0 for task in work.tasks]
    fixed = {place for place, task in enumerate(work.tasks) if task.is_fixed}
    ranks = _ranks(seconds, after)
    missing = [len(each) for each in before]
    ready = [(-ranks[place], place) for place, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    found: list[list[int]] = [[] for _ in range(lanes)]
    free, finish, home = [0.0] * lanes, [0.0] * len(work), [0] * len(work)
    while ready:
        _, place = heapq.heappop(ready)
        lane, start = _earliest(before[place], 1 if place in fixed else lanes, free, finish, home, event_seconds)
        home[place], finish[place] = lane, start + seconds[place]
        free[lane] = finish[place]
        found[lane].append(place)
        for each in after[place]:
            missing[each] -= 1
            if not missing[each]:
                heapq.heappush(ready, (-ranks[each], each))
    return [each for each in found if each]


def _ranks(seconds: Sequence[float], after: Sequence[Sequence[int]]) -> list[float]:
    """Return for each task the length of the longest path from its start to the end."""
    ranks = [0.0] * len(seconds)
    for place in reversed(range(len(seconds))):
        ranks[place] = seconds[place] + max((ranks[each] for each in after[place]), default=0.0)
    return ranks


def _earliest(
    needs: Sequence[int],
    choice: int,
    free: Sequence[float],
    finish: Sequence[float],
    home: Sequence[int],
    event_seconds: float,
) -> tuple[int, float]:
    """Return the lane, of the first `choice`, where a task can start first, and its start time.

    Ties go to the lane of the predecessor that ends last.
    """
    # The end of the latest predecessor, its lane, and the latest end in other lanes.
    last, near, others = _NO_TIME, 0, _NO_TIME
    for each in needs:
        end, lane = finish[each], home[each]
        if lane == near:
            last = max(last, end)
        elif end > last:
            last, near, others = end, lane, last
        else:
            others = max(others, end)
    best, when = 0, float("inf")
    for lane in range(choice):
        start = max(free[lane], (others if lane == near else last) + event_seconds)
        if lane == near:
            start = max(start, last)
        if start < when or (start == when and lane == near):
            best, when = lane, start
    return best, when


def cross_lane_edges(work: WorkGraph, schedule: Schedule) -> tuple[Event, ...]:
    """Return one event for every dependency between two lanes, before reduction."""
    lanes = [[work.task_index[name] for name in tasks] for tasks in schedule.lanes]
    names = [task.name for task in work.tasks]
    across = _cross_lane_needs(predecessors(work), lanes)
    return tuple(Event(names[one], names[two]) for two, waited in across.items() for one in waited)


def _cross_lane_needs(before: Sequence[Sequence[int]], lanes: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return for each task its predecessors in other lanes, if it has any."""
    lane = [0] * len(before)
    for index, tasks in enumerate(lanes):
        for task in tasks:
            lane[task] = index
    found = {}
    for task, needs in enumerate(before):
        away = [each for each in needs if lane[each] != lane[task]]
        if away:
            found[task] = away
    return found


def reduce_events(schedule: Schedule) -> Schedule:
    """Return the same order with the fewest events: the transitive reduction. Lanes stay unchanged.

    >>> every = Event("a", "c"), Event("a", "d"), Event("b", "d")
    >>> print(reduce_events(Schedule((("a", "b"), ("c", "d")), every)))
    lane 0: a b
    lane 1: [a] c [b] d
    """
    names = [name for tasks in schedule.lanes for name in tasks]
    order = build_order(schedule, {name: place for place, name in enumerate(names)})
    if order.find_cycle():
        raise UsageError(
            "The lanes wait for each other.", "Remove an event of the cycle that inlay.streams.check_schedule reports."
        )
    events = tuple(Event(names[one], names[two]) for two, waited in _reduce_waits(order).items() for one in waited)
    return replace(schedule, events=events)


def _reduce_waits(order: HappensBefore) -> dict[int, list[int]]:
    """Return the waits that are not implied by lanes and other waits."""
    found = {}
    for task, waited in order.waits.items():
        lane, place = order.lane_of[task], order.position_of[task]
        others = [*waited, order.lanes[lane][place - 1]] if place else waited
        kept = [
            each
            for each in waited
            if order.lane_of[each] != lane and not any(order.is_before(each, other) for other in others)
        ]
        if kept:
            found[task] = kept
    return found


def predict_times(work: WorkGraph, schedule: Schedule, event_seconds: float) -> Mapping[str, tuple[float, float]]:
    """Return the predicted start and end of each task, from measured durations and `event_seconds`."""
    order = build_order(schedule, work.task_index)
    times = _times(work, order, order.waits, event_seconds)
    return {task.name: time for task, time in zip(work.tasks, times, strict=True)}


def _times(
    work: WorkGraph, order: HappensBefore, waits: Mapping[int, Sequence[int]], event_seconds: float
) -> list[tuple[float, float]]:
    free = [0.0] * len(order.lanes)
    times = [(0.0, 0.0)] * len(work)
    for task in order.launch_order:
        lane = order.lane_of[task]
        start = free[lane]
        for each in waits.get(task, ()):
            start = max(start, times[each][1] + event_seconds)
        free[lane] = start + (work.tasks[task].seconds or 0.0)
        times[task] = start, free[lane]
    return times
