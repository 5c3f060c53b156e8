"""Overlap that is planned and verified: work, schedules of it over lanes, and what can be wrong with them."""

from inlay.streams.checking import check
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
    "in_order",
    "predicted",
    "reduced",
    "schedule",
]
