"""Overlapped execution: work graphs, schedules over lanes, race checks, executors and timelines."""

from inlay.streams.access_sets import build_work
from inlay.streams.bound_work import BoundWork, bind_program
from inlay.streams.device_streams import DeviceStreams
from inlay.streams.executor import ScheduledExecution, open_executor, run_schedule
from inlay.streams.graph_replay import CapturedStep, GraphReplayer
from inlay.streams.list_scheduler import cross_lane_edges, plan_schedule, predict_times, reduce_events
from inlay.streams.overlap_comparison import OverlapComparison, OverlapPlan, compare_lanes, plan_overlap
from inlay.streams.race_check import check_schedule
from inlay.streams.schedule import Event, Schedule, serial_schedule
from inlay.streams.schedule_errors import ConflictKind, Race, ScheduleCheck, ScheduleError, ScheduleErrorKind
from inlay.streams.task_grouping import group_tasks, merge_between_events
from inlay.streams.timeline import TaskRun, Timeline
from inlay.streams.timing import measure_calls, measure_event
from inlay.streams.work_graph import Lifetime, Storage, Task, WorkGraph
from inlay.streams.worker_threads import WorkerThreads

__all__ = [
    "BoundWork",
    "CapturedStep",
    "ConflictKind",
    "DeviceStreams",
    "Event",
    "GraphReplayer",
    "Lifetime",
    "OverlapComparison",
    "OverlapPlan",
    "Race",
    "Schedule",
    "ScheduleCheck",
    "ScheduleError",
    "ScheduleErrorKind",
    "ScheduledExecution",
    "Storage",
    "Task",
    "TaskRun",
    "Timeline",
    "WorkGraph",
    "WorkerThreads",
    "bind_program",
    "build_work",
    "check_schedule",
    "compare_lanes",
    "cross_lane_edges",
    "group_tasks",
    "measure_calls",
    "measure_event",
    "merge_between_events",
    "open_executor",
    "plan_overlap",
    "plan_schedule",
    "predict_times",
    "reduce_events",
    "run_schedule",
    "serial_schedule",
]
