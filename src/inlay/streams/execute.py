"""Execute: bound work by a schedule, on threads or on the streams of a device; the numbers are those of one lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.streams.course import Values, course
from inlay.streams.devices import Streams
from inlay.streams.lanes import Lanes
from inlay.streams.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.streams.bound import Bound
    from inlay.streams.course import Runner, Span
    from inlay.streams.schedules import Schedule


def run(bound: Bound, schedule: Schedule, given: Mapping[str, Any]) -> list[Any]:
    """Run work once by a schedule, where its inputs are; who runs it often makes an `Overlapped` on lanes that stay.

    >>> from inlay.compile.execute import BoundStep
    >>> from inlay.streams import Bound, Event, Schedule, Storage, Task, Work
    >>> tasks = Task("double", ("x",), ("y",)), Task("add", ("x", "y"), ("z",))
    >>> calls = {
    ...     "double": BoundStep(lambda values: [2 * values[0]], ("x",), ("y",)),
    ...     "add": BoundStep(lambda values: [values[0] + values[1]], ("x", "y"), ("z",)),
    ... }
    >>> bound = Bound(Work(tasks, (Storage("x"), Storage("y"), Storage("z"))), calls, ("z",))
    >>> run(bound, Schedule((("double",), ("add",)), (Event("double", "add"),), ("y",)), {"x": 7})
    [21]
    """
    devices = {value.device for value in given.values() if isinstance(value, torch.Tensor)}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    lanes = open_lanes(len(schedule.lanes), device)
    try:
        return Overlapped(bound, schedule, lanes)(given)
    finally:
        lanes.close()


def open_lanes(count: int, device: torch.device | str | None = None) -> Runner:
    """So many lanes of a device: streams where it has them, threads on a CPU. No device: the accelerator, if any."""
    found = torch.device(device) if device is not None else torch.accelerator.current_accelerator()
    return Lanes(count) if found is None or found.type == "cpu" else Streams(count, found)


class Overlapped:
    """Bound work, a schedule of it that was checked once, and the lanes it runs on.

    It takes and gives what an `Execution` does, so it can stand wherever one stands.
    """

    def __init__(self, bound: Bound, schedule: Schedule, lanes: Runner) -> None:
        self.bound, self.schedule, self.lanes = bound, schedule, lanes
        self._course = course(bound, schedule)

    def __call__(self, given: Mapping[str, Any]) -> list[Any]:
        """All inputs and states by name → what the work returns, states left out."""
        return self._run(given, timed=False)[0]

    def timed(self, given: Mapping[str, Any]) -> tuple[list[Any], Timeline]:
        """The same, and when each task ran in which lane."""
        results, spans = self._run(given, timed=True)
        return results, Timeline.of(spans, self.schedule.events)

    def _run(self, given: Mapping[str, Any], *, timed: bool) -> tuple[list[Any], Sequence[Sequence[Span]]]:
        values = Values(self.bound, given)
        spans = self.lanes.run(self._course, values, timed=timed)
        return [values.held[name] for name in self.bound.results], spans
