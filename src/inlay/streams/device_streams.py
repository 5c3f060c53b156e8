"""Lanes as streams of a device, with device-independent code (`torch.accelerator`). Not verified on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import UsageError
from inlay.streams.executable_schedule import TaskSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.streams.executable_schedule import ExecutableSchedule, LiveValues, ScheduledTask


class DeviceStreams:
    """Device streams as lanes. Lane 0 is the current stream at the start of a run; this object owns the others.

    One thread launches all tasks in an executable order, so every event is recorded before a stream waits for it.
    """

    def __init__(self, count: int, device: torch.device | str | None = None) -> None:
        found = (
            torch.device(device) if device is not None else torch.accelerator.current_accelerator(check_available=True)
        )
        if found is None or found.type == "cpu":
            raise UsageError("No device with streams was found.", "Use WorkerThreads.")
        if count < 1:
            raise UsageError(f"The number of lanes is {count}, but must be at least 1.", "Use 1 or more.")
        self.device = found
        self._others = [torch.Stream(device=found) for _ in range(count - 1)]

    def __len__(self) -> int:
        return 1 + len(self._others)

    def close(self) -> None:
        """Do nothing: streams need no shutdown."""

    def run(self, schedule: ExecutableSchedule, values: LiveValues, *, timed: bool = False) -> list[list[TaskSpan]]:
        """Launch a schedule. Work that the caller launches afterwards in its stream runs after all tasks.

        With `timed`, wait for the device and return when each task ran; else return empty lists.
        """
        if len(schedule.lanes) > len(self):
            raise UsageError(f"The schedule has {len(schedule.lanes)} lanes, but the executor has {len(self)}.")
        current = torch.accelerator.current_stream(self.device)
        clock = _EventTimer(current) if timed else None
        launch(schedule, values, [current, *self._others[: len(schedule.lanes) - 1]], clock)
        return clock.spans(schedule) if clock else [[] for _ in schedule.lanes]


def launch(
    schedule: ExecutableSchedule, values: LiveValues, streams: Sequence[Any], clock: _EventTimer | None = None
) -> None:
    """Launch every task in the stream of its lane; the first stream is the caller's.

    **Memory.** Outputs of a task are allocated while its stream is current, so they belong to that lane. A value of
    another lane whose memory may be reused too early is recorded in the stream that uses it. Results are recorded in
    the caller's stream. Inputs need no recording, because the caller's stream waits for all others at the end.
    """
    caller, *others = streams
    begun = caller.record_event()
    for stream in others:
        stream.wait_event(begun)
    events: dict[int, Any] = {}
    try:
        for turn in schedule.launches:
            _launch(turn, values, streams[turn.lane], events, clock)
    finally:  # also after an error: launched tasks use the caller's tensors
        for stream in others:
            caller.wait_event(stream.record_event())
    for name in schedule.bound_work.results:
        _record((name,), (name,), (values.by_name[name],), caller)


def _launch(
    turn: ScheduledTask, values: LiveValues, stream: Any, events: dict[int, Any], clock: _EventTimer | None
) -> None:
    if clock:
        clock.note(turn.task, stream)
    for number in turn.waits:
        stream.wait_event(events[number])
    if clock:
        clock.note(turn.task, stream)
    taken = values.get_inputs(turn.step)
    with stream, torch.no_grad():
        made = turn.step.run(taken)
    _record(turn.recorded_values, turn.step.ins, taken, stream)
    _record(turn.recorded_values, turn.step.outs, made, stream)
    if clock:
        clock.note(turn.task, stream)
    if turn.records:
        events |= dict.fromkeys(turn.records, stream.record_event())
    values.store_outputs(turn.step, made)


def _record(wanted: Sequence[str], names: Sequence[str], values: Sequence[Any], stream: Any) -> None:
    """Prevent reuse of the memory of the wanted values until the stream has passed their uses."""
    for name, value in zip(names, values, strict=True):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if name in wanted and isinstance(each, torch.Tensor) and each.device.type != "cpu":
                each.record_stream(stream)


class _EventTimer:
    """Measures when each task began to wait, began and ended, by timing events."""

    def __init__(self, caller: Any) -> None:
        self._zero = self._record_event(caller)
        self._notes: dict[str, list[torch.Event]] = {}

    def _record_event(self, stream: Any) -> torch.Event:
        event = torch.Event(stream.device, enable_timing=True)
        event.record(stream)
        return event

    def note(self, task: str, stream: Any) -> None:
        """Record a timing event in a stream."""
        self._notes.setdefault(task, []).append(self._record_event(stream))

    def spans(self, course: ExecutableSchedule) -> list[list[TaskSpan]]:
        """Wait for the device and return all spans in nanoseconds."""
        torch.accelerator.synchronize(self._zero.device)
        return [[TaskSpan(turn.task, turn.lane, *self._times(turn.task)) for turn in turns] for turns in course.lanes]

    def _times(self, task: str) -> list[int]:
        return [round(self._zero.elapsed_time(event) * 1e6) for event in self._notes[task]]
