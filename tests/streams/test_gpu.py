"""What needs a GPU to be believed: streams, recorded memory, captured graphs. Written, and not verified where none is.

The same contracts are tested on a CPU in test_executor.py, test_device_streams.py and test_capture_replay.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.lowering.executable import BoundStep
from inlay.streams import (
    BoundWork,
    DeviceStreams,
    Event,
    GraphReplayer,
    Lifetime,
    Schedule,
    ScheduledExecution,
    Storage,
    Task,
    WorkGraph,
    bind_program,
    build_work,
    plan_schedule,
)
from tests.streams.decode_steps import CACHE, OwnCache, caller_owned, module_owned
from tests.streams.random_programs import INPUTS, SIZE, random_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator with streams"),
]


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def bits(values: Any) -> list[bytes]:
    return [value.cpu().contiguous().view(torch.uint8).numpy().tobytes() for value in values]


def given() -> dict[str, torch.Tensor]:
    values = torch.linspace(-1, 1, SIZE * SIZE, device=device()).reshape(SIZE, SIZE)
    return {name: values + place for place, name in enumerate(INPUTS)}


def test_random_programs_on_streams() -> None:
    """Operators that write in place, on two to four streams: the numbers and states of one."""
    streams = DeviceStreams(4)
    for seed in range(100):
        rng = random.Random(seed)
        program, _ = random_program(rng, 14)
        names = [task.name for task in build_work(program).tasks]
        work = build_work(program, {name: rng.uniform(1e-5, 1e-3) for name in names})
        bound = bind_program(program, work)
        overlapped = ScheduledExecution(
            bound, plan_schedule(work, lanes=rng.choice((2, 3, 4)), event_seconds=1e-6), streams
        )
        wanted_states = given()
        wanted = bits((*bound(wanted_states), *wanted_states.values()))
        for _ in range(20):
            states = given()
            assert bits((*overlapped(states), *states.values())) == wanted


def long_branches(recorded: bool) -> tuple[BoundWork, Schedule]:
    """A value made in one lane and read late in another, while its home lane makes many more of its size."""
    size = 1 << 22
    many = [f"fill{place}" for place in range(8)]
    tasks = (Task("make", (), ("x",)), Task("read", ("x",), ("y",)), *(Task(name, (), (name,)) for name in many))
    lives = {"y": Lifetime.RESULT}
    work = WorkGraph(
        tasks, tuple(Storage(name, lives.get(name, Lifetime.INTERMEDIATE), (name,)) for name in ("x", "y", *many))
    )

    def read(values: list[Any]) -> list[Any]:
        slow = torch.ones(2048, 2048, device=device())
        for _ in range(20):
            slow = slow @ slow / 2048
        return [values[0] + slow[0, 0] * 0]

    calls = {
        "make": BoundStep(lambda values: [torch.ones(size, device=device())], (), ("x",)),
        "read": BoundStep(read, ("x",), ("y",)),
        **{name: BoundStep(lambda values: [torch.full((size,), 7.0, device=device())], (), (name,)) for name in many},
    }
    lanes = Schedule((("make", *many), ("read",)), (Event("make", "read"),), ("x",) if recorded else ())
    return BoundWork(work, calls, ("y",)), lanes


def test_recorded_memory_is_not_given_away() -> None:
    bound, lanes = long_branches(recorded=True)
    overlapped = ScheduledExecution(bound, lanes, DeviceStreams(2))
    for _ in range(20):
        assert overlapped({})[0].eq(1).all()


def test_without_the_record_the_schedule_is_refused() -> None:
    bound, lanes = long_branches(recorded=False)
    with pytest.raises(UsageError, match="may reuse the memory of x"):
        ScheduledExecution(bound, lanes, DeviceStreams(2))


def test_a_timeline_of_streams() -> None:
    bound, lanes = long_branches(recorded=True)
    _, timeline = ScheduledExecution(bound, lanes, DeviceStreams(2)).run_timed({})
    assert {each.task for each in timeline.runs} == set(bound.steps)
    assert timeline.by_task["read"].begin >= timeline.by_task["make"].end


def cached(value: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"keys": value, "values": torch.zeros_like(value)}


def decode(at: int) -> dict[str, torch.Tensor]:
    row = torch.randn(1, CACHE[1], 1, CACHE[3], device=device())
    return {"row": row, "at": torch.tensor([at], device=device())}


def test_capture_and_replay_of_caller_owned_caches() -> None:
    state, plain = cached(torch.zeros(CACHE, device=device())), cached(torch.zeros(CACHE, device=device()))
    replays = GraphReplayer(caller_owned, state)
    replays.capture(decode(0))
    assert not state["keys"].any(), "capture leaves the state as it was"
    for at in range(32):
        step = decode(at)
        assert bits([replays(step)["attended"]]) == bits([caller_owned({**step, **plain})["attended"]])
    assert bits(state.values()) == bits(plain.values())


def test_capture_and_replay_of_module_owned_caches() -> None:
    module, plain = OwnCache().to(device()), OwnCache().to(device())
    replays = GraphReplayer(module_owned(module), {"keys": module.keys, "values": module.values})
    replays.capture(decode(0))
    for at in range(32):
        step = decode(at)
        assert bits([replays(step)["attended"]]) == bits([plain(step["row"], step["at"])])
    assert bits([module.keys, module.values]) == bits([plain.keys, plain.values])


def test_a_replay_allocates_nothing_and_stays_where_it_is() -> None:
    state = cached(torch.zeros(CACHE, device=device()))
    replays = GraphReplayer(caller_owned, state)
    replays.capture(decode(0))
    step, places = decode(1), set()
    places.add(replays(step)["attended"].data_ptr())
    before = torch.accelerator.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        places.add(replays(step)["attended"].data_ptr())
    assert torch.accelerator.memory_stats()["allocation.all.allocated"] == before
    assert len(places) == 1


def test_a_held_output_is_never_written_over() -> None:
    replays = GraphReplayer(caller_owned, cached(torch.zeros(CACHE, device=device())))
    replays.capture(decode(0))
    held = replays(decode(0))["attended"][0]
    with pytest.raises(UsageError, match="still referenced"):
        replays(decode(1))
    del held
    replays(decode(1))


def test_overlapped_work_can_be_captured() -> None:
    """Lane 0 is the stream that captures; the others fork from it and join it, so they are captured too."""
    bound, lanes = long_branches(recorded=True)
    overlapped = ScheduledExecution(bound, lanes, DeviceStreams(2))
    replays = GraphReplayer(lambda given: {"y": overlapped({})[0] + given["x"]}, {})
    replays.capture({"x": torch.zeros(1, device=device())})
    for value in range(5):
        assert replays({"x": torch.full((1,), float(value), device=device())})["y"].eq(1 + value).all()
