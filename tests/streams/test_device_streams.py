"""Launching on streams, held against the book: streams that write down what they are told stand in for a device.

Whether a device then does it is asked in tests/streams/test_gpu.py.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx

from inlay.errors import UsageError
from inlay.lowering.executable import BoundStep
from inlay.program import Binding, Bindings, Facts, Program, Role
from inlay.program.program import CallSpec
from inlay.streams import (
    BoundWork,
    DeviceStreams,
    Event,
    Lifetime,
    Schedule,
    Storage,
    Task,
    WorkGraph,
    bind_program,
    build_work,
    plan_schedule,
)
from inlay.streams.device_streams import launch
from inlay.streams.executable_schedule import LiveValues, build_executable
from inlay.streams.happens_before import find_conflicts
from tests.streams.random_programs import random_program

if TYPE_CHECKING:
    from typing import Self

pytestmark = pytest.mark.fast
aten = torch.ops.aten


class WrittenDown:
    """A stream: what it was told, in order. An event is its place in that list."""

    current: WrittenDown | None = None

    def __init__(self, name: str) -> None:
        self.name, self.told = name, list[tuple[str, Any]]()

    def __enter__(self) -> Self:
        WrittenDown.current = self
        return self

    def __exit__(self, *error: object) -> None:
        WrittenDown.current = None

    def record_event(self) -> tuple[WrittenDown, int]:
        return self, len(self.told)

    def wait_event(self, event: tuple[WrittenDown, int]) -> None:
        self.told.append(("wait", event))

    def ran(self, task: str) -> None:
        self.told.append(("run", task))


class Recorded(torch.Tensor):
    """A tensor of no memory that notes in which streams it is recorded."""

    def record_stream(self, stream: Any) -> None:
        stream.told.append(("keep", self))


def noting(work: WorkGraph, results: tuple[str, ...] = ()) -> BoundWork:
    """Tasks that note in which stream they run; values are what their storages are called."""

    def step(task: Task) -> BoundStep:
        def call(values: list[Any]) -> list[Any]:
            assert WrittenDown.current is not None
            WrittenDown.current.ran(task.name)
            return [torch.empty(1, device="meta").as_subclass(Recorded) for _ in outs]

        made = [name for name in task.writes if name not in seen]
        seen.update(made)
        outs = tuple(made)
        return BoundStep(call, tuple(name for name in task.reads if name in seen and name not in made), outs)

    seen = {each.name for each in work.storages if each.lifetime in (Lifetime.INPUT, Lifetime.STATE)}
    return BoundWork(work, {task.name: step(task) for task in work.tasks}, results)


def launched(bound: BoundWork, made: Schedule) -> list[WrittenDown]:
    streams = [WrittenDown(f"stream {lane}") for lane in range(len(made.lanes))]
    given = dict.fromkeys(bound.inputs, torch.empty(1, device="meta").as_subclass(Recorded))
    launch(build_executable(bound, made), LiveValues(bound, given), streams)
    return streams


def past(streams: list[WrittenDown]) -> dict[str, set[str]]:
    """Task → all tasks that a device has run when it begins, if it does what the streams were told."""
    found: dict[str, set[str]] = {}

    def until(stream: WrittenDown, place: int) -> set[str]:
        before: set[str] = set()
        for kind, what in stream.told[:place]:
            if kind == "wait":
                before |= until(*what)
            elif kind == "run":
                found.setdefault(what, set(before))
                before |= {what}
        return before

    ends = [until(stream, len(stream.told)) for stream in streams]
    found["the caller, afterwards"] = ends[0]
    return found


def test_streams_are_told_all_that_matters() -> None:
    """Random programs: every two tasks that meet at a storage are in order, and the caller comes after all of them."""
    spread = 0
    for seed in range(100):
        rng = random.Random(seed)
        program, _ = random_program(rng, 10)
        names = [task.name for task in build_work(program).tasks]
        work = build_work(program, {name: rng.uniform(1e-5, 1e-3) for name in names})
        made = plan_schedule(work, lanes=3, event_seconds=1e-6)
        streams = launched(noting(work), made)
        before = past(streams)
        for pair in find_conflicts(work):
            assert work.tasks[pair.first].name in before[work.tasks[pair.second].name]
        assert before["the caller, afterwards"] == set(names)
        spread += len(made.lanes) > 1
    assert spread > 50


def test_other_streams_begin_after_what_the_caller_launched_before() -> None:
    work = WorkGraph((Task("a", (), ("x",)), Task("b", (), ("y",))), (Storage("x"), Storage("y")))
    caller, other = launched(noting(work), Schedule((("a",), ("b",))))
    assert other.told[0] == ("wait", (caller, 0))
    assert caller.told[-1] == ("wait", (other, len(other.told)))


def test_memory_is_recorded_where_another_lane_uses_it() -> None:
    """A recorded storage in every lane but its home, results in the caller's stream, and nothing else."""
    tasks = Task("make", (), ("x",)), Task("use", ("x",), ("y",)), Task("also", ("x",), ("z",)), Task("end", ("y",))
    lives = {"y": Lifetime.RESULT}
    work = WorkGraph(tasks, tuple(Storage(name, lives.get(name, Lifetime.INTERMEDIATE), (name,)) for name in "xyz"))
    lanes = Schedule((("make", "also"), ("use", "end")), (Event("make", "use"),), recorded_storages=("x",))
    caller, other = launched(noting(work, ("y",)), lanes)
    assert [kind for kind, _ in other.told] == ["wait", "wait", "run", "keep", "run"]
    assert [kind for kind, _ in caller.told] == ["run", "run", "wait", "keep"]


def test_every_tensor_of_a_list_is_recorded() -> None:
    work = WorkGraph((Task("make", (), ("x",)), Task("use", ("x",)), Task("next")), (Storage("x", values=("x",)),))
    bound = noting(work)

    def make(values: list[Any]) -> list[Any]:
        return [[torch.empty(1, device="meta").as_subclass(Recorded) for _ in range(3)]]

    listed = BoundWork(work, {**bound.steps, "make": BoundStep(make, (), ("x",))}, ())
    _, other = launched(listed, Schedule((("make", "next"), ("use",)), (Event("make", "use"),), ("x",)))
    assert [kind for kind, _ in other.told] == ["wait", "wait", "run", "keep", "keep", "keep"]


def test_a_value_that_may_lie_in_the_memory_of_another_is_recorded_for_it() -> None:
    """The memory of x is lane 0's, and y may be a view of it or a copy that is lane 1's own."""
    graph = fx.Graph()
    x = graph.call_function(aten.relu.default, (graph.placeholder("given"),))
    y = graph.call_function(aten.reshape.default, (x, [4]))
    z = graph.call_function(aten.neg.default, (graph.call_function(aten.t.default, (y,)),))
    graph.output((z,))
    rows = Binding("given", Role.INPUT, "given", "float32", (4,)), Binding("z", Role.OUTPUT, "", "float32", (4,))
    program = Program("made", graph, Bindings(rows), {}, {}, CallSpec(None, None, ()), Facts())
    bound = bind_program(program, build_work(program))
    apart = Schedule(
        ((x.name, z.name), (y.name, "t_default")),
        (Event(x.name, y.name), Event("t_default", z.name)),
        (x.name, y.name, "t_default"),
    )
    recorded = {turn.task: turn.recorded_values for turn in build_executable(bound, apart).launches}
    views = {y.name: (x.name, y.name), "t_default": (y.name, "t_default")}
    assert recorded == {x.name: (), **views, z.name: ("t_default",)}


def test_an_error_while_launching_leaves_the_caller_after_all_that_was_launched() -> None:
    work = WorkGraph((Task("a", (), ("x",)), Task("b", (), ("y",))), (Storage("x"), Storage("y")))
    bound = noting(work)

    def fails(values: list[Any]) -> list[Any]:
        raise ValueError("this task fails")

    broken = BoundWork(work, {**bound.steps, "a": BoundStep(fails, (), ("x",))}, ())
    made = Schedule((("a",), ("b",)))
    streams = [WrittenDown("caller"), WrittenDown("other")]
    with pytest.raises(ValueError, match="this task fails"):
        launch(build_executable(broken, made), LiveValues(broken, {}), streams)
    assert streams[0].told[-1] == ("wait", (streams[1], len(streams[1].told)))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_a_device_it_is_said() -> None:
    with pytest.raises(UsageError, match="No device with streams was found"):
        DeviceStreams(2)
