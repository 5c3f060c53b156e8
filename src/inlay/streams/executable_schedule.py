"""Executable schedules, in which all lookups are resolved before a run, and the values of one run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from inlay.errors import UsageError, suggest
from inlay.streams.happens_before import build_order
from inlay.streams.race_check import check_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.lowering.executable import BoundStep
    from inlay.streams.bound_work import BoundWork
    from inlay.streams.schedule import Event, Schedule


class TaskSpan(NamedTuple):
    """The times of one task in a run, in nanoseconds of one clock.

    Between `wait_begin` and `begin` the lane waited for events.
    """

    task: str
    lane: int
    wait_begin: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class ScheduledTask:
    """A task in its lane, with its events."""

    task: str
    lane: int
    step: BoundStep
    waits: tuple[int, ...]
    """Numbers of the events that its lane waits for before the task."""
    records: tuple[int, ...]
    """Numbers of the events that its lane records after the task."""
    recorded_values: tuple[str, ...]
    """Values whose memory belongs to another lane and might be reused while this task uses it."""


@dataclass(frozen=True, eq=False)
class ExecutableSchedule:
    """The tasks of each lane, and all tasks in an order in which one thread may launch them."""

    bound_work: BoundWork
    events: tuple[Event, ...]
    lanes: tuple[tuple[ScheduledTask, ...], ...]
    launches: tuple[ScheduledTask, ...]


class LaneExecutor(Protocol):
    """Runs executable schedules, on threads (`WorkerThreads`) or device streams (`DeviceStreams`)."""

    def __len__(self) -> int:
        """Return the number of lanes."""

    def run(
        self, schedule: ExecutableSchedule, values: LiveValues, *, timed: bool = False
    ) -> Sequence[Sequence[TaskSpan]]:
        """Run all tasks and make the caller wait for them. With `timed`, return the spans of each lane."""

    def close(self) -> None:
        """Release the resources of the lanes; they cannot be used afterwards."""


class LiveValues:
    """The values of one run by name. Each is dropped after its last use."""

    def __init__(self, bound: BoundWork, given: Mapping[str, Any]) -> None:
        missing = [name for name in bound.inputs if name not in given]
        if missing:
            raise UsageError(f"The input {missing[0]} is missing.", suggest(missing[0], given))
        self.by_name = {name: given[name] for name in bound.inputs}
        self._use_counts = dict(bound.use_counts)
        self._lock = threading.Lock()

    def get_inputs(self, step: BoundStep) -> list[Any]:
        """Return the inputs of a task."""
        return [self.by_name[name] for name in step.ins]

    def store_outputs(self, step: BoundStep, made: Sequence[Any]) -> None:
        """Store the outputs of a task, and drop values after their last use. Call it once per task."""
        self.by_name.update(zip(step.outs, made, strict=True))
        gone = []
        with self._lock:
            for name in dict.fromkeys((*step.ins, *step.outs)):
                if name in self._use_counts:
                    self._use_counts[name] -= 1
                    if not self._use_counts[name]:
                        gone.append(self.by_name.pop(name))
        gone.clear()  # outside the lock: freeing memory may take a while


def build_executable(bound_work: BoundWork, schedule: Schedule) -> ExecutableSchedule:
    """Return an executable schedule of bound work; raise an error with all problems if the schedule is invalid."""
    verdict = check_schedule(bound_work.work, schedule)
    if not verdict.ok:
        raise UsageError(f"The schedule is invalid: {verdict}")
    number = {event: place for place, event in enumerate(schedule.events)}
    waits: dict[str, list[int]] = {}
    records: dict[str, list[int]] = {}
    for event, place in number.items():
        waits.setdefault(event.before, []).append(place)
        records.setdefault(event.after, []).append(place)
    recorded = _recorded_values(bound_work, schedule)
    turns = {
        name: ScheduledTask(
            name,
            lane,
            bound_work.steps[name],
            tuple(waits.get(name, ())),
            tuple(records.get(name, ())),
            recorded.get(name, ()),
        )
        for name, lane in schedule.lane_of.items()
    }
    lanes = tuple(tuple(turns[name] for name in tasks) for tasks in schedule.lanes)
    launches = [
        turns[bound_work.work.tasks[place].name]
        for place in build_order(schedule, bound_work.work.task_index).launch_order
    ]
    return ExecutableSchedule(bound_work, schedule.events, lanes, tuple(launches))


def _recorded_values(bound: BoundWork, schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Return for each task its values in recorded storages whose home is another lane."""
    places: dict[str, list[str]] = {}
    for storage in schedule.recorded_storages:
        for name in bound.work.storage_by_name[storage].values:
            places.setdefault(name, []).append(storage)
    home: dict[str, int] = {}
    found: dict[str, tuple[str, ...]] = {}
    for task in bound.work.tasks:
        lane, step = schedule.lane_of[task.name], bound.steps[task.name]
        for name in task.writes:
            home.setdefault(name, lane)
        touched = dict.fromkeys((*step.ins, *step.outs))
        found[task.name] = tuple(
            name for name in touched if any(home.get(each, lane) != lane for each in places.get(name, ()))
        )
    return found
