"""Which tasks must stay in order, and which a schedule keeps in order.

Both are linear in the size of the work: each access to a storage is looked at once, and a task's past is a clock of one
number a lane, never a set of tasks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from inlay.streams.races import Conflict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.streams.schedules import Schedule
    from inlay.streams.work import Work


class Pair(NamedTuple):
    """Two tasks by their places in the work, the storage they meet at, and how."""

    kind: Conflict
    first: int
    second: int
    storage: str


def conflicts(work: Work) -> Iterator[Pair]:
    """Pairs of tasks that must stay in order. When these do, all others that meet at a storage do too.

    >>> from inlay.streams.work import Storage, Task, Work
    >>> tasks = Task("write", (), ("x",)), Task("read", ("x",)), Task("over", (), ("x",))
    >>> [(pair.kind.name, pair.first, pair.second) for pair in conflicts(Work(tasks, (Storage("x"),)))]
    [('RAW', 0, 1), ('WAR', 1, 2)]
    """
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for place, task in enumerate(work.tasks):
        reads, writes = dict.fromkeys(task.reads), dict.fromkeys(task.writes)
        for name in reads:
            if name in writer:
                yield Pair(Conflict.RAW, writer[name], place, name)
        for name in writes:
            since = readers.get(name, ())
            yield from (Pair(Conflict.WAR, reader, place, name) for reader in since)
            if name in writer and not since and name not in reads:
                yield Pair(Conflict.WAW, writer[name], place, name)
            writer[name] = place
            readers[name] = []
        for name in reads:
            if name not in writes:
                readers.setdefault(name, []).append(place)


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
    """Happens-before of a schedule that names every task once and has no events of tasks it does not run."""

    def __init__(self, schedule: Schedule) -> None:
        self.lanes = schedule.lanes
        self.lane = schedule.lane
        self.place = {name: place for tasks in schedule.lanes for place, name in enumerate(tasks)}
        """Task → its place in its lane."""
        self.clock: dict[str, list[int]] = {}
        """Task → for each lane how many of its tasks have happened when this one has; in an order that can be run."""
        self.circle: tuple[str, ...] = ()
        """Tasks that wait for each other, each for the next one, and the last for the first; then no clock is whole."""
        self._run(schedule)

    def before(self, one: str, two: str) -> bool:
        """Whether one task happens before another."""
        return one != two and self.clock[two][self.lane[one]] > self.place[one]

    def _run(self, schedule: Schedule) -> None:
        """Advance each lane until it waits for a task that has not happened, and wake it when that has."""
        waits, clock, lanes = schedule.waits, self.clock, schedule.lanes
        heads = [0] * len(lanes)
        now = [[0] * len(lanes) for _ in lanes]
        asleep: dict[str, list[int]] = {}
        awake = list(range(len(lanes)))
        while awake:
            lane = awake.pop()
            mine = now[lane]
            while heads[lane] < len(lanes[lane]):
                name = lanes[lane][heads[lane]]
                late = next((each for each in waits.get(name, ()) if each not in clock), None)
                if late is not None:
                    asleep.setdefault(late, []).append(lane)
                    break
                for each in waits.get(name, ()):
                    for other, count in enumerate(clock[each]):
                        if count > mine[other]:
                            mine[other] = count
                heads[lane] += 1
                mine[lane] = heads[lane]
                clock[name] = mine.copy()
                awake += asleep.pop(name, ())
        if len(clock) < len(self.lane):
            self.circle = self._find_circle({lane: name for name, each in asleep.items() for lane in each}, heads)

    def _find_circle(self, asleep: dict[int, str], heads: list[int]) -> tuple[str, ...]:
        """Follow who sleeps until when from any sleeping lane, until a lane comes again."""
        lane, seen = min(asleep), list[int]()
        while lane not in seen:
            seen.append(lane)
            lane = self.lane[asleep[lane]]
        found: dict[str, None] = {}
        for each in seen[seen.index(lane) :]:
            found |= dict.fromkeys((self.lanes[each][heads[each]], asleep[each]))
        return tuple(found)
