"""Lanes as CPU threads: persistent, with one intra-op thread each, and events that cost microseconds."""

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

_SIGNAL_INTERVAL = 0.2
"""Seconds. Python handles a signal that arrives just before a wait without a timeout only after that wait."""


class WorkerThreads:
    """One thread per lane. The threads wait between runs and stop at `close` or at the end of a `with` block.

    >>> with WorkerThreads(2) as lanes:
    ...     len(lanes)
    2
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise UsageError(f"The number of lanes is {count}, but must be at least 1.", "Use 1 or more.")
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
        # set_num_threads in a lane also changes torch's default for new threads: restore the caller's value.
        torch.set_num_threads(torch.get_num_threads())
        self._end = weakref.finalize(self, _end, self._inboxes)

    def __len__(self) -> int:
        return len(self._inboxes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads after the current run."""
        if threading.current_thread() in self._threads:
            raise UsageError("A task cannot close the lanes it runs in.", "Close them after the run.")
        with self._busy:
            self._end()
            for thread in self._threads:
                thread.join()

    def run(self, schedule: ExecutableSchedule, values: LiveValues, *, timed: bool = False) -> list[list[TaskSpan]]:
        """Run a schedule. An error in one lane stops the others after their current task and is raised here.

        Only one run is active; concurrent calls wait. Times are always measured.
        """
        if threading.current_thread() in self._threads:
            raise UsageError("A task cannot run a schedule on the lanes it runs in.", "Use other lanes for it.")
        if len(schedule.lanes) > len(self):
            raise UsageError(f"The schedule has {len(schedule.lanes)} lanes, but the executor has {len(self)}.")
        if not schedule.lanes:
            return []
        with self._busy:
            if not self._end.alive:
                raise UsageError("These lanes are closed.", "Create new ones.")
            run = _ScheduleRun(schedule, values)
            try:
                self._begin(run)
                while not run.done.acquire(timeout=_SIGNAL_INTERVAL):
                    pass
            except BaseException:  # Ctrl-C: no task may write to the caller's tensors after this
                self._wait_until_stopped(run)
                raise
        run.raise_failure()
        return run.spans

    def _wait_until_stopped(self, run: _ScheduleRun) -> None:
        """Stop a run and wait until no task is running, even if Ctrl-C is pressed repeatedly."""
        while len(run.finished_lanes) < len(run.schedule.lanes):
            with suppress(KeyboardInterrupt):
                run.stop()
                self._begin(run)  # some lanes may not have started; a second start returns at once
                while len(run.finished_lanes) < len(run.schedule.lanes):
                    sleep(0.001)

    def _begin(self, run: _ScheduleRun) -> None:
        for lane, inbox in enumerate(self._inboxes[: len(run.schedule.lanes)]):
            inbox.put((run, lane))


def _worker_loop(inbox: Inbox, ready: Inbox) -> None:
    """Run lanes from the inbox, one after the other, until it contains None."""
    torch.get_num_threads()  # its first call in a thread applies torch's default: do that before setting the number
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
    """One run: its events, failures and finished lanes.

    An event is a lock that is initially locked: waiting acquires it, recording releases it. Each has one waiter and one
    recorder, and a lock is the cheapest primitive in Python.
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
        """Run one lane to its end, or until any lane fails."""
        turn = None
        try:
            cast = torch.autocast("cpu", self.cast) if self.cast else nullcontext()
            with torch.inference_mode(self.inference), torch.no_grad(), cast:
                for turn in () if self.is_stopped else self.schedule.lanes[lane]:
                    if not self._run_task(turn):
                        break
        except BaseException as error:  # raised to the caller by `raise_failure`
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
        """Wake every waiting lane; no lane starts another task."""
        self.is_stopped = True
        for event in self.events:
            _release(event)

    def raise_failure(self) -> None:
        """Raise the first error with its own traceback, if any."""
        if self.failures:
            try:
                raise _annotated_error(self.failures)
            finally:
                self.failures = []  # else the error keeps its own frames alive


def _annotated_error(failures: Sequence[tuple[ScheduledTask, BaseException]]) -> BaseException:
    (turn, first), *others = failures
    first.add_note(f"Raised by task {turn.task} in lane {turn.lane}; the other lanes were stopped.")
    for turn, error in others:
        first.add_note(f"Task {turn.task} in lane {turn.lane} failed too: {type(error).__name__}: {error}")
    return first


def _new_event() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _release(lock: threading.Lock) -> None:
    with suppress(RuntimeError):  # already released: the run was stopped, or two lanes ended at once
        lock.release()
