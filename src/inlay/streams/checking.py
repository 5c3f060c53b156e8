"""Check: is every order that matters kept by a schedule, whoever wrote it?"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from inlay.program.pause import collector_paused
from inlay.streams.order import conflicts, order_of
from inlay.streams.races import Conflict, Fault, Flaw, Race, Verdict
from inlay.streams.schedules import Event
from inlay.streams.work import Life

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from inlay.streams.order import Order
    from inlay.streams.schedules import Schedule
    from inlay.streams.work import Work


@collector_paused()
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
    order = order_of(schedule, work.place)
    if circle := order.circle():
        return Verdict((_deadlock([work.tasks[task].name for task in circle]),))
    races = (*_races(work, order), *_reuses(work, order, schedule.recorded))
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


def _deadlock(circle: list[str]) -> Flaw:
    said = ", ".join(f"{one} waits for {two}" for one, two in zip(circle, (*circle[1:], circle[0]), strict=True))
    return Flaw(Fault.DEADLOCK, tuple(circle), f"The lanes wait for each other: {said}.")


def _moved(work: Work, schedule: Schedule) -> Iterator[Flaw]:
    """Fixed tasks that are elsewhere, or in another order than the program's."""
    fixed = [task.name for task in work.tasks if task.fixed]
    for name in fixed:
        if schedule.lane[name] != 0:
            yield Flaw(Fault.FIXED, (name,), f"{name} is fixed and must be in lane 0.")
    known = set(fixed)
    found = [name for tasks in schedule.lanes[:1] for name in tasks if name in known]
    for one, two in pairwise(found):
        if work.place[one] > work.place[two]:
            yield Flaw(Fault.FIXED, (one, two), f"{two} and {one} are fixed and have changed places.")


def _races(work: Work, order: Order) -> Iterator[Race]:
    for kind, one, two, storage in conflicts(work):
        if not order.before(one, two):
            first, second = work.tasks[one].name, work.tasks[two].name
            turned = order.before(two, one)
            yield Race(kind, first, second, work.storages[storage].name, Event(first, second), turned)


def _reuses(work: Work, order: Order, recorded: Collection[str]) -> Iterator[Race]:
    kept = set(recorded)
    for place, user, taker in reused(work, order):
        first, second, storage = work.tasks[user].name, work.tasks[taker].name, work.storages[place].name
        if storage not in kept:
            yield Race(Conflict.REUSE, first, second, storage, Event(first, second))


def reused(work: Work, order: Order) -> Iterator[tuple[int, int, int]]:
    """Memory that may be given away while another lane uses it: storage, who uses it, who is given it, by place.

    A storage is alive when a task is launched that happens before one of its uses. The first task of the home lane that
    happens before none of them is the first that may be given its memory. If all uses happen before that task, they
    happen before all later ones. Of several uses in one lane the last is told. A loose storage may be given back as
    soon as any one of its uses has been launched: each has to be over by itself.
    """
    lane = order.lane
    for storage, maker, users in _users(work):
        away = [user for user in users if lane[user] != lane[maker]]
        if work.storages[storage].loose:
            for user in dict.fromkeys(away):
                yield from ((storage, *each) for each in _late(order, lane[maker], (maker, user), (user,)))
        elif away:
            yield from ((storage, *each) for each in _late(order, lane[maker], users, away))


def _late(order: Order, home: int, users: Sequence[int], away: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Uses that may not be over when the first task is launched that may be given the memory, and that task."""
    alive = max([order.happened(user, home) for user in users])
    if alive == len(order.lanes[home]):
        return
    taker = order.lanes[home][alive]
    late = [user for user in away if not order.before(user, taker)]
    if len(late) > 1:
        late = list({order.lane[user]: user for user in sorted(late, key=order.place.__getitem__)}.values())
    for user in late:
        yield user, taker


def _users(work: Work) -> Iterator[tuple[int, int, list[int]]]:
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
        given_back = each.life is Life.INTERMEDIATE or (each.life is Life.RESULT and each.loose)
        if given_back and each.bytes != 0 and makers[storage] >= 0:
            yield storage, makers[storage], users[storage]
