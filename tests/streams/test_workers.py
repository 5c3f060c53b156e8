"""Lanes of a CPU: threads that stay, how many intra-op threads they have, and what happens when a task fails."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.lowering.executable import BoundStep
from inlay.streams import (
    BoundWork,
    Event,
    Lifetime,
    Schedule,
    ScheduledExecution,
    Storage,
    Task,
    WorkerThreads,
    WorkGraph,
)
from inlay.streams.executable_schedule import ExecutableSchedule, LiveValues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Call = Callable[[list[Any]], list[Any]]

pytestmark = pytest.mark.fast


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def work_of(takes: dict[str, tuple[str, ...]]) -> WorkGraph:
    """Tasks that each make a value called like them, from the values they take."""
    tasks = [Task(name, taken, (name,)) for name, taken in takes.items()]
    given = {each for taken in takes.values() for each in taken} - set(takes)
    storages = [Storage(name, Lifetime.INPUT, (name,)) for name in sorted(given)]
    return WorkGraph(tuple(tasks), (*storages, *(Storage(name, Lifetime.RESULT, (name,)) for name in takes)))


def bound_of(takes: dict[str, tuple[str, ...]], calls: dict[str, Call], results: tuple[str, ...]) -> BoundWork:
    steps = {name: BoundStep(calls[name], taken, (name,)) for name, taken in takes.items()}
    return BoundWork(work_of(takes), steps, results)


def in_new_thread(call: Callable[[], Any]) -> Any:
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def os_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.usefixtures("two_threads")
def test_one_intra_op_thread_each_and_nobody_else_notices() -> None:
    bound = bound_of({"a": (), "b": ()}, dict.fromkeys("ab", lambda values: [torch.get_num_threads()]), ("a", "b"))
    with WorkerThreads(2) as lanes:
        assert ScheduledExecution(bound, Schedule((("a",), ("b",))), lanes)({}) == [1, 1]
        assert torch.get_num_threads() == 2
        assert in_new_thread(torch.get_num_threads) == 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads by /proc")
@pytest.mark.usefixtures("two_threads")
def test_a_lane_starts_no_threads_of_openmp() -> None:
    """A thread with two intra-op threads starts a second one for a large operator; a lane does not."""
    large = torch.ones(1 << 20)

    def grown(values: Any = None) -> list[int]:
        before = os_threads()
        large.add(1)
        return [len(os_threads() - before)]

    assert in_new_thread(grown) == [1]
    with WorkerThreads(1) as lanes:
        assert ScheduledExecution(bound_of({"a": ()}, {"a": grown}, ("a",)), Schedule((("a",),)), lanes)({}) == [0]


def test_threads_stay_and_end() -> None:
    before = threading.active_count()
    seen: set[int] = set()

    def note(values: list[Any]) -> list[Any]:
        seen.add(threading.get_ident())
        return [None]

    bound = bound_of({"a": (), "b": ()}, {"a": note, "b": note}, ("a",))
    with WorkerThreads(3) as lanes:
        assert threading.active_count() == before + 3
        for _ in range(20):
            ScheduledExecution(bound, Schedule((("a",), ("b",))), lanes)({})
        assert len(seen) == 2
        assert threading.get_ident() not in seen
    assert threading.active_count() == before
    with pytest.raises(UsageError, match="closed"):
        ScheduledExecution(bound, Schedule((("a",), ("b",))), lanes)({})


def test_threads_end_with_the_last_one_who_knows_them() -> None:
    before = threading.active_count()
    lanes = WorkerThreads(2)
    threads = lanes._threads
    del lanes
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert threading.active_count() == before


LANES = Schedule(
    (("a", "b", "c"), ("d", "e"), ("f", "g")),
    (Event("a", "e"), Event("d", "b"), Event("e", "g"), Event("b", "g"), Event("f", "c")),
)
TAKES: dict[str, tuple[str, ...]] = {
    "a": (),
    "d": (),
    "f": (),
    "b": ("a", "d"),
    "e": ("a", "d"),
    "c": ("b", "f"),
    "g": ("e", "b", "f"),
}


def fails(values: list[Any]) -> list[Any]:
    raise ValueError("this task fails")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("task", TAKES)
def test_an_error_in_any_task_ends_the_run(task: str, late: bool) -> None:
    """Lanes that wait for the one that died wake; the error comes out once, with its own traceback and its place."""

    def call(name: str) -> Call:
        def run(values: list[Any]) -> list[Any]:
            time.sleep(0.002 if late and name == task else 0)
            return fails(values) if name == task else [sum(values)]

        return run

    bound = bound_of(TAKES, {name: call(name) for name in TAKES}, ("c", "g"))
    right = bound_of(TAKES, {name: lambda values: [1 + sum(values)] for name in TAKES}, ("c", "g"))
    with WorkerThreads(3) as lanes:
        start = time.perf_counter()
        with pytest.raises(ValueError, match="this task fails") as found:
            ScheduledExecution(bound, LANES, lanes)({})
        assert time.perf_counter() - start < 60, "the other lanes wait until they give up"
        assert [frame.name for frame in traceback.extract_tb(found.tb)][-2:] == ["run", "fails"]
        assert found.value.__notes__ == [
            f"Raised by task {task} in lane {LANES.lane_of[task]}; the other lanes were stopped."
        ]
        assert found.value.__context__ is None
        assert ScheduledExecution(right, LANES, lanes)({}) == right({}), "the lanes are as good as new"


def test_no_task_begins_after_an_error() -> None:
    done, failing = [], threading.Event()

    def note(values: list[Any]) -> list[Any]:
        failing.wait(60)
        time.sleep(0.01)
        done.append(1)
        return [None]

    def bad(values: list[Any]) -> list[Any]:
        failing.set()
        return fails(values)

    many = {f"task{number}": () for number in range(500)}
    bound = bound_of({**many, "bad": ()}, {**dict.fromkeys(many, note), "bad": bad}, ())
    with WorkerThreads(2) as lanes, pytest.raises(ValueError, match="this task fails"):
        ScheduledExecution(bound, Schedule((tuple(many), ("bad",))), lanes)({})
    assert len(done) < 500


def test_two_errors_are_told_as_one() -> None:
    meet = threading.Barrier(2)

    def both(values: list[Any]) -> list[Any]:
        meet.wait(10)
        raise ValueError(threading.current_thread().name)

    bound = bound_of({"a": (), "b": ()}, {"a": both, "b": both}, ())
    with WorkerThreads(2) as lanes, pytest.raises(ValueError, match="inlay lane") as found:
        ScheduledExecution(bound, Schedule((("a",), ("b",))), lanes)({})
    first, second = found.value.__notes__
    assert first.startswith("Raised by task ")
    assert "failed too: ValueError: inlay lane" in second


def test_an_error_keeps_nothing_alive() -> None:
    class Large:
        """Something that can be watched."""

    held: list[weakref.ref[Large]] = []

    def make(values: list[Any]) -> list[Any]:
        made = Large()
        held.append(weakref.ref(made))
        return [made]

    bound = bound_of({"a": (), "b": ("a",)}, {"a": make, "b": fails}, ())
    gc.disable()
    try:
        with WorkerThreads(2) as lanes:
            with pytest.raises(ValueError, match="this task fails") as found:
                ScheduledExecution(bound, Schedule((("a",), ("b",)), (Event("a", "b"),)), lanes)({})
            found.value.__traceback__ = None
            del found
            assert held[0]() is None
    finally:
        gc.enable()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is heard, also where whoever started the tests ignores it, as jobs in the background do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("times", [1, 2], ids=["once", "again"])
@pytest.mark.parametrize("early", [False, True], ids=["while it waits", "before it waits"])
def test_an_interrupt_stops_the_lanes_before_it_comes_out(early: bool, times: int) -> None:
    running: set[int] = set()
    done = []

    def interrupt(values: list[Any]) -> list[Any]:
        running.add(1)
        time.sleep(0 if early else 0.05)
        for _ in range(times):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.1)
        running.clear()
        return [None]

    def slow(values: list[Any]) -> list[Any]:
        time.sleep(0.02)
        done.append(1)
        return [None]

    many = {f"task{number}": () for number in range(500)}
    bound = bound_of({"first": (), **many}, {"first": interrupt, **dict.fromkeys(many, slow)}, ())
    with WorkerThreads(2) as lanes:
        with pytest.raises(KeyboardInterrupt):
            ScheduledExecution(bound, Schedule((("first",), tuple(many))), lanes)({})
        assert not running, "the task that ran has ended"
        so_far = len(done)
        assert so_far < 500, "tasks that had not begun were not begun"
        time.sleep(0.05)
        assert len(done) == so_far
        assert ScheduledExecution(bound_of({"a": ()}, {"a": lambda values: [3]}, ("a",)), Schedule((("a",),)), lanes)(
            {}
        ) == [3]


def test_nothing_to_do_is_done_at_once() -> None:
    bound = bound_of({}, {}, ())
    with WorkerThreads(1) as lanes:
        assert ScheduledExecution(bound, Schedule(((),)), lanes)({}) == []
        assert lanes.run(ExecutableSchedule(bound, (), (), ()), LiveValues(bound, {})) == []


def test_runs_of_several_threads_come_one_after_the_other() -> None:
    bound = bound_of(TAKES, {name: lambda values: [1 + sum(values)] for name in TAKES}, ("c", "g"))
    found: list[list[Any]] = []
    with WorkerThreads(3) as lanes:
        overlapped = ScheduledExecution(bound, LANES, lanes)
        callers = [threading.Thread(target=lambda: found.extend(overlapped({}) for _ in range(50))) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert found == [bound({})] * 200


def test_mistakes_are_sentences() -> None:
    with pytest.raises(UsageError, match="number of lanes is 0"):
        WorkerThreads(0)
    bound = bound_of({"a": (), "b": ("a", "x")}, {"a": lambda values: [1], "b": lambda values: [sum(values)]}, ("b",))
    with WorkerThreads(1) as lanes:
        with pytest.raises(UsageError, match="has 2 lanes, but the executor has 1"):
            ScheduledExecution(bound, Schedule((("a",), ("b",)), (Event("a", "b"),)), lanes)({"x": 2})
        with pytest.raises(UsageError, match="The input x is missing"):
            ScheduledExecution(bound, Schedule((("a", "b"),)), lanes)({"y": 2})
        with pytest.raises(UsageError, match="is invalid: read after write on a: b does not wait for a"):
            ScheduledExecution(bound, Schedule((("a",), ("b",))), lanes)

        def nested(values: list[Any]) -> list[Any]:
            return ScheduledExecution(bound, Schedule((("a", "b"),)), lanes)({"x": 2})

        def closing(values: list[Any]) -> Any:
            lanes.close()

        for call, says in ((nested, "Use other lanes"), (closing, "cannot close the lanes")):
            within = bound_of({"a": ()}, {"a": call}, ("a",))
            with pytest.raises(UsageError, match=says):
                ScheduledExecution(within, Schedule((("a",),)), lanes)({})
