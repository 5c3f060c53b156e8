"""Check: is every order that matters kept by a schedule, whoever wrote it?"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from inlay.streams.order import Order, conflicts
from inlay.streams.races import Conflict, Fault, Flaw, Race, Verdict
from inlay.streams.schedules import Event
from inlay.streams.work import Life

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.streams.schedules import Schedule
    from inlay.streams.work import Work


def check(work: Work, schedule: Schedule) -> Verdict:
    """Every flaw and every race of a schedule; none means that every way to run it gives what the program means.

    >>> from inlay.streams import Storage, Task, Work, Schedule
    >>> tasks = Task("make", (), ("x",)), Task("use", ("x",), ("y",))
    >>> work = Work(tasks, (Storage("x"), Storage("y", Life.RESULT)))
    >>> print(check(work, Schedule((("make",), ("use",)))))
    read after write on x: use does not wait for make. Add the event make -> use.
    >>> check(work, Schedule((("make",), ("use",)), (Event("make", "use"),))).ok
    True
    """
    flaws = (*_strangers(work, schedule), *_counts(work, schedule))
    if flaws:
        return Verdict(flaws)
    order = Order(schedule)
    if order.circle:
        return Verdict((_deadlock(order.circle),))
    races = (*_races(work, order), *reuses(work, schedule, order))
    return Verdict(tuple(_moved(work, schedule)), races)


def _strangers(work: Work, schedule: Schedule) -> Iterator[Flaw]:
    known = work.place
    for index, tasks in enumerate(schedule.lanes):
        for name in tasks:
            if name not in known:
                yield Flaw(Fault.UNKNOWN, (name,), f"Lane {index} runs {name}, which is no task of the work.")
    for event in schedule.events:
        for name in (event.after, event.before):
            if name not in known:
                yield Flaw(Fault.UNKNOWN, (name,), f"The event {event} names {name}, which is no task of the work.")
    for name in schedule.recorded:
        if name not in work.storage:
            yield Flaw(Fault.UNKNOWN, (), f"{name} is recorded, and is no storage of the work.")


def _counts(work: Work, schedule: Schedule) -> Iterator[Flaw]:
    counts = Counter(name for tasks in schedule.lanes for name in tasks)
    for name in work.place:
        if name not in counts:
            yield Flaw(Fault.MISSING, (name,), f"{name} is in no lane.")
        elif counts[name] > 1:
            yield Flaw(Fault.TWICE, (name,), f"{name} is run {counts[name]} times.")


def _deadlock(circle: tuple[str, ...]) -> Flaw:
    said = ", ".join(f"{one} waits for {two}" for one, two in zip(circle, (*circle[1:], circle[0]), strict=True))
    return Flaw(Fault.DEADLOCK, circle, f"The lanes wait for each other: {said}.")


def _moved(work: Work, schedule: Schedule) -> Iterator[Flaw]:
    """Fixed tasks that are elsewhere, or in another order than the program's."""
    fixed = [task.name for task in work.tasks if task.fixed]
    for name in fixed:
        if schedule.lane[name] != 0:
            yield Flaw(Fault.FIXED, (name,), f"{name} is fixed and must be in lane 0.")
    known = set(fixed)
    found = [name for name in schedule.lanes[0] if name in known]
    for one, two in pairwise(found):
        if work.place[one] > work.place[two]:
            yield Flaw(Fault.FIXED, (one, two), f"{two} and {one} are fixed and have changed places.")


def _races(work: Work, order: Order) -> Iterator[Race]:
    for pair in conflicts(work):
        first, second = work.tasks[pair.first].name, work.tasks[pair.second].name
        if not order.before(first, second):
            turned = order.before(second, first)
            yield Race(pair.kind, first, second, pair.storage, Event(first, second), turned)


def reuses(work: Work, schedule: Schedule, order: Order) -> Iterator[Race]:
    """Memory that may be given away while another lane uses it.

    A storage is alive when a task is launched that happens before one of its uses. The first task of the home lane that
    happens before none of them is the first that may be given its memory. If all uses happen before that task, they
    happen before all later ones.
    """
    recorded = set(schedule.recorded)
    for name, users in _users(work).items():
        home = order.lane[users[0]]
        if name in recorded or all(order.lane[user] == home for user in users):
            continue
        alive = max(order.clock[user][home] for user in users)
        if alive == len(order.lanes[home]):
            continue
        taker = order.lanes[home][alive]
        late: dict[int, str] = {}
        for user in users:
            lane = order.lane[user]
            if not order.before(user, taker) and order.place[user] >= order.place.get(late.get(lane, ""), 0):
                late[lane] = user
        for user in late.values():
            yield Race(Conflict.REUSE, user, taker, name, Event(user, taker))


def _users(work: Work) -> dict[str, list[str]]:
    """Intermediate storage with bytes → the tasks that touch it, the one that allocates it first."""
    users: dict[str, list[str]] = {
        each.name: [] for each in work.storages if each.life is Life.INTERMEDIATE and each.bytes != 0
    }
    made: set[str] = set()
    for task in work.tasks:
        for name in dict.fromkeys((*task.writes, *task.reads)):
            if name in users:
                users[name].append(task.name)
        for name in task.writes:
            if name in users and name not in made:
                made.add(name)
                users[name].insert(0, users[name].pop())
    return {name: each for name, each in users.items() if name in made}
