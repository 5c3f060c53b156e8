"""Check: is every order that matters kept by a schedule, whoever wrote it?"""

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
    """Every flaw and every race of a schedule; none means that every way to run it gives what the program means.

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
    known = work.task_index
    for index, tasks in enumerate(schedule.lanes):
        for name in tasks:
            if name not in known:
                yield ScheduleError(
                    ScheduleErrorKind.UNKNOWN, (name,), f"Lane {index} runs {name}, which is no task of the work."
                )
    for event in schedule.events:
        for name in (event.after, event.before):
            if name not in known:
                yield ScheduleError(
                    ScheduleErrorKind.UNKNOWN, (name,), f"The event {event} names {name}, which is no task of the work."
                )
    for name in schedule.recorded_storages:
        if name not in work.storage_by_name:
            yield ScheduleError(ScheduleErrorKind.UNKNOWN, (), f"{name} is recorded, and is no storage of the work.")


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
    """Fixed tasks that are elsewhere, or in another order than the program's."""
    fixed = [task.name for task in work.tasks if task.is_fixed]
    for name in fixed:
        if schedule.lane_of[name] != 0:
            yield ScheduleError(ScheduleErrorKind.FIXED, (name,), f"{name} is fixed and must be in lane 0.")
    known = set(fixed)
    found = [name for tasks in schedule.lanes[:1] for name in tasks if name in known]
    for one, two in pairwise(found):
        if work.task_index[one] > work.task_index[two]:
            yield ScheduleError(
                ScheduleErrorKind.FIXED, (one, two), f"{two} and {one} are fixed and have changed places."
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
    """Memory that may be given away while another lane uses it: storage, who uses it, who is given it, by place.

    A storage is alive when a task is launched that happens before one of its uses. The first task of the home lane that
    happens before none of them is the first that may be given its memory. If all uses happen before that task, they
    happen before all later ones. Of several uses in one lane the last is told. A loose storage may be given back as
    soon as any one of its uses has been launched: each has to be over by itself.
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
    """Uses that may not be over when the first task is launched that may be given the memory, and that task."""
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
    """Storages with bytes that may be given back, the task that allocates each, and all that touch it."""
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
