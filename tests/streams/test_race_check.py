"""The checker against every way in which small programs can be run; schedules that are none; what it says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from inlay.streams import (
    ConflictKind,
    Event,
    Lifetime,
    Schedule,
    ScheduleCheck,
    ScheduleErrorKind,
    Storage,
    Task,
    WorkGraph,
    build_work,
    check_schedule,
    plan_schedule,
    serial_schedule,
)
from tests.streams.brute_force import Truth, all_orders, races
from tests.streams.random_programs import random_any, random_program, random_right

if TYPE_CHECKING:
    from inlay.program import Program

pytestmark = pytest.mark.fast
PROGRAMS, DELETIONS = 200, 2000


def _program(seed: int) -> tuple[random.Random, Program, Truth]:
    rng = random.Random(seed)
    return rng, *random_program(rng, rng.randrange(5, 8))


def _measured(rng: random.Random, program: Program) -> WorkGraph:
    names = [task.name for task in build_work(program).tasks]
    return build_work(program, {name: rng.uniform(1e-5, 1e-3) for name in names})


def _right(rng: random.Random, work: WorkGraph, truth: Truth) -> Schedule:
    """A schedule at random that is right. Where memory would be reused too early it waits, or records the storage."""
    lanes, events = random_right(rng, truth, rng.choice((2, 3)))
    made = Schedule(lanes, tuple(Event(*event) for event in events))
    while found := check_schedule(work, made).races:
        if rng.random() < 0.8:
            made = replace(made, events=(*made.events, found[0].missing_event))
        else:
            made = replace(made, recorded_storages=(*made.recorded_storages, found[0].storage))
    return made


def _races(truth: Truth, made: Schedule) -> bool:
    return races(truth, made.lanes, tuple((event.after, event.before) for event in made.events), made.recorded_storages)


def test_no_false_alarm() -> None:
    lanes = 0
    for seed in range(PROGRAMS):
        rng, program, truth = _program(seed)
        work = _measured(rng, program)
        ours = plan_schedule(work, lanes=rng.choice((2, 3)), event_seconds=1e-6)
        lanes += len(ours.lanes)
        for made in (serial_schedule(work), ours, _right(rng, work, truth)):
            assert not _races(truth, made)
            assert check_schedule(work, made) == ScheduleCheck()
    assert lanes > 1.5 * PROGRAMS, "most programs stay in one lane, and prove little"


def test_every_deleted_event_is_judged() -> None:
    """A deletion that some run can tell is reported, and one that none can is accepted."""
    judged = {True: 0, False: 0}
    reused = 0
    for seed in range(10**6):
        rng, program, truth = _program(seed)
        work = build_work(program)
        made = _right(rng, work, truth)
        assert not _races(truth, made)
        for event in made.events:
            without = replace(made, events=tuple(each for each in made.events if each != event))
            found = check_schedule(work, without)
            assert bool(found.races) == _races(truth, without), f"seed {seed}, without {event}"
            assert not found.errors
            judged[not found.ok] += 1
            reused += {race.kind for race in found.races} == {ConflictKind.REUSE}
        if sum(judged.values()) >= DELETIONS and seed >= PROGRAMS:
            break
    assert min(judged.values()) > DELETIONS / 4, judged
    assert reused > 20, "reuse of memory is hardly ever all that is wrong"


def test_any_schedule_is_judged() -> None:
    """Schedules written at random: the checker knows which are right, which are not, and which never end."""
    judged = {"right": 0, "race": 0, "deadlock": 0}
    for seed in range(1500):
        rng, program, truth = _program(seed)
        work = build_work(program)
        lanes, events = random_any(rng, truth, rng.choice((1, 2, 3)))
        made = Schedule(lanes, tuple(Event(*event) for event in events))
        found = check_schedule(work, made)
        ends = any(True for _ in all_orders(lanes, events))
        assert {flaw.kind for flaw in found.errors} == (set() if ends else {ScheduleErrorKind.DEADLOCK})
        if ends:
            assert bool(found.races) == _races(truth, made), f"seed {seed}"
        judged["deadlock" if not ends else "race" if found.races else "right"] += 1
    assert min(judged.values()) > 50, judged


def test_what_is_reported_is_what_is_wrong() -> None:
    """The two tasks of a race change places in some runs, or are always the wrong way round; the event helps."""
    seen = set()
    for seed in range(300):
        rng, program, truth = _program(seed)
        work = build_work(program)
        lanes, events = random_any(rng, truth, 2)
        made = Schedule(lanes, tuple(Event(*event) for event in events))
        orders = list(all_orders(lanes, events))
        found = check_schedule(work, made).races if orders else ()
        for race in found:
            first = {order.index(race.first) < order.index(race.second) for order in orders}
            assert first == ({False} if race.is_reversed else {True, False})
            if not race.is_reversed:
                after = check_schedule(work, replace(made, events=(*made.events, race.missing_event)))
                assert not [each for each in after.races if each == race]
            seen.add((race.kind, race.is_reversed))
    assert seen == {(kind, turned) for kind in ConflictKind for turned in (True, False)} - {(ConflictKind.REUSE, True)}


A, B, C = Task("a", (), ("x",)), Task("b", ("x",), ("y",)), Task("c", ("s",), ("s", "z"))
WORK = WorkGraph(
    (A, B, C),
    (Storage("x"), Storage("y", Lifetime.RESULT), Storage("s", Lifetime.STATE), Storage("z", Lifetime.RESULT)),
)


@pytest.mark.parametrize(
    ("made", "fault", "says"),
    [
        (Schedule((("a", "b"),)), ScheduleErrorKind.MISSING, "c is in no lane."),
        (Schedule((("a", "b"), ("c", "b"))), ScheduleErrorKind.DUPLICATE, "b is run 2 times."),
        (
            Schedule((("a", "b", "c", "d"),)),
            ScheduleErrorKind.UNKNOWN,
            "Lane 0 runs d, which is not a task of the work.",
        ),
        (
            Schedule((("a", "b", "c"),), (Event("a", "d"),)),
            ScheduleErrorKind.UNKNOWN,
            "The event a -> d names d, which is not a task of the work.",
        ),
        (
            Schedule((("a", "b", "c"),), (), ("w",)),
            ScheduleErrorKind.UNKNOWN,
            "w is recorded, but is not a storage of the work.",
        ),
        (
            Schedule((("a", "b"), ("c",)), (Event("c", "a"), Event("b", "c"))),
            ScheduleErrorKind.DEADLOCK,
            "The lanes wait for each other: a waits for c, c waits for b, b waits for a.",
        ),
        (
            Schedule((("a", "b", "c"),), (Event("a", "a"),)),
            ScheduleErrorKind.DEADLOCK,
            "The lanes wait for each other: a waits for a.",
        ),
        (Schedule(()), ScheduleErrorKind.MISSING, "a is in no lane.\nb is in no lane.\nc is in no lane."),
    ],
)
def test_schedules_that_are_none(made: Schedule, fault: ScheduleErrorKind, says: str) -> None:
    found = check_schedule(WORK, made)
    assert {flaw.kind for flaw in found.errors} == {fault}
    assert not found.ok
    assert str(found) == says


def test_no_lanes_are_enough_for_no_tasks() -> None:
    assert check_schedule(WorkGraph((), ()), Schedule(())).ok


def test_fixed_tasks_stay() -> None:
    first, second = Task("first", is_fixed=True), Task("second", is_fixed=True)
    work = WorkGraph((first, Task("other"), second), ())
    assert check_schedule(work, Schedule((("first", "second"), ("other",)))).ok
    found = check_schedule(work, Schedule((("second", "first"), ("other",))))
    assert str(found) == "first and second are fixed and must stay in this order."
    found = check_schedule(work, Schedule((("first", "other"), ("second",))))
    assert str(found) == "second is fixed and must be in lane 0."


def test_memory_is_reused_too_early() -> None:
    """The reader is in order with the writer, and still reads memory that its home has given to another task."""
    tasks = Task("make", (), ("x",)), Task("read", ("x",), ("y",)), Task("next", (), ("z",))
    work = WorkGraph(tasks, (Storage("x"), Storage("y", Lifetime.RESULT), Storage("z", Lifetime.RESULT)))
    made = Schedule((("make", "next"), ("read",)), (Event("make", "read"),))
    (race,) = check_schedule(work, made).races
    assert (race.kind, race.first, race.second, race.storage) == (ConflictKind.REUSE, "read", "next", "x")
    assert str(race) == ("next may reuse the memory of x while read uses it. Add the event read -> next, or record x.")
    assert check_schedule(work, replace(made, recorded_storages=("x",))).ok
    assert check_schedule(work, replace(made, events=(*made.events, race.missing_event))).ok
    kept = WorkGraph(tasks, (Storage("x", Lifetime.INPUT), *work.storages[1:]))
    assert check_schedule(kept, made).ok, "what the caller owns is not given away"
