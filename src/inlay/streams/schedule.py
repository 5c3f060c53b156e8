"""Schedules: which lane runs which task, in which order, with which events."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from inlay.streams.work_graph import JsonRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.streams.work_graph import WorkGraph


@dataclass(frozen=True, slots=True)
class Event:
    """An event recorded after the task `after`; the lane of the task `before` waits for it before that task.

    This is an event of a device or of threads. KV events are unrelated: docs/streams.md.
    """

    after: str
    before: str

    def key(self) -> tuple[str, str]:
        """Return the sort key."""
        return self.after, self.before

    def __str__(self) -> str:
        return f"{self.after} -> {self.before}"


@dataclass(frozen=True)
class Schedule(JsonRecord):
    """Lanes, events between them, and storages that must be recorded. A schedule may be invalid:
    `inlay.streams.check_schedule` checks it.

    **A lane** is a queue: a device stream or a thread. It runs its tasks in order, one at a time.

    **Happens before.** One task happens before another if it precedes it in the same lane, if an event orders them, or
    by transitivity. Nothing else orders two tasks: not program order, not the order in which a host launches them, not
    their duration. All tasks happen after the caller's actions before the run and before its actions after the run:
    each lane waits for the caller at the start, and the caller waits for each lane at the end.

    **Memory.** Each lane has its own memory pool. A storage that the run allocates belongs to the lane of the task that
    writes it first in program order: its home lane. An intermediate storage is freed to its home lane when all tasks
    that access it have been launched, which may be before they have run, and never during a task. From then on any task
    of the home lane may reuse that memory. Storages in `recorded_storages` are not freed before every lane has passed
    its uses of them (`torch.Tensor.record_stream`, in every lane that accesses one except its home).

    Events and recorded storages are sorted and unique, so equivalent schedules are equal.

    >>> one = Schedule((("a", "b"), ("c",)), (Event("a", "c"),))
    >>> one == Schedule((("a", "b"), ("c",)), (Event("a", "c"), Event("a", "c")))
    True
    >>> print(one)
    lane 0: a b
    lane 1: [a] c
    """

    lanes: tuple[tuple[str, ...], ...]
    """The tasks of each lane in order."""
    events: tuple[Event, ...] = ()
    recorded_storages: tuple[str, ...] = ()
    """Storages to record in the lanes that use them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(sorted(set(self.events), key=Event.key)))
        object.__setattr__(self, "recorded_storages", tuple(sorted(set(self.recorded_storages))))

    @cached_property
    def lane_of(self) -> Mapping[str, int]:
        """Task → the lane that runs it."""
        return {name: index for index, tasks in enumerate(self.lanes) for name in tasks}

    @cached_property
    def waits(self) -> Mapping[str, tuple[str, ...]]:
        """Task → the tasks whose events its lane waits for before it."""
        found: dict[str, list[str]] = {}
        for event in self.events:
            found.setdefault(event.before, []).append(event.after)
        return {name: tuple(each) for name, each in found.items()}

    @cached_property
    def recording_tasks(self) -> frozenset[str]:
        """Tasks after which an event is recorded; several lanes may wait for the same one."""
        return frozenset(event.after for event in self.events)

    def __str__(self) -> str:
        lines = []
        for index, tasks in enumerate(self.lanes):
            words = [f"[{', '.join(self.waits[name])}] {name}" if name in self.waits else name for name in tasks]
            lines.append(f"lane {index}: {' '.join(words)}".rstrip())
        if self.recorded_storages:
            lines.append(f"recorded: {', '.join(self.recorded_storages)}")
        return "\n".join(lines)


def serial_schedule(work: WorkGraph) -> Schedule:
    """Return a schedule with all tasks in one lane in program order, without overlap."""
    return Schedule((tuple(task.name for task in work.tasks),))
