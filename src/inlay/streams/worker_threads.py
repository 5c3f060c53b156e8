"""Lanes of a CPU: threads that stay, one intra-op thread each, and events that cost microseconds."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any, Self

import torch

from inlay.errors import UsageError
from inlay.streams.executable_schedule import TaskSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.streams.executable_schedule import ExecutableSchedule, LiveValues, ScheduledTask

    Inbox = SimpleQueue[Any]


class WorkerThreads:
    """As many threads as a schedule has lanes. They wait between runs; `close` or the end of a `with` ends them.

    >>> with WorkerThreads(2) as lanes:
    ...     len(lanes)
    2
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UsageError(f"{count} lanes run nothing.", "Ask for 1 or more.")
        self._inboxes: list[Inbox] = [SimpleQueue() for _ in range(count)]
        self._busy = threading.Lock()
        ready: Inbox = SimpleQueue()
        self._threads = [
            threading.Thread(target=_worker_loop, args=(inbox, ready), name=f"inlay lane {lane}", daemon=True)
            for lane, inbox in enumerate(self._inboxes)
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            ready.get()
        # What a lane sets for itself torch also keeps as what threads yet to come begin with: that stays the caller's.
        torch.set_num_threads(torch.get_num_threads())
        self._end = weakref.finalize(self, _end, self._inboxes)

    def __len__(self) -> int:
        return len(self._inboxes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; what runs is run to its end."""
        if threading.current_thread() in self._threads:
            raise UsageError("A task cannot close the lanes it runs in.", "Close them when the run is over.")
        with self._busy:
            self._end()
            for thread in self._threads:
                thread.join()

    def run(self, schedule: ExecutableSchedule, values: LiveValues, *, timed: bool = False) -> list[list[TaskSpan]]:
        """Run a course. An error in one lane stops the others after the task they are at, and is raised here.

        One run at a time: others wait for it. Times are always taken.
        """
        if threading.current_thread() in self._threads:
            raise UsageError("A task cannot run a course on the lanes it runs in.", "Give it lanes of its own.")
        if len(schedule.lanes) > len(self):
            raise UsageError(f"The schedule has {len(schedule.lanes)} lanes, and there are {len(self)}.")
        if not schedule.lanes:
            return []
        with self._busy:
            if not self._end.alive:
                raise UsageError("These lanes are closed.", "Make new ones.")
            run = _ScheduleRun(schedule, values)
            try:
                self._begin(run)
                run.done.acquire()
            except BaseException:  # somebody pressed Ctrl-C: nothing may write to the caller's tensors after this
                self._wait_until_stopped(run)
                raise
        run.raise_failure()
        return run.spans

    def _wait_until_stopped(self, run: _ScheduleRun) -> None:
        """Stop a run, and wait until no task runs any more, however often somebody presses Ctrl-C meanwhile."""
        while len(run.finished_lanes) < len(run.schedule.lanes):
            with suppress(KeyboardInterrupt):
                run.stop()
                self._begin(run)  # perhaps not all had begun; who is asked twice sees at once that it is over
                while len(run.finished_lanes) < len(run.schedule.lanes):
                    sleep(0.001)

    def _begin(self, run: _ScheduleRun) -> None:
        for lane, inbox in enumerate(self._inboxes[: len(run.schedule.lanes)]):
            inbox.put((run, lane))


def _worker_loop(inbox: Inbox, ready: Inbox) -> None:
    """What a thread does: one lane of one run after the other, until it is told to end."""
    torch.get_num_threads()  # the first time, a thread is given what torch keeps for new ones: that must be over
    torch.set_num_threads(1)
    ready.put(None)
    while (job := inbox.get()) is not None:
        run, lane = job
        run.run_lane(lane)
        del job, run


def _end(inboxes: Sequence[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


class _ScheduleRun:
    """One run: its events, what went wrong, and who is done.

    An event is a lock that is locked from the beginning: to wait is to acquire it, to record is to release it. Each has
    one that waits and one that records, and nothing in Python is cheaper.
    """

    def __init__(self, course: ExecutableSchedule, values: LiveValues) -> None:
        self.schedule, self.values = course, values
        self.events = [_new_event() for _ in course.events]
        self.finished_lanes: set[int] = set()
        self.done = _new_event()
        self.spans: list[list[TaskSpan]] = [[] for _ in course.lanes]
        self.is_stopped = False
        self.failures: list[tuple[ScheduledTask, BaseException]] = []
        self.inference = torch.is_inference_mode_enabled()
        self.cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

    def run_lane(self, lane: int) -> None:
        """Run one lane to its end, or until something goes wrong anywhere."""
        turn = None
        try:
            cast = torch.autocast("cpu", self.cast) if self.cast else nullcontext()
            with torch.inference_mode(self.inference), torch.no_grad(), cast:
                for turn in () if self.is_stopped else self.schedule.lanes[lane]:
                    if not self._run_task(turn):
                        break
        except BaseException as error:  # whatever it is, it is the caller's
            assert turn is not None
            self.failures.append((turn, error))
            self.stop()
        finally:
            self.finished_lanes.add(lane)
            if len(self.finished_lanes) == len(self.schedule.lanes):
                _release(self.done)

    def _run_task(self, turn: ScheduledTask) -> bool:
        asked = perf_counter_ns()
        for number in turn.waits:
            self.events[number].acquire()
        if self.is_stopped:
            return False
        begin = perf_counter_ns()
        step = turn.step
        self.values.store_outputs(step, step.run(self.values.get_inputs(step)))
        end = perf_counter_ns()
        for number in turn.records:
            _release(self.events[number])
        self.spans[turn.lane].append(TaskSpan(turn.task, turn.lane, asked, begin, end))
        return True

    def stop(self) -> None:
        """Wake every lane that waits; none begins another task."""
        self.is_stopped = True
        for event in self.events:
            _release(event)

    def raise_failure(self) -> None:
        """Raise the first error with its own traceback, if there was any."""
        if self.failures:
            try:
                raise _annotated_error(self.failures)
            finally:
                self.failures = []  # or the error holds its own frames alive


def _annotated_error(failures: Sequence[tuple[ScheduledTask, BaseException]]) -> BaseException:
    (turn, first), *others = failures
    first.add_note(f"This was task {turn.task} in lane {turn.lane}; the other lanes were stopped.")
    for turn, error in others:
        first.add_note(f"Task {turn.task} in lane {turn.lane} failed too: {type(error).__name__}: {error}")
    return first


def _new_event() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _release(lock: threading.Lock) -> None:
    with suppress(RuntimeError):  # another has released it: the run was stopped, or two lanes ended at once
        lock.release()
