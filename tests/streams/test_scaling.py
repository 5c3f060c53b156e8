"""Time per task must not grow with the size of the work."""

from __future__ import annotations

import random
from time import process_time
from typing import TYPE_CHECKING, Any

import pytest

from inlay.streams import Schedule, WorkGraph, build_work, check_schedule, group_tasks, plan_schedule
from tests.measurement import Calls
from tests.streams.large_work import decoder, tangled
from tests.synthetic_programs import layered

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program

SIZES = (1_000, 10_000, 100_000)


def _of_program(program: Program) -> WorkGraph:
    """With times at random. Values that all lie in one storage are taken away: nothing could overlap."""
    for node in program.graph.nodes:
        node.meta.pop("val", None)
    rng = random.Random(0)
    names = [task.name for task in build_work(program).tasks]
    return build_work(program, {name: rng.uniform(1e-5, 1e-3) for name in names})


def _plan(work: WorkGraph) -> Schedule:
    return plan_schedule(work, lanes=2, event_seconds=1e-6)


MAKERS = pytest.mark.parametrize(
    "make",
    [decoder, tangled, lambda size: _of_program(layered(size // 12))],
    ids=["decoder", "tangled", "layers"],
)
JOBS = pytest.mark.parametrize("job", ["schedule", "check", "grouped"])


def _job(job: str, work: WorkGraph) -> Callable[[], Any]:
    """Something to do with work that nobody has looked at yet: what is kept on it is part of the cost."""
    made = _plan(work)
    fresh = WorkGraph(work.tasks, work.storages)
    kept = Schedule(made.lanes, made.events, made.recorded_storages)
    jobs: dict[str, Callable[[], Any]] = {
        "schedule": lambda: _plan(fresh),
        "check": lambda: check_schedule(fresh, kept),
        "grouped": lambda: group_tasks(fresh, 1e-4),
    }
    return jobs[job]


@MAKERS
@JOBS
def test_calls_per_task(make: Callable[[int], WorkGraph], job: str) -> None:
    """Counted, not timed: what Python does for a task, whatever else the machine is doing."""
    figures = []
    for work in map(make, SIZES[:2]):
        do = _job(job, work)
        with Calls() as counted:
            do()
        figures.append(counted.count / len(work))
    print([f"{figure:.1f} calls" for figure in figures])
    assert figures[1] <= 1.5 * figures[0]


@pytest.mark.nightly
@MAKERS
@JOBS
def test_time_per_task(make: Callable[[int], WorkGraph], job: str) -> None:
    """The same by the clock, on a machine that does nothing else; smallest and largest in turns."""
    works = [make(size) for size in SIZES]
    times: list[list[float]] = [[] for _ in works]
    for _ in range(5):
        for work, each in zip(works, times, strict=True):
            for _ in range(5 if len(work) < SIZES[-1] / 2 else 1):
                do = _job(job, work)
                start = process_time()
                do()
                each.append((process_time() - start) / len(work) * 1e6)
    figures = [min(each) for each in times]
    print([f"{figure:.1f} µs" for figure in figures])
    assert figures[-1] <= 1.5 * figures[0]
