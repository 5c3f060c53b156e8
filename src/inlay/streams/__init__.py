"""Overlap that is planned and verified: work, schedules of it over lanes, and what can be wrong with them."""

from inlay.streams.checking import check
from inlay.streams.from_program import work_of_plan, work_of_program
from inlay.streams.measuring import measured_calls, measured_event, measured_steps
from inlay.streams.pieces import grouped
from inlay.streams.planning import edges_across, predicted, reduced, schedule
from inlay.streams.races import Conflict, Fault, Flaw, Race, Verdict
from inlay.streams.schedules import Event, Schedule, differences, in_order
from inlay.streams.work import Life, Storage, Task, Work

__all__ = [
    "Conflict",
    "Event",
    "Fault",
    "Flaw",
    "Life",
    "Race",
    "Schedule",
    "Storage",
    "Task",
    "Verdict",
    "Work",
    "check",
    "differences",
    "edges_across",
    "grouped",
    "in_order",
    "measured_calls",
    "measured_event",
    "measured_steps",
    "predicted",
    "reduced",
    "schedule",
    "work_of_plan",
    "work_of_program",
]
