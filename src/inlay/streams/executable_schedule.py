"""Course: a schedule made ready to run, so that a run has nothing left to look up, and the values of one run."""

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
    """One task of a run: when its lane asked for it, when it began and when it ended, in nanoseconds of one clock.

    Between asked and begun the lane waited for events.
    """

    task: str
    lane: int
    wait_begin: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class ScheduledTask:
    """A task where it stands in its lane."""

    task: str
    lane: int
    step: BoundStep
    waits: tuple[int, ...]
    """Numbers of the events that its lane waits for before it."""
    records: tuple[int, ...]
    """Numbers of the events that it records after it."""
    recorded_values: tuple[str, ...]
    """Values whose memory is another lane's, and may be given away while this task uses it."""


@dataclass(frozen=True, eq=False)
class ExecutableSchedule:
    """The turns of each lane, and of all lanes in an order in which one thread may launch them."""

    bound_work: BoundWork
    events: tuple[Event, ...]
    lanes: tuple[tuple[ScheduledTask, ...], ...]
    launches: tuple[ScheduledTask, ...]


class LaneExecutor(Protocol):
    """What runs courses: threads (`Lanes`) or the streams of a device (`Streams`)."""

    def __len__(self) -> int:
        """How many lanes there are."""

    def run(
        self, schedule: ExecutableSchedule, values: LiveValues, *, timed: bool = False
    ) -> Sequence[Sequence[TaskSpan]]:
        """Run all turns, and make the caller wait for them. With `timed`, for each lane when its turns ran."""

    def close(self) -> None:
        """End what the lanes need; they cannot be used afterwards."""


class LiveValues:
    """The values of one run by name; each is dropped when no task needs it any more."""

    def __init__(self, bound: BoundWork, given: Mapping[str, Any]) -> None:
        missing = [name for name in bound.inputs if name not in given]
        if missing:
            raise UsageError(f"{missing[0]} is not given.", suggest(missing[0], given))
        self.by_name = {name: given[name] for name in bound.inputs}
        self._use_counts = dict(bound.use_counts)
        self._lock = threading.Lock()

    def get_inputs(self, step: BoundStep) -> list[Any]:
        """What a task takes."""
        return [self.by_name[name] for name in step.ins]

    def store_outputs(self, step: BoundStep, made: Sequence[Any]) -> None:
        """Keep what a task made, and drop what was made for it alone; call it once a task."""
        self.by_name.update(zip(step.outs, made, strict=True))
        gone = []
        with self._lock:
            for name in dict.fromkeys((*step.ins, *step.outs)):
                if name in self._use_counts:
                    self._use_counts[name] -= 1
                    if not self._use_counts[name]:
                        gone.append(self.by_name.pop(name))
        gone.clear()  # here, not while others wait for the lock: to free memory may take a while


def build_executable(bound_work: BoundWork, schedule: Schedule) -> ExecutableSchedule:
    """A schedule of bound work; one that is wrong is refused, with all that is wrong with it."""
    verdict = check_schedule(bound_work.work, schedule)
    if not verdict.ok:
        raise UsageError(f"The schedule must not be run: {verdict}")
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
    """Task → the values it touches that lie in recorded storages whose home is another lane."""
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
