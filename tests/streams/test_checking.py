"""The checker against every way in which small programs can be run; schedules that are none; what it says."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from brute import Truth, all_orders, races
from generated import random_any, random_program, random_right

from inlay.streams import (
    Conflict,
    Event,
    Fault,
    Life,
    Schedule,
    Storage,
    Task,
    Verdict,
    Work,
    check,
    in_order,
    schedule,
    work_of_program,
)

if TYPE_CHECKING:
    from inlay.program import Program

pytestmark = pytest.mark.fast
PROGRAMS, DELETIONS = 200, 2000


def _program(seed: int) -> tuple[random.Random, Program, Truth]:
    rng = random.Random(seed)
    return rng, *random_program(rng, rng.randrange(5, 8))


def _measured(rng: random.Random, program: Program) -> Work:
    names = [task.name for task in work_of_program(program).tasks]
    return work_of_program(program, {name: rng.uniform(1e-5, 1e-3) for name in names})


def _right(rng: random.Random, work: Work, truth: Truth) -> Schedule:
    """A schedule at random that is right. Where memory would be reused too early it waits, or records the storage."""
    lanes, events = random_right(rng, truth, rng.choice((2, 3)))
    made = Schedule(lanes, tuple(Event(*event) for event in events))
    while found := check(work, made).races:
        if rng.random() < 0.8:
            made = replace(made, events=(*made.events, found[0].missing))
        else:
            made = replace(made, recorded=(*made.recorded, found[0].storage))
    return made


def _races(truth: Truth, made: Schedule) -> bool:
    return races(truth, made.lanes, tuple((event.after, event.before) for event in made.events), made.recorded)


def test_no_false_alarm() -> None:
    lanes = 0
    for seed in range(PROGRAMS):
        rng, program, truth = _program(seed)
        work = _measured(rng, program)
        ours = schedule(work, lanes=rng.choice((2, 3)), event_seconds=1e-6)
        lanes += len(ours.lanes)
        for made in (in_order(work), ours, _right(rng, work, truth)):
            assert not _races(truth, made)
            assert check(work, made) == Verdict()
    assert lanes > 1.5 * PROGRAMS, "most programs stay in one lane, and prove little"


def test_every_deleted_event_is_judged() -> None:
    """A deletion that some run can tell is reported, and one that none can is accepted."""
    judged = {True: 0, False: 0}
    reused = 0
    for seed in range(10**6):
        rng, program, truth = _program(seed)
        work = work_of_program(program)
        made = _right(rng, work, truth)
        assert not _races(truth, made)
        for event in made.events:
            without = replace(made, events=tuple(each for each in made.events if each != event))
            found = check(work, without)
            assert bool(found.races) == _races(truth, without), f"seed {seed}, without {event}"
            assert not found.flaws
            judged[not found.ok] += 1
            reused += {race.kind for race in found.races} == {Conflict.REUSE}
        if sum(judged.values()) >= DELETIONS and seed >= PROGRAMS:
            break
    assert min(judged.values()) > DELETIONS / 4, judged
    assert reused > 20, "reuse of memory is hardly ever all that is wrong"


def test_any_schedule_is_judged() -> None:
    """Schedules written at random: the checker knows which are right, which are not, and which never end."""
    judged = {"right": 0, "race": 0, "deadlock": 0}
    for seed in range(1500):
        rng, program, truth = _program(seed)
        work = work_of_program(program)
        lanes, events = random_any(rng, truth, rng.choice((1, 2, 3)))
        made = Schedule(lanes, tuple(Event(*event) for event in events))
        found = check(work, made)
        ends = any(True for _ in all_orders(lanes, events))
        assert {flaw.fault for flaw in found.flaws} == (set() if ends else {Fault.DEADLOCK})
        if ends:
            assert bool(found.races) == _races(truth, made), f"seed {seed}"
        judged["deadlock" if not ends else "race" if found.races else "right"] += 1
    assert min(judged.values()) > 50, judged


def test_what_is_reported_is_what_is_wrong() -> None:
    """The two tasks of a race change places in some runs, or are always the wrong way round; the event helps."""
    seen = set()
    for seed in range(300):
        rng, program, truth = _program(seed)
        work = work_of_program(program)
        lanes, events = random_any(rng, truth, 2)
        made = Schedule(lanes, tuple(Event(*event) for event in events))
        orders = list(all_orders(lanes, events))
        found = check(work, made).races if orders else ()
        for race in found:
            first = {order.index(race.first) < order.index(race.second) for order in orders}
            assert first == ({False} if race.reversed else {True, False})
            if not race.reversed:
                after = check(work, replace(made, events=(*made.events, race.missing)))
                assert not [each for each in after.races if each == race]
            seen.add((race.kind, race.reversed))
    assert seen == {(kind, turned) for kind in Conflict for turned in (True, False)} - {(Conflict.REUSE, True)}


A, B, C = Task("a", (), ("x",)), Task("b", ("x",), ("y",)), Task("c", ("s",), ("s", "z"))
WORK = Work((A, B, C), (Storage("x"), Storage("y", Life.RESULT), Storage("s", Life.STATE), Storage("z", Life.RESULT)))


@pytest.mark.parametrize(
    ("made", "fault", "says"),
    [
        (Schedule((("a", "b"),)), Fault.MISSING, "c is in no lane."),
        (Schedule((("a", "b"), ("c", "b"))), Fault.TWICE, "b is run 2 times."),
        (Schedule((("a", "b", "c", "d"),)), Fault.UNKNOWN, "Lane 0 runs d, which is no task of the work."),
        (
            Schedule((("a", "b", "c"),), (Event("a", "d"),)),
            Fault.UNKNOWN,
            "The event a -> d names d, which is no task of the work.",
        ),
        (Schedule((("a", "b", "c"),), (), ("w",)), Fault.UNKNOWN, "w is recorded, and is no storage of the work."),
        (
            Schedule((("a", "b"), ("c",)), (Event("c", "a"), Event("b", "c"))),
            Fault.DEADLOCK,
            "The lanes wait for each other: a waits for c, c waits for b, b waits for a.",
        ),
        (
            Schedule((("a", "b", "c"),), (Event("a", "a"),)),
            Fault.DEADLOCK,
            "The lanes wait for each other: a waits for a.",
        ),
        (Schedule(()), Fault.MISSING, "a is in no lane.\nb is in no lane.\nc is in no lane."),
    ],
)
def test_schedules_that_are_none(made: Schedule, fault: Fault, says: str) -> None:
    found = check(WORK, made)
    assert {flaw.fault for flaw in found.flaws} == {fault}
    assert not found.ok
    assert str(found) == says


def test_no_lanes_are_enough_for_no_tasks() -> None:
    assert check(Work((), ()), Schedule(())).ok


def test_fixed_tasks_stay() -> None:
    first, second = Task("first", fixed=True), Task("second", fixed=True)
    work = Work((first, Task("other"), second), ())
    assert check(work, Schedule((("first", "second"), ("other",)))).ok
    found = check(work, Schedule((("second", "first"), ("other",))))
    assert str(found) == "first and second are fixed and have changed places."
    found = check(work, Schedule((("first", "other"), ("second",))))
    assert str(found) == "second is fixed and must be in lane 0."


def test_memory_is_reused_too_early() -> None:
    """The reader is in order with the writer, and still reads memory that its home has given to another task."""
    tasks = Task("make", (), ("x",)), Task("read", ("x",), ("y",)), Task("next", (), ("z",))
    work = Work(tasks, (Storage("x"), Storage("y", Life.RESULT), Storage("z", Life.RESULT)))
    made = Schedule((("make", "next"), ("read",)), (Event("make", "read"),))
    (race,) = check(work, made).races
    assert (race.kind, race.first, race.second, race.storage) == (Conflict.REUSE, "read", "next", "x")
    assert str(race) == (
        "next may be given the memory of x while read uses it: add the event read -> next, or record x."
    )
    assert check(work, replace(made, recorded=("x",))).ok
    assert check(work, replace(made, events=(*made.events, race.missing))).ok
    kept = Work(tasks, (Storage("x", Life.GIVEN), *work.storages[1:]))
    assert check(kept, made).ok, "what the caller owns is not given away"
