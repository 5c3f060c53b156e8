"""Execute: bound work by a schedule, on threads or on the streams of a device; the numbers are those of one lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.streams.device_streams import DeviceStreams
from inlay.streams.executable_schedule import LiveValues, build_executable
from inlay.streams.timeline import Timeline
from inlay.streams.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.streams.bound_work import BoundWork
    from inlay.streams.executable_schedule import LaneExecutor, TaskSpan
    from inlay.streams.schedule import Schedule


def run_schedule(bound: BoundWork, schedule: Schedule, given: Mapping[str, Any]) -> list[Any]:
    """Run work once by a schedule, where its inputs are; who runs it often makes a `ScheduledExecution` on lanes that
    stay.

    >>> from inlay.lowering.executable import BoundStep
    >>> from inlay.streams import BoundWork, Event, Schedule, Storage, Task, WorkGraph
    >>> tasks = Task("double", ("x",), ("y",)), Task("add", ("x", "y"), ("z",))
    >>> calls = {
    ...     "double": BoundStep(lambda values: [2 * values[0]], ("x",), ("y",)),
    ...     "add": BoundStep(lambda values: [values[0] + values[1]], ("x", "y"), ("z",)),
    ... }
    >>> bound_work = BoundWork(WorkGraph(tasks, (Storage("x"), Storage("y"), Storage("z"))), calls, ("z",))
    >>> run_schedule(bound_work, Schedule((("double",), ("add",)), (Event("double", "add"),), ("y",)), {"x": 7})
    [21]
    """
    devices = {value.device for value in given.values() if isinstance(value, torch.Tensor)}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    lanes = open_executor(len(schedule.lanes), device)
    try:
        return ScheduledExecution(bound, schedule, lanes)(given)
    finally:
        lanes.close()


def open_executor(count: int, device: torch.device | str | None = None) -> LaneExecutor:
    """So many lanes of a device: streams where it has them, threads on a CPU. No device: the accelerator, if any."""
    found = torch.device(device) if device is not None else torch.accelerator.current_accelerator()
    return WorkerThreads(count) if found is None or found.type == "cpu" else DeviceStreams(count, found)


class ScheduledExecution:
    """Bound work, a schedule of it that was checked once, and the lanes it runs on.

    It takes and gives what a `PlanExecutor` does, so it can stand wherever one stands.
    """

    def __init__(self, bound_work: BoundWork, schedule: Schedule, lanes: LaneExecutor) -> None:
        self.bound_work, self.schedule, self.lanes = bound_work, schedule, lanes
        self._executable = build_executable(bound_work, schedule)

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        """All inputs and states by name → what the work returns, states left out."""
        return self._run(inputs, timed=False)[0]

    def run_timed(self, inputs: Mapping[str, Any]) -> tuple[list[Any], Timeline]:
        """The same, and when each task ran in which lane."""
        results, spans = self._run(inputs, timed=True)
        return results, Timeline.from_spans(spans, self.schedule.events)

    def _run(self, given: Mapping[str, Any], *, timed: bool) -> tuple[list[Any], Sequence[Sequence[TaskSpan]]]:
        values = LiveValues(self.bound_work, given)
        spans = self.lanes.run(self._executable, values, timed=timed)
        return [values.by_name[name] for name in self.bound_work.results], spans
