"""Which tasks must stay in order, and which a schedule keeps in order.

Both are linear in the size of the work: each access to a storage is looked at once, and a task's past is a clock of one
number a lane, never a set of tasks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from inlay.streams.races import Conflict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inlay.streams.schedules import Schedule
    from inlay.streams.work import Work


_NEVER: list[int] = []


class Pair(NamedTuple):
    """Two tasks and the storage they meet at, by their places in the work, and how they meet."""

    kind: Conflict
    first: int
    second: int
    storage: int


def conflicts(work: Work) -> Iterator[Pair]:
    """Pairs of tasks that must stay in order. When these do, all others that meet at a storage do too.

    >>> from inlay.streams.work import Storage, Task, Work
    >>> tasks = Task("write", (), ("x",)), Task("read", ("x",)), Task("over", (), ("x",))
    >>> [(pair.kind.name, pair.first, pair.second) for pair in conflicts(Work(tasks, (Storage("x"),)))]
    [('RAW', 0, 1), ('WAR', 1, 2)]
    """
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for place, (reads, writes) in enumerate(work.accesses):
        for storage in reads:
            if storage in writer:
                yield Pair(Conflict.RAW, writer[storage], place, storage)
        for storage in writes:
            since = readers.pop(storage, ())
            for reader in since:
                yield Pair(Conflict.WAR, reader, place, storage)
            if storage in writer and not since and storage not in reads:
                yield Pair(Conflict.WAW, writer[storage], place, storage)
            writer[storage] = place
        for storage in reads:
            if storage not in writes:
                readers.setdefault(storage, []).append(place)


def predecessors(work: Work) -> list[list[int]]:
    """For each task the tasks it must come after, by place, each once; fixed tasks come after one another too."""
    found: list[dict[int, None]] = [{} for _ in work.tasks]
    for pair in conflicts(work):
        found[pair.second][pair.first] = None
    fixed = [place for place, task in enumerate(work.tasks) if task.fixed]
    for before, after in pairwise(fixed):
        found[after][before] = None
    return [list(each) for each in found]


def successors(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same edges from the other end."""
    found: list[list[int]] = [[] for _ in before]
    for place, each in enumerate(before):
        for earlier in each:
            found[earlier].append(place)
    return found


class Order:
    """Happens-before of lanes of tasks and of waits between them. Tasks are numbers, each in one lane."""

    def __init__(self, lanes: Sequence[Sequence[int]], waits: Mapping[int, Sequence[int]]) -> None:
        """`waits`: task → the tasks that it waits for."""
        self.lanes, self.waits = lanes, waits
        count = sum(map(len, lanes))
        self.lane, self.place = [0] * count, [0] * count
        """Of each task its lane, and its place in that."""
        for lane, tasks in enumerate(lanes):
            for place, task in enumerate(tasks):
                self.lane[task], self.place[task] = lane, place
        self.ran: list[int] = []
        """The tasks in an order in which they can be run."""
        self._past: list[list[int]] = [_NEVER] * count
        """For each task how many tasks of each *other* lane happened before it. Tasks that wait for nothing new share
        one list with the task before them: most do."""
        self._heads = [0] * len(lanes)
        self._asleep: dict[int, list[int]] = {}
        self._run()

    def happened(self, task: int, lane: int) -> int:
        """How many tasks of a lane have happened when a task has, itself included."""
        return self.place[task] + 1 if self.lane[task] == lane else self._past[task][lane]

    def before(self, one: int, two: int) -> bool:
        """Whether one task happens before another."""
        lane = self.lane[one]
        if lane == self.lane[two]:
            return self.place[one] < self.place[two]
        return self._past[two][lane] > self.place[one]

    def _run(self) -> None:
        """Advance each lane until it waits for a task that has not happened, and wake it when that has."""
        past, heads, asleep = self._past, self._heads, self._asleep
        now = [[0] * len(self.lanes) for _ in self.lanes]
        awake = list(range(len(self.lanes)))
        while awake:
            lane = awake.pop()
            tasks = self.lanes[lane]
            while heads[lane] < len(tasks):
                task = tasks[heads[lane]]
                if task in self.waits:
                    late = [each for each in self.waits[task] if past[each] is _NEVER]
                    if late:
                        asleep.setdefault(late[0], []).append(lane)
                        break
                    now[lane] = self._later(now[lane], self.waits[task])
                heads[lane] += 1
                past[task] = now[lane]
                self.ran.append(task)
                if task in asleep:
                    awake += asleep.pop(task)

    def _later(self, known: list[int], waited: Sequence[int]) -> list[int]:
        """What a lane knows of the others after it waited for these tasks."""
        known = known.copy()
        for each in waited:
            for lane, count in enumerate(self._past[each]):
                if count > known[lane]:
                    known[lane] = count
            known[self.lane[each]] = max(known[self.lane[each]], self.place[each] + 1)
        return known

    def circle(self) -> list[int]:
        """Tasks that wait for each other, each for the next one and the last for the first; none if all can be run."""
        if len(self.ran) == len(self.lane):
            return []
        until = {lane: task for task, lanes in self._asleep.items() for lane in lanes}
        lane, seen = min(until), list[int]()
        while lane not in seen:
            seen.append(lane)
            lane = self.lane[until[lane]]
        found: dict[int, None] = {}
        for each in seen[seen.index(lane) :]:
            found |= dict.fromkeys((self.lanes[each][self._heads[each]], until[each]))
        return list(found)


def order_of(schedule: Schedule, number: Mapping[str, int]) -> Order:
    """The order of a schedule that names every task once and has no events of other tasks, tasks by these numbers."""
    waits: dict[int, list[int]] = {}
    for event in schedule.events:
        waits.setdefault(number[event.before], []).append(number[event.after])
    return Order([[number[name] for name in tasks] for tasks in schedule.lanes], waits)
