"""The timeline of a run: task times, overlap, waiting time and critical path."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from inlay.streams.schedule import Event  # noqa: TC001 - `from_json` reads the annotations
from inlay.streams.work_graph import JsonRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inlay.streams.executable_schedule import TaskSpan


@dataclass(frozen=True)
class TaskRun:
    """The times of a task in a run, in seconds from the start of the run.

    `wait_begin` is the end of the lane's previous task. From then until `begin` the lane waited for events.
    """

    task: str
    lane: int
    wait_begin: float
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration of the task."""
        return self.end - self.begin

    @property
    def wait_seconds(self) -> float:
        """How long its lane waited for events before it."""
        return self.begin - self.wait_begin


@dataclass(frozen=True)
class Timeline(JsonRecord):
    """One run of a schedule.

    >>> spans = [[TaskRun("a", 0, 0.0, 0.0, 3.0)], [TaskRun("b", 1, 0.0, 0.0, 2.0), TaskRun("c", 1, 2.0, 3.0, 4.0)]]
    >>> timeline = Timeline(tuple(runs for lane in spans for runs in lane), (Event("a", "c"),))
    >>> print(timeline)
    4.000 s; 50 % of the time two lanes or more ran; 1.000 s lost waiting
    >>> timeline.critical_path
    ('a', 'c')
    """

    runs: tuple[TaskRun, ...]
    events: tuple[Event, ...] = ()

    @classmethod
    def from_spans(cls, lanes: Sequence[Sequence[TaskSpan]], events: tuple[Event, ...]) -> Timeline:
        """Return a timeline from measured spans. It starts at the earliest `wait_begin`."""
        spans = [span for lane in lanes for span in lane]
        zero = min((span.wait_begin for span in spans), default=0)
        ran = [
            TaskRun(span.task, span.lane, *((each - zero) / 1e9 for each in (span.wait_begin, span.begin, span.end)))
            for span in spans
        ]
        return cls(tuple(ran), events)

    @cached_property
    def by_task(self) -> Mapping[str, TaskRun]:
        """The runs by task name."""
        return {each.task: each for each in self.runs}

    @property
    def lane_count(self) -> int:
        """The number of lanes."""
        return 1 + max((each.lane for each in self.runs), default=-1)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end of the last task."""
        return max((each.end for each in self.runs), default=0.0)

    @property
    def busy_seconds(self) -> float:
        """Total duration of all tasks."""
        return sum(each.seconds for each in self.runs)

    @property
    def wait_seconds(self) -> float:
        """Total seconds that lanes waited for events. Idle time after the last task of a lane does not count."""
        return sum(each.wait_seconds for each in self.runs)

    @property
    def overlap_share(self) -> float:
        """The fraction of the time in which at least two lanes ran, from 0 to 1."""
        edges = sorted([(each.begin, 1) for each in self.runs] + [(each.end, -1) for each in self.runs])
        together, running, since = 0.0, 0, 0.0
        for time, change in edges:
            if running > 1:
                together += time - since
            running, since = running + change, time
        return together / self.seconds if self.seconds else 0.0

    @cached_property
    def critical_path(self) -> tuple[str, ...]:
        """The tasks that determined the end: from the last task back, always to the predecessor that ended last."""
        before = self._before()
        found = []
        at = max(self.runs, key=lambda each: each.end, default=None)
        while at is not None:
            found.append(at.task)
            at = max(before[at.task], key=lambda each: each.end, default=None)
        return tuple(reversed(found))

    def _before(self) -> dict[str, list[TaskRun]]:
        """Return for each task the previous task of its lane, and the tasks it waited for."""
        found: dict[str, list[TaskRun]] = {each.task: [] for each in self.runs}
        last: dict[int, TaskRun] = {}
        for each in sorted(self.runs, key=lambda each: each.begin):
            if each.lane in last:
                found[each.task].append(last[each.lane])
            last[each.lane] = each
        for event in self.events:
            found[event.before].append(self.by_task[event.after])
        return found

    def __str__(self) -> str:
        share = f"{100 * self.overlap_share:.0f} % of the time two lanes or more ran"
        return f"{format_seconds(self.seconds)}; {share}; {format_seconds(self.wait_seconds)} lost waiting"

    def trace(self) -> str:
        """Return the timeline in the JSON trace format of Perfetto and chrome://tracing."""
        return json.dumps({"traceEvents": list(self._trace_events()), "displayTimeUnit": "ns"}, ensure_ascii=False)

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        critical = set(self.critical_path)
        for lane in range(self.lane_count):
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": f"lane {lane}"}}
        for each in self.runs:
            place = {"pid": 0, "tid": each.lane}
            if any(event.before == each.task for event in self.events):
                yield place | _slice("wait", "wait", each.wait_begin, each.begin, {"for": each.task})
            yield place | _slice(each.task, "task", each.begin, each.end, {"critical": each.task in critical})
        for number, event in enumerate(self.events):
            after, before = self.by_task[event.after], self.by_task[event.before]
            flow = {"name": str(event), "cat": "event", "id": number, "pid": 0}
            yield flow | {"ph": "s", "tid": after.lane, "ts": 1e6 * (after.begin + after.end) / 2}
            yield flow | {"ph": "f", "bp": "e", "tid": before.lane, "ts": 1e6 * before.begin}


def _slice(name: str, kind: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "ts": 1e6 * begin, "dur": 1e6 * (end - begin), "args": args}


def format_seconds(seconds: float) -> str:
    """Return a time with a suitable unit.

    >>> format_seconds(0.0123), format_seconds(4.2e-6), format_seconds(3)
    ('12.300 ms', '4.2 µs', '3.000 s')
    """
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
