"""Overlap that is planned, verified, run and seen: work, schedules of it over lanes, races, timelines."""

from inlay.streams.bound import Bound, bound_program, bound_steps
from inlay.streams.capture import Captured, Replays
from inlay.streams.checking import check
from inlay.streams.comparing import Compared, Planned, compare, planned
from inlay.streams.devices import Streams
from inlay.streams.execute import Overlapped, open_lanes, run
from inlay.streams.from_program import work_of_plan, work_of_program
from inlay.streams.lanes import Lanes
from inlay.streams.measuring import measured_calls, measured_event, measured_steps
from inlay.streams.pieces import grouped, joined
from inlay.streams.planning import edges_across, predicted, reduced, schedule
from inlay.streams.races import Conflict, Fault, Flaw, Race, Verdict
from inlay.streams.schedules import Event, Schedule, differences, in_order
from inlay.streams.timeline import Ran, Timeline
from inlay.streams.work import Life, Storage, Task, Work

__all__ = [
    "Bound",
    "Captured",
    "Compared",
    "Conflict",
    "Event",
    "Fault",
    "Flaw",
    "Lanes",
    "Life",
    "Overlapped",
    "Planned",
    "Race",
    "Ran",
    "Replays",
    "Schedule",
    "Storage",
    "Streams",
    "Task",
    "Timeline",
    "Verdict",
    "Work",
    "bound_program",
    "bound_steps",
    "check",
    "compare",
    "differences",
    "edges_across",
    "grouped",
    "in_order",
    "joined",
    "measured_calls",
    "measured_event",
    "measured_steps",
    "open_lanes",
    "planned",
    "predicted",
    "reduced",
    "run",
    "schedule",
    "work_of_plan",
    "work_of_program",
]
