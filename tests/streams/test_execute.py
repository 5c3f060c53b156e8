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
from generated import INPUTS, SIZE, random_program
from torch.utils._pytree import tree_leaves

from inlay import Example
from inlay.capture import capture
from inlay.compile.execute import BoundStep, Execution
from inlay.compile.in_process import compile_lowered
from inlay.errors import UsageError
from inlay.flow import Options, lowered
from inlay.program.bindings import Role
from inlay.state import in_place
from inlay.streams import (
    Bound,
    Event,
    Lanes,
    Life,
    Overlapped,
    Schedule,
    Storage,
    Task,
    Verdict,
    Work,
    bound_program,
    bound_steps,
    check,
    grouped,
    in_order,
    open_lanes,
    planned,
    run,
    schedule,
    work_of_plan,
    work_of_program,
)
from inlay.testing import program_of
from models import Branch
from test_examples import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program import Program

EXAMPLE = load("multistream_overlap")
RUNS = 10_000
TASKS = 14


def bits(values: Any) -> list[bytes]:
    """What is equal only if every bit is."""
    return [value.contiguous().view(torch.uint8).numpy().tobytes() for value in values]


def delayed(bound: Bound, rng: random.Random) -> Bound:
    """The same work, but each task sleeps before it begins and before it ends, as long as it happens."""

    def late(step: BoundStep) -> BoundStep:
        def call(values: list[Any]) -> Any:
            _sleep(rng)
            made = step.run(values)
            _sleep(rng)
            return made

        return BoundStep(call, step.ins, step.outs)

    return Bound(bound.work, {name: late(step) for name, step in bound.steps.items()}, bound.results)


def _sleep(rng: random.Random) -> None:
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 1e-4))


def given() -> dict[str, torch.Tensor]:
    return {name: torch.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE) + place for place, name in enumerate(INPUTS)}


def works() -> Iterator[tuple[random.Random, Program, Work]]:
    """Random programs that write in place, with times at random, in pieces or operator by operator."""
    seed = 0
    while True:
        seed += 1
        rng = random.Random(seed)
        program, _ = random_program(rng, TASKS)
        names = [task.name for task in work_of_program(program).tasks]
        work = work_of_program(program, {name: rng.uniform(1e-5, 1e-3) for name in names})
        yield rng, program, grouped(work, 3e-4) if rng.random() < 0.3 else work


def test_ten_thousand_runs_with_random_delays() -> None:
    """250 programs × 40 runs on two to four lanes: never another result or state, and never a lane that hangs."""
    runs = spread = 0
    with Lanes(4) as lanes:
        for rng, program, work in works():
            made = schedule(work, lanes=rng.choice((2, 3, 4)), event_seconds=1e-6)
            assert check(work, made).ok
            spread += len(made.lanes) > 1
            bound = bound_program(program, work)
            wanted_states = given()
            wanted = bits((*bound(wanted_states), *wanted_states.values()))
            overlapped = Overlapped(delayed(bound, rng), made, lanes)
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
    work = Work(tasks, (Storage("state", Life.STATE, ("state",)), Storage("y", Life.RESULT, ("y",))))

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
    bound = Bound(work, calls, ("y",))
    wrong = Schedule((("read",), ("write",)))
    with pytest.raises(UsageError, match="write after read on state"):
        run(bound, wrong, {"state": torch.ones(2)})
    ordered.set()
    assert run(bound, Schedule(wrong.lanes, (Event("read", "write"),)), {"state": torch.ones(2)})[0].sum() == 2
    ordered.clear()
    written.clear()
    monkeypatch.setattr("inlay.streams.course.check", lambda work, schedule: Verdict())
    assert run(bound, wrong, {"state": torch.ones(2)})[0].sum() == 0


@pytest.mark.fast
@pytest.mark.parametrize("layer", EXAMPLE.LAYERS)
def test_layers_with_branches(layer: str) -> None:
    """Scheduled automatically, in two lanes: a mixture of experts with a shared one, attention beside an MLP."""
    torch.manual_seed(0)
    program, given = EXAMPLE.opened(EXAMPLE.LAYERS[layer](64, 8))
    plan = planned(program, given, event=1e-7)
    bound, made = plan.bound, plan.schedule
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wanted = bits(bound(given))
    finally:
        torch.set_num_threads(before)
    assert len(made.lanes) == 2
    assert made.events
    with Lanes(2) as lanes:
        overlapped = Overlapped(bound, made, lanes)
        for _ in range(20):
            results, timeline = overlapped.timed(given)
            assert bits(results) == wanted
    assert {each.task for each in timeline.ran} == set(bound.steps)


@pytest.mark.fast
def test_the_numbers_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    example = EXAMPLE.parallel(64, 8)
    program, given = EXAMPLE.opened(example)
    plan = planned(program, given, event=1e-7)
    with torch.no_grad():
        torch.testing.assert_close(run(plan.bound, plan.schedule, given)[0], example.module(*example.args))


@pytest.mark.fast
def test_state_the_program_owns_goes_on() -> None:
    """A counter, a cache of the caller, nested graphs and constants."""
    program = in_place(capture(Example(Branch(), (torch.ones(3, 4), torch.zeros(5, 4))))).program
    work = work_of_program(program)
    bound, cache = bound_program(program, work), torch.zeros(5, 4)
    for _ in range(3):
        results = run(bound, in_order(work), {"x": torch.ones(3, 4), "cache": cache})
    wanted = Branch()
    expected = wanted(torch.ones(3, 4), torch.zeros(5, 4))
    torch.testing.assert_close(results[0], expected["branched"])
    assert cache[1].sum() == 4
    assert cache.sum() == 4


@pytest.mark.fast
def test_a_program_that_returns_its_state_is_refused() -> None:
    program = capture(Example(Branch(), (torch.ones(3, 4), torch.zeros(5, 4))))
    with pytest.raises(UsageError, match="returned, and not written in place"):
        bound_program(program, work_of_program(program))


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
def test_steps_of_a_plan() -> None:
    """A plan that runs, step by step or several steps a task: what its execution gives, states included."""
    torch.manual_seed(0)
    program = capture(Example(Rows(4), (torch.randn(2, 8), [torch.zeros(2, 8) for _ in range(4)])))
    made = lowered(program, Options())
    plan = made.buckets[0][2]
    assert len(plan.steps) > 1
    executable = compile_lowered(made, "eager")
    execution = executable.buckets[0][1]
    work = work_of_plan(plan, [1e-5] * len(plan.steps))
    x = torch.randn(2, 8)
    wanted_state = executable.new_state()
    wanted_state = {name: torch.zeros_like(value) for name, value in wanted_state.items()}
    wanted = bits((*execution({"x": x, **wanted_state}), *wanted_state.values()))
    for each in (work, grouped(work, 1.0)):
        bound = bound_steps(execution, each)
        state = {name: torch.zeros_like(value) for name, value in wanted_state.items()}
        results = run(bound, in_order(each), {"x": x, **state})
        assert bits((*results, *state.values())) == wanted
    with pytest.raises(UsageError, match="before its steps are chained"):
        bound_steps(Execution([BoundStep(None, (), ())], ()), work)


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
    work = Work(
        tuple(Task(name, taken, (name,)) for name, taken in takes.items()),
        tuple(Storage(name, Life.INTERMEDIATE, (name,)) for name in names),
    )
    bound = Bound(work, {name: BoundStep(link, taken, (name,)) for name, taken in takes.items()}, (names[-1],))
    lanes = Schedule(
        (tuple(names[::2]), tuple(names[1::2])),
        tuple(Event(*pair) for pair in pairwise(names)),
        tuple(names[:-1]),
    )
    run(bound, lanes, {})
    assert seen == [0, 1, 1, 1, 1, 1]


@pytest.mark.fast
def test_modes_of_the_caller() -> None:
    """Nothing is noted for gradients; in inference mode its tensors can be written to."""
    example = Example(Rows(1), (torch.randn(2, 8), [torch.zeros(2, 8)]))
    program = in_place(capture(example)).program
    given = dict(zip((row.name for row in program.bindings.of(Role.INPUT)), tree_leaves(example.args), strict=True))
    work = work_of_program(program)
    bound = bound_program(program, work)
    given["x"].requires_grad_()
    assert not run(bound, in_order(work), given)[0].requires_grad
    with torch.inference_mode():
        own = {name: torch.ones(2, 8) for name in given}
        run(bound, in_order(work), own)
    assert torch.is_inference(own["state_0"])
    assert not torch.equal(own["state_0"], torch.ones(2, 8))


@pytest.mark.fast
def test_lanes_cast_where_the_caller_does() -> None:
    program = program_of(lambda x: x @ x, [torch.ones(4, 4)])
    bound = bound_program(program, work_of_program(program))
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.float16):
        wanted = bound({"values_0": x})[0]
        made = run(bound, in_order(bound.work), {"values_0": x})[0]
    assert wanted.dtype is made.dtype is torch.float16
    assert torch.equal(made, wanted)


@pytest.mark.fast
def test_lanes_are_threads_where_there_is_no_accelerator() -> None:
    with pytest.raises(UsageError, match="0 lanes"):
        open_lanes(0, "cpu")
    lanes = open_lanes(2, "cpu")
    try:
        assert isinstance(lanes, Lanes)
        assert len(lanes) == 2
    finally:
        lanes.close()
