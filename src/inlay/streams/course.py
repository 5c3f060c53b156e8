"""Course: a schedule made ready to run, so that a run has nothing left to look up, and the values of one run."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from inlay.errors import UsageError, nearest
from inlay.streams.checking import check
from inlay.streams.order import order_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.compile.execute import BoundStep
    from inlay.streams.bound import Bound
    from inlay.streams.schedules import Event, Schedule


class Span(NamedTuple):
    """One task of a run: when its lane asked for it, when it began and when it ended, in nanoseconds of one clock.

    Between asked and begun the lane waited for events.
    """

    task: str
    lane: int
    asked: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Turn:
    """A task where it stands in its lane."""

    task: str
    lane: int
    step: BoundStep
    waits: tuple[int, ...]
    """Numbers of the events that its lane waits for before it."""
    records: tuple[int, ...]
    """Numbers of the events that it records after it."""
    recorded: tuple[str, ...]
    """Values whose memory is another lane's, and may be given away while this task uses it."""


@dataclass(frozen=True, eq=False)
class Course:
    """The turns of each lane, and of all lanes in an order in which one thread may launch them."""

    bound: Bound
    events: tuple[Event, ...]
    lanes: tuple[tuple[Turn, ...], ...]
    launches: tuple[Turn, ...]


class Runner(Protocol):
    """What runs courses: threads (`Lanes`) or the streams of a device (`Streams`)."""

    def __len__(self) -> int:
        """How many lanes there are."""

    def run(self, course: Course, values: Values, *, timed: bool = False) -> Sequence[Sequence[Span]]:
        """Run all turns, and make the caller wait for them. With `timed`, for each lane when its turns ran."""

    def close(self) -> None:
        """End what the lanes need; they cannot be used afterwards."""


class Values:
    """The values of one run by name; each is dropped when no task needs it any more."""

    def __init__(self, bound: Bound, given: Mapping[str, Any]) -> None:
        missing = [name for name in bound.takes if name not in given]
        if missing:
            raise UsageError(f"{missing[0]} is not given.", nearest(missing[0], given))
        self.held = {name: given[name] for name in bound.takes}
        self._left = dict(bound.users)
        self._lock = threading.Lock()

    def take(self, step: BoundStep) -> list[Any]:
        """What a task takes."""
        return [self.held[name] for name in step.ins]

    def keep(self, step: BoundStep, made: Sequence[Any]) -> None:
        """Keep what a task made, and drop what was made for it alone; call it once a task."""
        self.held.update(zip(step.outs, made, strict=True))
        gone = []
        with self._lock:
            for name in dict.fromkeys((*step.ins, *step.outs)):
                if name in self._left:
                    self._left[name] -= 1
                    if not self._left[name]:
                        gone.append(self.held.pop(name))
        gone.clear()  # here, not while others wait for the lock: to free memory may take a while


def course(bound: Bound, schedule: Schedule) -> Course:
    """A schedule of bound work; one that is wrong is refused, with all that is wrong with it."""
    verdict = check(bound.work, schedule)
    if not verdict.ok:
        raise UsageError(f"The schedule must not be run: {verdict}")
    number = {event: place for place, event in enumerate(schedule.events)}
    waits: dict[str, list[int]] = {}
    records: dict[str, list[int]] = {}
    for event, place in number.items():
        waits.setdefault(event.before, []).append(place)
        records.setdefault(event.after, []).append(place)
    recorded = _recorded(bound, schedule)
    turns = {
        name: Turn(
            name,
            lane,
            bound.steps[name],
            tuple(waits.get(name, ())),
            tuple(records.get(name, ())),
            recorded.get(name, ()),
        )
        for name, lane in schedule.lane.items()
    }
    lanes = tuple(tuple(turns[name] for name in tasks) for tasks in schedule.lanes)
    launches = [turns[bound.work.tasks[place].name] for place in order_of(schedule, bound.work.place).ran]
    return Course(bound, schedule.events, lanes, tuple(launches))


def _recorded(bound: Bound, schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """Task → the values it touches that lie in recorded storages whose home is another lane."""
    places: dict[str, list[str]] = {}
    for storage in schedule.recorded:
        for name in bound.work.storage[storage].values:
            places.setdefault(name, []).append(storage)
    home: dict[str, int] = {}
    found: dict[str, tuple[str, ...]] = {}
    for task in bound.work.tasks:
        lane, step = schedule.lane[task.name], bound.steps[task.name]
        for name in task.writes:
            home.setdefault(name, lane)
        touched = dict.fromkeys((*step.ins, *step.outs))
        found[task.name] = tuple(
            name for name in touched if any(home.get(each, lane) != lane for each in places.get(name, ()))
        )
    return found
