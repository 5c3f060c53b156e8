"""Grouping of tasks into pieces that are long compared with an event, or that run between two events."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING

from inlay.program.gc_pause import pause_gc
from inlay.streams.happens_before import build_order, predecessors, successors
from inlay.streams.race_check import find_reuses
from inlay.streams.schedule import Event, Schedule
from inlay.streams.work_graph import Lifetime, Task, WorkGraph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 8
"""Maximum rounds of grouping; each round visits every task once."""
_LOOK_BACK = 64
"""Maximum tasks visited to find whether one dependency implies another."""


@pause_gc()
def group_tasks(work: WorkGraph, at_least: float) -> WorkGraph:
    """Return the same work in fewer tasks. A task shorter than `at_least` seconds joins its only predecessor or only
    successor. A task whose only predecessor has no other successor always joins it, because the two cannot overlap.

    Fixed tasks are not grouped. The new task order keeps the order of all accesses to each storage.

    >>> from inlay.streams import Storage
    >>> a, b = Task("a", (), ("x",), 1e-6, calls=("a",)), Task("b", ("x",), ("y",), 1e-3, calls=("b",))
    >>> print(group_tasks(WorkGraph((a, b), (Storage("x"), Storage("y", Lifetime.RESULT))), 1e-5))
    b+1 (1001.0 µs): nothing -> y
    """
    work.require_times()
    for _ in range(ROUNDS):
        fewer = _round(_round(work, at_least, _join_predecessors), at_least, _join_successors)
        if len(fewer) == len(work):
            break
        work = fewer
    return work


@pause_gc()
def merge_between_events(work: WorkGraph, schedule: Schedule) -> tuple[WorkGraph, Schedule]:
    """Return the same lanes in the fewest tasks: tasks of a lane between two events are merged, except fixed tasks.

    The schedule must have no race. The order stays the same: other lanes wait only for the last task of a merged run,
    and only its first task waits.

    >>> from inlay.streams import Event, Schedule, Storage
    >>> tasks = [Task(name, (), (name,), 1e-6) for name in "abc"] + [Task("d", ("b", "c"), ("d",), 1e-6)]
    >>> work = WorkGraph(tuple(tasks), tuple(Storage(name, Lifetime.RESULT) for name in "abcd"))
    >>> print(merge_between_events(work, Schedule((("a", "b", "d"), ("c",)), (Event("c", "d"),)))[1])
    lane 0: a+1 [c] d
    lane 1: c
    """
    heads = list(range(len(work)))
    for tasks in schedule.lanes:
        for one, two in pairwise(tasks):
            together = one not in schedule.recording_tasks and two not in schedule.waits
            if together and not work[one].is_fixed and not work[two].is_fixed:
                heads[work.task_index[two]] = heads[work.task_index[one]]
    made, home = _merge_groups(work, predecessors(work), heads)
    lanes = tuple(tuple(dict.fromkeys(home[name] for name in tasks)) for tasks in schedule.lanes)
    events = tuple(Event(home[event.after], home[event.before]) for event in schedule.events)
    order = build_order(Schedule(lanes, events), made.task_index)
    recorded = tuple(made.storages[storage].name for storage, _, _ in find_reuses(made, order))
    return made, Schedule(lanes, events, recorded)


def _round(work: WorkGraph, at_least: float, join: Callable[..., list[int]]) -> WorkGraph:
    before = predecessors(work)
    joined = join(work, before, successors(before), at_least)
    if all(each == place for place, each in enumerate(joined)):
        return work
    return _merge_groups(work, before, joined)[0]


def _join_predecessors(
    work: WorkGraph, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], at_least: float
) -> list[int]:
    """Return for each task the task that it joins: its only predecessor, or itself.

    All paths into a group lead through its first task, so no cycle can arise.
    """
    joined = list(range(len(work)))
    for place, needs in enumerate(before):
        direct = _direct(needs, before)
        if len(direct) != 1 or work.tasks[place].is_fixed or work.tasks[direct[0]].is_fixed:
            continue
        alone = len(after[direct[0]]) == 1
        if alone or (work.tasks[place].seconds or 0.0) < at_least:
            joined[place] = joined[direct[0]]
    return joined


def _join_successors(
    work: WorkGraph, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], at_least: float
) -> list[int]:
    """Return for each task the task that it joins: for short tasks their only successor, else itself."""
    joined = list(range(len(work)))
    for place, task in reversed(list(enumerate(work.tasks))):
        if len(after[place]) != 1 or task.is_fixed or work.tasks[after[place][0]].is_fixed:
            continue
        if (task.seconds or 0.0) < at_least:
            joined[place] = joined[after[place][0]]
    return joined


def _direct(needs: Sequence[int], before: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the dependencies that are not implied by the latest one, as far as a bounded search finds."""
    if len(needs) < 2:
        return needs
    latest, earliest = max(needs), min(needs)
    seen = {latest}
    todo = [latest]
    while todo and len(seen) < _LOOK_BACK:
        for each in before[todo.pop()]:
            if each >= earliest and each not in seen:
                seen.add(each)
                todo.append(each)
    return [each for each in needs if each == latest or each not in seen]


def _merge_groups(
    work: WorkGraph, before: Sequence[Sequence[int]], joined: Sequence[int]
) -> tuple[WorkGraph, dict[str, str]]:
    """Return work with one task per group, in an order that keeps all dependencies, and a map of task → group task."""
    groups: dict[int, list[int]] = {}
    for place, group in enumerate(joined):
        groups.setdefault(group, []).append(place)
    needs: dict[int, set[int]] = {group: set() for group in groups}
    for place, group in enumerate(joined):
        needs[group].update(joined[each] for each in before[place] if joined[each] != group)
    inside = _internal_storages(work, joined)
    members = {group: [work.tasks[place] for place in places] for group, places in groups.items()}
    tasks = {group: _merge_tasks(members[group], inside) for group in _sort_groups(needs)}
    made = WorkGraph(tuple(tasks.values()), tuple(each for each in work.storages if each.name not in inside))
    return made, {each.name: tasks[group].name for group, every in members.items() for each in every}


def _sort_groups(needs: dict[int, set[int]]) -> list[int]:
    """Return the groups in dependency order, as close to program order as possible."""
    after: dict[int, list[int]] = {group: [] for group in needs}
    for group, each in needs.items():
        for earlier in each:
            after[earlier].append(group)
    missing = {group: len(each) for group, each in needs.items()}
    ready = [group for group, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for later in after[order[-1]]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, later)
    return order


def _internal_storages(work: WorkGraph, joined: Sequence[int]) -> set[str]:
    """Return the intermediate storages that only one group accesses; they are left out of the new work."""
    homes: dict[str, int] = {}
    inside = {each.name for each in work.storages if each.lifetime is Lifetime.INTERMEDIATE}
    for place, task in enumerate(work.tasks):
        for name in (*task.reads, *task.writes):
            if homes.setdefault(name, joined[place]) != joined[place]:
                inside.discard(name)
    return inside


def _merge_tasks(tasks: Sequence[Task], inside: set[str]) -> Task:
    longest = max(tasks, key=lambda task: task.seconds or 0.0)
    members = sum(max(1, len(task.calls)) for task in tasks)
    name = longest.name.partition("+")[0]
    return Task(
        longest.name if len(tasks) == 1 else f"{name}+{members - 1}",
        tuple(dict.fromkeys(each for task in tasks for each in task.reads if each not in inside)),
        tuple(dict.fromkeys(each for task in tasks for each in task.writes if each not in inside)),
        sum(task.seconds or 0.0 for task in tasks),
        tasks[0].is_fixed,
        tuple(each for task in tasks for each in task.calls),
    )
