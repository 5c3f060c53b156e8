"""Running schedules: whatever the lanes do, the numbers are those of one lane, bit for bit."""

from __future__ import annotations

import random
import threading
import time
import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from inlay import Example
from inlay.errors import UsageError
from inlay.frontend import capture
from inlay.lowering.executable import BoundStep
from inlay.lowering.state.in_place_writes import write_in_place
from inlay.program.bindings import Role
from inlay.streams import (
    BoundWork,
    Event,
    Lifetime,
    Schedule,
    ScheduleCheck,
    ScheduledExecution,
    Storage,
    Task,
    WorkerThreads,
    WorkGraph,
    bind_program,
    build_work,
    check_schedule,
    group_tasks,
    open_executor,
    plan_overlap,
    plan_schedule,
    run_schedule,
    serial_schedule,
)
from inlay.testing import program_of
from tests.examples.test_examples import load
from tests.models import Branch
from tests.streams.random_programs import INPUTS, SIZE, random_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program import Program

EXAMPLE = load("multistream_overlap")
RUNS = 10_000
TASKS = 14


def bits(values: Any) -> list[bytes]:
    """What is equal only if every bit is."""
    return [value.contiguous().view(torch.uint8).numpy().tobytes() for value in values]


def delayed(bound: BoundWork, rng: random.Random) -> BoundWork:
    """The same work, but each task sleeps before it begins and before it ends, as long as it happens."""

    def late(step: BoundStep) -> BoundStep:
        def call(values: list[Any]) -> Any:
            _sleep(rng)
            made = step.run(values)
            _sleep(rng)
            return made

        return BoundStep(call, step.ins, step.outs)

    return BoundWork(bound.work, {name: late(step) for name, step in bound.steps.items()}, bound.results)


def _sleep(rng: random.Random) -> None:
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 1e-4))


def given() -> dict[str, torch.Tensor]:
    return {name: torch.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE) + place for place, name in enumerate(INPUTS)}


def works() -> Iterator[tuple[random.Random, Program, WorkGraph]]:
    """Random programs that write in place, with times at random, in pieces or operator by operator."""
    seed = 0
    while True:
        seed += 1
        rng = random.Random(seed)
        program, _ = random_program(rng, TASKS)
        names = [task.name for task in build_work(program).tasks]
        work = build_work(program, {name: rng.uniform(1e-5, 1e-3) for name in names})
        yield rng, program, group_tasks(work, 3e-4) if rng.random() < 0.3 else work


def test_ten_thousand_runs_with_random_delays() -> None:
    """250 programs × 40 runs on two to four lanes: never another result or state, and never a lane that hangs."""
    runs = spread = 0
    with WorkerThreads(4) as lanes:
        for rng, program, work in works():
            made = plan_schedule(work, lanes=rng.choice((2, 3, 4)), event_seconds=1e-6)
            assert check_schedule(work, made).ok
            spread += len(made.lanes) > 1
            bound = bind_program(program, work)
            wanted_states = given()
            wanted = bits((*bound(wanted_states), *wanted_states.values()))
            overlapped = ScheduledExecution(delayed(bound, rng), made, lanes)
            for _ in range(40):
                states = given()
                assert bits((*overlapped(states), *states.values())) == wanted, f"{work}\n{made}"
                runs += 1
            if runs >= RUNS:
                break
    assert runs == RUNS
    assert spread > 200, "most of them had something to overlap"


@pytest.mark.fast
def test_a_missing_event_is_seen_in_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ten thousand runs look for can be found: a schedule that races gives other numbers, if it is run."""
    tasks = Task("read", ("state",), ("y",)), Task("write", (), ("state",))
    work = WorkGraph(tasks, (Storage("state", Lifetime.STATE, ("state",)), Storage("y", Lifetime.RESULT, ("y",))))

    written, ordered = threading.Event(), threading.Event()

    def read(values: list[Any]) -> list[Any]:
        if not ordered.is_set():
            written.wait(60)
        return [values[0].clone()]

    def write(values: list[Any]) -> list[Any]:
        values[0].zero_()
        written.set()
        return []

    calls = {"read": BoundStep(read, ("state",), ("y",)), "write": BoundStep(write, ("state",), ())}
    bound = BoundWork(work, calls, ("y",))
    wrong = Schedule((("read",), ("write",)))
    with pytest.raises(UsageError, match="write after read on state"):
        run_schedule(bound, wrong, {"state": torch.ones(2)})
    ordered.set()
    assert run_schedule(bound, Schedule(wrong.lanes, (Event("read", "write"),)), {"state": torch.ones(2)})[0].sum() == 2
    ordered.clear()
    written.clear()
    monkeypatch.setattr("inlay.streams.executable_schedule.check_schedule", lambda work, schedule: ScheduleCheck())
    assert run_schedule(bound, wrong, {"state": torch.ones(2)})[0].sum() == 0


@pytest.mark.fast
@pytest.mark.parametrize("layer", EXAMPLE.LAYERS)
def test_layers_with_branches(layer: str) -> None:
    """Scheduled automatically, in two lanes: a mixture of experts with a shared one, attention beside an MLP."""
    torch.manual_seed(0)
    program, given = EXAMPLE.capture_layer(EXAMPLE.LAYERS[layer](64, 8))
    plan = plan_overlap(program, given, event_seconds=1e-7)
    bound, made = plan.bound_work, plan.schedule
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wanted = bits(bound(given))
    finally:
        torch.set_num_threads(before)
    assert len(made.lanes) == 2
    assert made.events
    with WorkerThreads(2) as lanes:
        overlapped = ScheduledExecution(bound, made, lanes)
        for _ in range(20):
            results, timeline = overlapped.run_timed(given)
            assert bits(results) == wanted
    assert {each.task for each in timeline.runs} == set(bound.steps)


@pytest.mark.fast
def test_the_numbers_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    example = EXAMPLE.parallel(64, 8)
    program, given = EXAMPLE.capture_layer(example)
    plan = plan_overlap(program, given, event_seconds=1e-7)
    with torch.no_grad():
        torch.testing.assert_close(
            run_schedule(plan.bound_work, plan.schedule, given)[0], example.module(*example.args)
        )


@pytest.mark.fast
def test_state_the_program_owns_goes_on() -> None:
    """A counter, a cache of the caller, nested graphs and constants."""
    program = write_in_place(capture(Example(Branch(), (torch.ones(3, 4), torch.zeros(5, 4))))).program
    work = build_work(program)
    bound, cache = bind_program(program, work), torch.zeros(5, 4)
    for _ in range(3):
        results = run_schedule(bound, serial_schedule(work), {"x": torch.ones(3, 4), "cache": cache})
    wanted = Branch()
    expected = wanted(torch.ones(3, 4), torch.zeros(5, 4))
    torch.testing.assert_close(results[0], expected["branched"])
    assert cache[1].sum() == 4
    assert cache.sum() == 4


@pytest.mark.fast
def test_a_program_that_returns_its_state_is_refused() -> None:
    program = capture(Example(Branch(), (torch.ones(3, 4), torch.zeros(5, 4))))
    with pytest.raises(UsageError, match="returned, but not written in place"):
        bind_program(program, build_work(program))


class Rows(torch.nn.Module):
    """Blocks in a row, each with a state."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(blocks))

    def forward(self, x: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        for block, held in zip(self.blocks, state, strict=True):
            held.add_(block(x))
            x = x + held.tanh()
        return x


@pytest.mark.fast
def test_what_nobody_needs_is_dropped_while_others_run() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def link(values: list[Any]) -> list[Any]:
        seen.append(sum(each() is not None for each in alive))
        made = torch.ones(4)
        alive.append(weakref.ref(made))
        return [made]

    names = [f"t{place}" for place in range(6)]
    takes = dict(zip(names, [(), *((name,) for name in names)], strict=False))
    work = WorkGraph(
        tuple(Task(name, taken, (name,)) for name, taken in takes.items()),
        tuple(Storage(name, Lifetime.INTERMEDIATE, (name,)) for name in names),
    )
    bound = BoundWork(work, {name: BoundStep(link, taken, (name,)) for name, taken in takes.items()}, (names[-1],))
    lanes = Schedule(
        (tuple(names[::2]), tuple(names[1::2])),
        tuple(Event(*pair) for pair in pairwise(names)),
        tuple(names[:-1]),
    )
    run_schedule(bound, lanes, {})
    assert seen == [0, 1, 1, 1, 1, 1]


@pytest.mark.fast
def test_modes_of_the_caller() -> None:
    """Nothing is noted for gradients; in inference mode its tensors can be written to."""
    example = Example(Rows(1), (torch.randn(2, 8), [torch.zeros(2, 8)]))
    program = write_in_place(capture(example)).program
    given = dict(
        zip((row.name for row in program.bindings.with_role(Role.INPUT)), tree_leaves(example.args), strict=True)
    )
    work = build_work(program)
    bound = bind_program(program, work)
    given["x"].requires_grad_()
    assert not run_schedule(bound, serial_schedule(work), given)[0].requires_grad
    with torch.inference_mode():
        own = {name: torch.ones(2, 8) for name in given}
        run_schedule(bound, serial_schedule(work), own)
    assert torch.is_inference(own["state_0"])
    assert not torch.equal(own["state_0"], torch.ones(2, 8))


@pytest.mark.fast
def test_lanes_cast_where_the_caller_does() -> None:
    program = program_of(lambda x: x @ x, [torch.ones(4, 4)])
    bound = bind_program(program, build_work(program))
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.float16):
        wanted = bound({"values_0": x})[0]
        made = run_schedule(bound, serial_schedule(bound.work), {"values_0": x})[0]
    assert wanted.dtype is made.dtype is torch.float16
    assert torch.equal(made, wanted)


@pytest.mark.fast
def test_lanes_are_threads_where_there_is_no_accelerator() -> None:
    with pytest.raises(UsageError, match="number of lanes is 0"):
        open_executor(0, "cpu")
    lanes = open_executor(2, "cpu")
    try:
        assert isinstance(lanes, WorkerThreads)
        assert len(lanes) == 2
    finally:
        lanes.close()
