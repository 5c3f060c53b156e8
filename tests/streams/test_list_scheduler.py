"""Schedules of our own: as short as they can be, with no event too many, and the same whenever they are made."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from inlay.errors import PackageError, ProgramError, UsageError
from inlay.streams import (
    ConflictKind,
    Event,
    Lifetime,
    Schedule,
    Storage,
    Task,
    WorkGraph,
    build_work,
    check_schedule,
    cross_lane_edges,
    group_tasks,
    merge_between_events,
    plan_schedule,
    predict_times,
    reduce_events,
    serial_schedule,
)
from tests.streams.brute_force import all_orders, races
from tests.streams.large_work import decoder
from tests.streams.random_programs import random_program

pytestmark = pytest.mark.fast


def _end(work: WorkGraph, made: Schedule, event_seconds: float = 0.0) -> float:
    return max(end for _, end in predict_times(work, made, event_seconds).values())


def _branches(*seconds: float, **fixed: bool) -> WorkGraph:
    """One task after which so many branches can run, and one that waits for all of them."""
    names = [f"b{place}" for place, _ in enumerate(seconds)]
    branches = [
        Task(name, ("x",), (f"{name}.y",), time, fixed.get(name, False))
        for name, time in zip(names, seconds, strict=True)
    ]
    outs = tuple(f"{name}.y" for name in names)
    tasks = (Task("fork", (), ("x",), 1.0), *branches, Task("join", outs, ("z",), 1.0))
    return WorkGraph(tasks, (Storage("x"), *map(Storage, outs), Storage("z", Lifetime.RESULT)))


def test_two_branches() -> None:
    work = _branches(4, 4)
    made = plan_schedule(work, lanes=2, event_seconds=0.5)
    assert str(made) == "lane 0: fork b0\nlane 1: [fork] b1 [b0] join"
    assert predict_times(work, made, 0.5) == {"fork": (0, 1), "b0": (1, 5), "b1": (1.5, 5.5), "join": (5.5, 6.5)}
    assert check_schedule(work, made).ok


def test_the_longest_way_comes_first() -> None:
    work = _branches(1, 2, 5, 2)
    made = plan_schedule(work, lanes=2, event_seconds=0.0)
    assert _end(work, made) == 7
    assert _end(work, plan_schedule(work, lanes=3, event_seconds=0.0)) == 7
    assert [len(tasks) for tasks in plan_schedule(work, lanes=9, event_seconds=0.0).lanes] == [3, 1, 1, 1]


@pytest.mark.parametrize(("event_seconds", "lanes"), [(1.9, 2), (2.0, 1), (9.0, 1)])
def test_lanes_that_do_not_pay_are_not_used(event_seconds: float, lanes: int) -> None:
    """The branch that moves saves 2 seconds, and begins an event later; the last task waits where it is."""
    work = _branches(2, 2)
    assert len(plan_schedule(work, lanes=2, event_seconds=event_seconds).lanes) == lanes


def test_fixed_tasks_are_not_moved() -> None:
    work = _branches(4, 4, 4, b0=True, b1=True)
    made = plan_schedule(work, lanes=2, event_seconds=0.0)
    assert [name for name in made.lanes[0] if name in ("b0", "b1")] == ["b0", "b1"]
    assert made.lane_of["b2"] == 1


def test_what_cannot_be_planned() -> None:
    with pytest.raises(UsageError, match=r"The duration of make was not measured\. Measure it"):
        plan_schedule(WorkGraph((Task("make"),), ()), event_seconds=0.0)
    with pytest.raises(UsageError, match="The duration of make was not measured"):
        group_tasks(WorkGraph((Task("make"),), ()), 1e-5)
    with pytest.raises(UsageError, match="0 lanes"):
        plan_schedule(_branches(1, 1), lanes=0, event_seconds=0.0)
    with pytest.raises(UsageError, match="wait for each other"):
        reduce_events(Schedule((("a",), ("b",)), (Event("a", "b"), Event("b", "a"))))
    assert plan_schedule(WorkGraph((), ()), event_seconds=0.0) == Schedule(((),))


def test_no_event_is_too_many() -> None:
    """Without any one of its events a schedule of ours is wrong, by every way in which it can be run."""
    tried = 0
    for seed in range(200):
        rng = random.Random(seed)
        program, truth = random_program(rng, 7)
        names = [task.name for task in build_work(program).tasks]
        work = build_work(program, {name: rng.uniform(1e-5, 1e-3) for name in names})
        made = plan_schedule(work, lanes=3, event_seconds=0.0)
        events = [(event.after, event.before) for event in made.events]
        for event in events:
            left = tuple(each for each in events if each != event)
            assert races(truth, made.lanes, left, made.recorded_storages)
            tried += 1
        for storage in made.recorded_storages:
            others = tuple(each for each in made.recorded_storages if each != storage)
            assert races(truth, made.lanes, tuple(events), others)
    assert tried > 150


def test_reduction_keeps_the_order() -> None:
    """The same runs are possible with fewer events."""
    fewer = 0
    for seed in range(100):
        rng = random.Random(seed)
        names = [f"t{place}" for place in range(7)]
        where = {name: rng.randrange(3) for name in names}
        lanes = tuple(tuple(name for name in names if where[name] == lane) for lane in range(3))
        pairs = [(one, two) for place, two in enumerate(names) for one in names[:place] if rng.random() < 0.5]
        made = Schedule(lanes, tuple(Event(*pair) for pair in pairs))
        less = reduce_events(made)
        fewer += len(made.events) - len(less.events)
        orders = set(all_orders(lanes, tuple(pairs)))
        assert set(all_orders(lanes, tuple((each.after, each.before) for each in less.events))) == orders
        for event in less.events:
            left = tuple((each.after, each.before) for each in less.events if each != event)
            assert set(all_orders(lanes, left)) != orders
    assert fewer > 500


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_a_decoder(lanes: int) -> None:
    work = decoder(300)
    made = plan_schedule(work, lanes=lanes, event_seconds=1e-6)
    assert check_schedule(work, made).ok
    assert _end(work, made, 1e-6) < 0.75 * work.seconds
    assert len(made.events) < 0.9 * len(cross_lane_edges(work, made))
    assert made == plan_schedule(work, lanes=lanes, event_seconds=1e-6)
    for event in made.events[::7]:
        assert check_schedule(work, replace(made, events=tuple(each for each in made.events if each != event))).races


def test_pieces_mean_the_same() -> None:
    """A schedule of pieces, written out in operators, is right for the operators.

    Memory is given back between pieces only, so a piece that uses a storage is not given it.
    """
    spread = 0
    for seed in range(200):
        rng = random.Random(seed)
        program, _ = random_program(rng, 40)
        names = [task.name for task in build_work(program).tasks]
        work = build_work(program, {name: rng.choice((1e-6, 1e-6, 1e-4)) for name in names})
        pieces = group_tasks(work, 2e-5)
        assert sorted(each for piece in pieces.tasks for each in piece.calls) == sorted(names)
        assert pieces.seconds == pytest.approx(work.seconds)
        assert check_schedule(work, _in_calls(pieces, serial_schedule(pieces))).ok
        made = plan_schedule(pieces, lanes=2, event_seconds=0.0)
        for each, lanes in ((pieces, made), merge_between_events(pieces, made)):
            assert check_schedule(each, lanes).ok
            assert sorted(call for piece in each.tasks for call in piece.calls) == sorted(names)
            owner = {call: piece for piece in each.tasks for call in piece.calls}
            for race in check_schedule(work, _in_calls(each, lanes)).races:
                piece = owner[race.second]
                assert race.kind is ConflictKind.REUSE
                assert race.storage in (*piece.reads, *piece.writes)
        spread += len(made.lanes) > 1
    assert spread > 100


def test_lanes_in_the_fewest_tasks() -> None:
    work = decoder(300)
    made = plan_schedule(work, lanes=3, event_seconds=1e-6)
    fewer, lanes = merge_between_events(work, made)
    assert len(fewer) < 0.6 * len(work)
    assert len(lanes.events) == len(made.events)
    for tasks in lanes.lanes:
        assert all(one in lanes.recording_tasks or two in lanes.waits for one, two in pairwise(tasks))
    assert merge_between_events(fewer, lanes) == (fewer, lanes)
    fixed = replace(work, tasks=tuple(replace(task, is_fixed=True) for task in work.tasks))
    assert merge_between_events(fixed, serial_schedule(fixed)) == (fixed, serial_schedule(fixed))


def _in_calls(pieces: WorkGraph, made: Schedule) -> Schedule:
    """Each piece replaced by its calls: an event is recorded after the last one and waited for before the first."""
    lanes = tuple(tuple(call for name in lane for call in pieces[name].calls) for lane in made.lanes)
    events = tuple(Event(pieces[each.after].calls[-1], pieces[each.before].calls[0]) for each in made.events)
    return Schedule(lanes, events, made.recorded_storages)


def test_small_tasks_join() -> None:
    work = decoder(300)
    small = replace(work, tasks=tuple(replace(task, seconds=1e-6) for task in work.tasks))
    assert len(group_tasks(small, 2e-6)) < len(group_tasks(work, 0.0)) < len(work)
    assert len(group_tasks(work, 1.0)) < len(group_tasks(work, 1e-4))
    fixed = replace(small, tasks=tuple(replace(task, is_fixed=True) for task in small.tasks))
    assert group_tasks(fixed, 2e-6) == fixed


def test_values_are_saved_and_compared() -> None:
    work = decoder(40)
    made = plan_schedule(work, lanes=2, event_seconds=1e-6)
    assert made.recorded_storages
    assert Schedule.from_json(made.to_json()) == made
    assert Schedule.from_json(made.to_json().encode()).to_json() == made.to_json()
    assert WorkGraph.from_json(work.to_json()) == work
    assert hash(made) == hash(Schedule.from_json(made.to_json()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"lanes": 1}',
        '{"lanes": [["a"]], "events": [["a", "b"]]}',
        '{"lanes": [], "more": 1}',
        '{"lanes": [[1]]}',
    ],
)
def test_what_is_no_schedule(text: str) -> None:
    with pytest.raises(PackageError, match="The JSON is not a valid schedule"):
        Schedule.from_json(text)


def test_what_is_no_work() -> None:
    with pytest.raises(ProgramError, match="more than one task a"):
        WorkGraph((Task("a"), Task("a")), ())
    with pytest.raises(ProgramError, match="a accesses x, which is not a storage"):
        WorkGraph((Task("a", ("x",)),), ())
    with pytest.raises(PackageError, match="The JSON is not a valid work graph"):
        WorkGraph.from_json('{"tasks": [{"name": "a", "reads": ["x"]}], "storages": []}')
