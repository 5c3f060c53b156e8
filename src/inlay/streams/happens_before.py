"""Which tasks must stay in order, and which tasks a schedule keeps in order.

Both are linear in the size of the work: each storage access is visited once, and the past of a task is a vector clock
with one number per lane, not a set of tasks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from inlay.streams.schedule_errors import ConflictKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inlay.streams.schedule import Schedule
    from inlay.streams.work_graph import WorkGraph


_NOT_RUN: list[int] = []


class Pair(NamedTuple):
    """Two tasks that access one storage, by their indices in the work, and the kind of conflict."""

    kind: ConflictKind
    first: int
    second: int
    storage: int


def find_conflicts(work: WorkGraph) -> Iterator[Pair]:
    """Yield pairs of tasks that must stay in order. If these do, all other conflicting pairs do too.

    >>> from inlay.streams.work_graph import Storage, Task, WorkGraph
    >>> tasks = Task("write", (), ("x",)), Task("read", ("x",)), Task("over", (), ("x",))
    >>> [(pair.kind.name, pair.first, pair.second) for pair in find_conflicts(WorkGraph(tasks, (Storage("x"),)))]
    [('RAW', 0, 1), ('WAR', 1, 2)]
    """
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for place, (reads, writes) in enumerate(work.accesses):
        for storage in reads:
            if storage in writer:
                yield Pair(ConflictKind.RAW, writer[storage], place, storage)
        for storage in writes:
            since = readers.pop(storage, ())
            for reader in since:
                yield Pair(ConflictKind.WAR, reader, place, storage)
            if storage in writer and not since and storage not in reads:
                yield Pair(ConflictKind.WAW, writer[storage], place, storage)
            writer[storage] = place
        for storage in reads:
            if storage not in writes:
                readers.setdefault(storage, []).append(place)


def predecessors(work: WorkGraph) -> list[list[int]]:
    """Return for each task the tasks that must precede it, by index, each once. Fixed tasks keep their order too."""
    found: list[dict[int, None]] = [{} for _ in work.tasks]
    for pair in find_conflicts(work):
        found[pair.second][pair.first] = None
    fixed = [place for place, task in enumerate(work.tasks) if task.is_fixed]
    for before, after in pairwise(fixed):
        found[after][before] = None
    return [list(each) for each in found]


def successors(before: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each task the tasks that must follow it: the reverse of `predecessors`."""
    found: list[list[int]] = [[] for _ in before]
    for place, each in enumerate(before):
        for earlier in each:
            found[earlier].append(place)
    return found


class HappensBefore:
    """The happens-before relation of tasks in lanes with waits between them. Tasks are numbers, each in one lane."""

    def __init__(self, lanes: Sequence[Sequence[int]], waits: Mapping[int, Sequence[int]]) -> None:
        """`waits`: task → the tasks that it waits for."""
        self.lanes, self.waits = lanes, waits
        count = sum(map(len, lanes))
        self.lane_of, self.position_of = [0] * count, [0] * count
        """The lane of each task, and its position in the lane."""
        for lane, tasks in enumerate(lanes):
            for place, task in enumerate(tasks):
                self.lane_of[task], self.position_of[task] = lane, place
        self.launch_order: list[int] = []
        """The tasks in an executable order."""
        self._clocks: list[list[int]] = [_NOT_RUN] * count
        """For each task, how many tasks of each *other* lane happened before it. Tasks without waits, which are most,
        share the list of the task before them."""
        self._heads = [0] * len(lanes)
        self._blocked: dict[int, list[int]] = {}
        self._run()

    def count_before(self, task: int, lane: int) -> int:
        """Return how many tasks of a lane have happened when a task has, including the task."""
        return self.position_of[task] + 1 if self.lane_of[task] == lane else self._clocks[task][lane]

    def is_before(self, one: int, two: int) -> bool:
        """Return whether one task happens before another."""
        lane = self.lane_of[one]
        if lane == self.lane_of[two]:
            return self.position_of[one] < self.position_of[two]
        return self._clocks[two][lane] > self.position_of[one]

    def _run(self) -> None:
        """Advance each lane until it waits for a task that has not happened; resume it when that task has."""
        past, heads, asleep = self._clocks, self._heads, self._blocked
        now = [[0] * len(self.lanes) for _ in self.lanes]
        awake = list(range(len(self.lanes)))
        while awake:
            lane = awake.pop()
            tasks = self.lanes[lane]
            while heads[lane] < len(tasks):
                task = tasks[heads[lane]]
                if task in self.waits:
                    late = [each for each in self.waits[task] if past[each] is _NOT_RUN]
                    if late:
                        asleep.setdefault(late[0], []).append(lane)
                        break
                    now[lane] = self._merge_clocks(now[lane], self.waits[task])
                heads[lane] += 1
                past[task] = now[lane]
                self.launch_order.append(task)
                if task in asleep:
                    awake += asleep.pop(task)

    def _merge_clocks(self, known: list[int], waited: Sequence[int]) -> list[int]:
        """Return the clock of a lane after it waited for these tasks."""
        known = known.copy()
        for each in waited:
            for lane, count in enumerate(self._clocks[each]):
                if count > known[lane]:
                    known[lane] = count
            known[self.lane_of[each]] = max(known[self.lane_of[each]], self.position_of[each] + 1)
        return known

    def find_cycle(self) -> list[int]:
        """Return tasks that wait for each other, each for the next and the last for the first; empty if none do."""
        if len(self.launch_order) == len(self.lane_of):
            return []
        until = {lane: task for task, lanes in self._blocked.items() for lane in lanes}
        lane, seen = min(until), list[int]()
        while lane not in seen:
            seen.append(lane)
            lane = self.lane_of[until[lane]]
        found: dict[int, None] = {}
        for each in seen[seen.index(lane) :]:
            found |= dict.fromkeys((self.lanes[each][self._heads[each]], until[each]))
        return list(found)


def build_order(schedule: Schedule, number: Mapping[str, int]) -> HappensBefore:
    """Return the order of a schedule that contains every task once and no unknown ones; `number` gives task numbers."""
    waits: dict[int, list[int]] = {}
    for event in schedule.events:
        waits.setdefault(number[event.before], []).append(number[event.after])
    return HappensBefore([[number[name] for name in tasks] for tasks in schedule.lanes], waits)
