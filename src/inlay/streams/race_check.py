"""The race check: does a schedule keep every order that matters?"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from inlay.program.gc_pause import pause_gc
from inlay.streams.happens_before import build_order, find_conflicts
from inlay.streams.schedule import Event
from inlay.streams.schedule_errors import ConflictKind, Race, ScheduleCheck, ScheduleError, ScheduleErrorKind
from inlay.streams.work_graph import Lifetime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from inlay.streams.happens_before import HappensBefore
    from inlay.streams.schedule import Schedule
    from inlay.streams.work_graph import WorkGraph


@pause_gc()
def check_schedule(work: WorkGraph, schedule: Schedule) -> ScheduleCheck:
    """Return all errors and races of a schedule. If there are none, every execution gives the program's result.

    >>> from inlay.streams import Storage, Task, WorkGraph, Schedule
    >>> tasks = Task("make", (), ("x",)), Task("use", ("x",), ("y",))
    >>> work = WorkGraph(tasks, (Storage("x"), Storage("y", Lifetime.RESULT)))
    >>> print(check_schedule(work, Schedule((("make",), ("use",)))))
    read after write on x: use does not wait for make. Add the event make -> use.
    >>> check_schedule(work, Schedule((("make",), ("use",)), (Event("make", "use"),))).ok
    True
    """
    flaws = (*_unknown_names(work, schedule), *_counts(work, schedule))
    if flaws:
        return ScheduleCheck(flaws)
    order = build_order(schedule, work.task_index)
    if circle := order.find_cycle():
        return ScheduleCheck((_deadlock([work.tasks[task].name for task in circle]),))
    races = (*_races(work, order), *_reuses(work, order, schedule.recorded_storages))
    return ScheduleCheck(tuple(_misplaced_fixed_tasks(work, schedule)), races)


def _unknown_names(work: WorkGraph, schedule: Schedule) -> Iterator[ScheduleError]:
    named = [(f"Lane {index} runs", name) for index, tasks in enumerate(schedule.lanes) for name in tasks]
    named += [(f"The event {event} names", name) for event in schedule.events for name in (event.after, event.before)]
    for place, name in named:
        if name not in work.task_index:
            message = f"{place} {name}, which is not a task of the work."
            yield ScheduleError(ScheduleErrorKind.UNKNOWN, (name,), message)
    for name in schedule.recorded_storages:
        if name not in work.storage_by_name:
            yield ScheduleError(ScheduleErrorKind.UNKNOWN, (), f"{name} is recorded, but is not a storage of the work.")


def _counts(work: WorkGraph, schedule: Schedule) -> Iterator[ScheduleError]:
    counts = Counter(name for tasks in schedule.lanes for name in tasks)
    for name in work.task_index:
        if name not in counts:
            yield ScheduleError(ScheduleErrorKind.MISSING, (name,), f"{name} is in no lane.")
        elif counts[name] > 1:
            yield ScheduleError(ScheduleErrorKind.DUPLICATE, (name,), f"{name} is run {counts[name]} times.")


def _deadlock(circle: list[str]) -> ScheduleError:
    said = ", ".join(f"{one} waits for {two}" for one, two in zip(circle, (*circle[1:], circle[0]), strict=True))
    return ScheduleError(ScheduleErrorKind.DEADLOCK, tuple(circle), f"The lanes wait for each other: {said}.")


def _misplaced_fixed_tasks(work: WorkGraph, schedule: Schedule) -> Iterator[ScheduleError]:
    """Yield errors of fixed tasks that are not in lane 0 or not in program order."""
    fixed = [task.name for task in work.tasks if task.is_fixed]
    for name in fixed:
        if schedule.lane_of[name] != 0:
            yield ScheduleError(ScheduleErrorKind.FIXED, (name,), f"{name} is fixed and must be in lane 0.")
    known = set(fixed)
    found = [name for tasks in schedule.lanes[:1] for name in tasks if name in known]
    for one, two in pairwise(found):
        if work.task_index[one] > work.task_index[two]:
            yield ScheduleError(
                ScheduleErrorKind.FIXED, (one, two), f"{two} and {one} are fixed and must stay in this order."
            )


def _races(work: WorkGraph, order: HappensBefore) -> Iterator[Race]:
    for kind, one, two, storage in find_conflicts(work):
        if not order.is_before(one, two):
            first, second = work.tasks[one].name, work.tasks[two].name
            turned = order.is_before(two, one)
            yield Race(kind, first, second, work.storages[storage].name, Event(first, second), turned)


def _reuses(work: WorkGraph, order: HappensBefore, recorded: Collection[str]) -> Iterator[Race]:
    kept = set(recorded)
    for place, user, taker in find_reuses(work, order):
        first, second, storage = work.tasks[user].name, work.tasks[taker].name, work.storages[place].name
        if storage not in kept:
            yield Race(ConflictKind.REUSE, first, second, storage, Event(first, second))


def find_reuses(work: WorkGraph, order: HappensBefore) -> Iterator[tuple[int, int, int]]:
    """Yield storages whose memory may be reused while another lane uses it: storage, user task, reusing task, by index.

    A storage is alive at the launch of any task that happens before one of its uses. The first task of the home lane
    that happens before none of the uses is the first that may reuse its memory. If all uses happen before that task,
    they happen before all later ones. Of several uses in one lane the last is reported. An uncertain storage may be
    freed after the launch of any one of its uses, so each use is checked separately.
    """
    lane = order.lane_of
    for storage, maker, users in _users(work):
        away = [user for user in users if lane[user] != lane[maker]]
        if work.storages[storage].is_uncertain:
            for user in dict.fromkeys(away):
                yield from ((storage, *each) for each in _unfinished_uses(order, lane[maker], (maker, user), (user,)))
        elif away:
            yield from ((storage, *each) for each in _unfinished_uses(order, lane[maker], users, away))


def _unfinished_uses(
    order: HappensBefore, home: int, users: Sequence[int], away: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield uses that may not be finished when the first task that may reuse the memory is launched, and that task."""
    alive = max([order.count_before(user, home) for user in users])
    if alive == len(order.lanes[home]):
        return
    taker = order.lanes[home][alive]
    late = [user for user in away if not order.is_before(user, taker)]
    if len(late) > 1:
        late = list({order.lane_of[user]: user for user in sorted(late, key=order.position_of.__getitem__)}.values())
    for user in late:
        yield user, taker


def _users(work: WorkGraph) -> Iterator[tuple[int, int, list[int]]]:
    """Yield storages with memory that may be freed during the run, the task that allocates it, and all its users."""
    users: list[list[int]] = [[] for _ in work.storages]
    makers = [-1] * len(users)
    for task, (reads, writes) in enumerate(work.accesses):
        for storage in reads:
            users[storage].append(task)
        for storage in writes:
            users[storage].append(task)
            if makers[storage] < 0:
                makers[storage] = task
    for storage, each in enumerate(work.storages):
        given_back = each.lifetime is Lifetime.INTERMEDIATE or (each.lifetime is Lifetime.RESULT and each.is_uncertain)
        if given_back and each.nbytes != 0 and makers[storage] >= 0:
            yield storage, makers[storage], users[storage]
