"""Execution of bound work by a schedule, on threads or device streams, with the same numbers as in one lane."""

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
    """Run work once by a schedule, on the device of its inputs. For repeated runs, use a `ScheduledExecution`.

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
    """Return an executor with `count` lanes: device streams, or threads on a CPU. Default device: the accelerator."""
    found = torch.device(device) if device is not None else torch.accelerator.current_accelerator(check_available=True)
    return WorkerThreads(count) if found is None or found.type == "cpu" else DeviceStreams(count, found)


class ScheduledExecution:
    """Bound work, its schedule (checked once), and the lanes it runs on.

    It has the inputs and outputs of a `PlanExecutor`, so it can replace one.
    """

    def __init__(self, bound_work: BoundWork, schedule: Schedule, lanes: LaneExecutor) -> None:
        self.bound_work, self.schedule, self.lanes = bound_work, schedule, lanes
        self._executable = build_executable(bound_work, schedule)

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Run the work with inputs and states by name; return its results, without states."""
        return self._run(inputs, timed=False)[0]

    def run_timed(self, inputs: Mapping[str, Any]) -> tuple[list[Any], Timeline]:
        """Run the work; return its results and a timeline of all tasks."""
        results, spans = self._run(inputs, timed=True)
        return results, Timeline.from_spans(spans, self.schedule.events)

    def _run(self, given: Mapping[str, Any], *, timed: bool) -> tuple[list[Any], Sequence[Sequence[TaskSpan]]]:
        values = LiveValues(self.bound_work, given)
        spans = self.lanes.run(self._executable, values, timed=timed)
        return [values.by_name[name] for name in self.bound_work.results], spans
