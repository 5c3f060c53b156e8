"""Timelines: what they say of a run, as numbers, as a trace for Perfetto, and as a picture."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from inlay.errors import PackageError
from inlay.streams import Event, Schedule, ScheduledExecution, TaskRun, Timeline, WorkerThreads
from inlay.streams.timeline_svg import draw_timeline
from tests.streams.test_workers import LANES, TAKES, bound_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.fast
SVG = "{http://www.w3.org/2000/svg}"
KNOWN = Timeline(
    (
        TaskRun("a", 0, 0.0, 0.0, 3.0),
        TaskRun("d", 0, 3.0, 6.0, 8.0),
        TaskRun("b", 1, 0.0, 1.0, 2.0),
        TaskRun("c", 1, 2.0, 3.0, 6.0),
    ),
    (Event("a", "c"), Event("c", "d")),
)


def sleeping(seconds: float) -> Callable[[list[Any]], list[Any]]:
    def call(values: list[Any]) -> list[Any]:
        time.sleep(seconds)
        return [None]

    return call


@pytest.fixture(scope="module")
def executed() -> Timeline:
    bound = bound_of(TAKES, {name: sleeping(0.05) for name in TAKES}, ("c", "g"))
    with WorkerThreads(3) as lanes:
        return ScheduledExecution(bound, LANES, lanes).run_timed({})[1]


def test_figures_of_a_run_that_is_known() -> None:
    assert KNOWN.lane_count == 2
    assert KNOWN.seconds == 8
    assert KNOWN.busy_seconds == 9
    assert KNOWN.wait_seconds == 3 + 1 + 1
    assert KNOWN.overlap_share == pytest.approx(1 / 8)
    assert KNOWN.critical_path == ("a", "c", "d")
    assert str(KNOWN) == "8.000 s; 12 % of the time two lanes or more ran; 5.000 s lost waiting"


def test_nothing_ran() -> None:
    empty = Timeline(())
    assert (empty.seconds, empty.overlap_share, empty.wait_seconds, empty.critical_path, empty.lane_count) == (
        0,
        0,
        0,
        (),
        0,
    )
    ElementTree.fromstring(draw_timeline(empty, "nothing"))


def test_three_lanes_at_once_count_once() -> None:
    three = Timeline(tuple(TaskRun(name, lane, 0.0, 0.0, 2.0) for lane, name in enumerate("abc")))
    assert three.overlap_share == 1
    assert three.busy_seconds == 6


def test_what_was_run_is_told(executed: Timeline) -> None:
    """Every task once, in its lane and in its order; nothing before what it waits for."""
    assert {each.task: each.lane for each in executed.runs} == dict(LANES.lane_of)
    for tasks in LANES.lanes:
        for one, two in pairwise(tasks):
            assert executed.by_task[one].end <= executed.by_task[two].wait_begin
    for event in LANES.events:
        assert executed.by_task[event.after].end <= executed.by_task[event.before].begin
    assert all(0 <= each.wait_begin <= each.begin <= each.end for each in executed.runs)
    assert min(each.wait_begin for each in executed.runs) == 0


def test_lanes_that_sleep_overlap(executed: Timeline) -> None:
    """Seven tasks that sleep, some of them at the same time."""
    assert executed.overlap_share > 0
    assert executed.critical_path[-1] in ("c", "g")


def test_a_lane_that_waits_is_seen() -> None:
    slow = bound_of({"a": (), "b": ("a",)}, {"a": sleeping(0.05), "b": sleeping(0)}, ("b",))
    with WorkerThreads(2) as lanes:
        _, timeline = ScheduledExecution(slow, Schedule((("a",), ("b",)), (Event("a", "b"),)), lanes).run_timed({})
    assert timeline.by_task["b"].wait_seconds > 0
    assert timeline.wait_seconds == pytest.approx(
        timeline.by_task["b"].wait_seconds + timeline.by_task["a"].wait_seconds
    )
    assert timeline.overlap_share == 0
    assert timeline.critical_path == ("a", "b")


def test_saved_and_read_again(executed: Timeline) -> None:
    assert Timeline.from_json(executed.to_json()) == executed
    with pytest.raises(PackageError, match="The JSON is not a valid timeline"):
        Timeline.from_json('{"runs": 3}')


def test_the_trace_is_what_perfetto_reads(executed: Timeline) -> None:
    """Complete events with times in microseconds, names of lanes, and a flow that begins and ends inside slices."""
    events = json.loads(executed.trace())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "lane 0", 1: "lane 1", 2: "lane 2"}
    tasks = {event["name"]: event for event in events if event["ph"] == "X" and event["cat"] == "task"}
    assert set(tasks) == set(TAKES)
    for name, event in tasks.items():
        assert event["tid"] == LANES.lane_of[name]
        assert event["dur"] == pytest.approx(1e6 * executed.by_task[name].seconds)
    assert {name for name, event in tasks.items() if event["args"]["critical"]} == set(executed.critical_path)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == len(ends) == len(LANES.events)
    for number, event in enumerate(LANES.events):
        for flow, name in ((starts[number], event.after), (ends[number], event.before)):
            task = tasks[name]
            assert flow["tid"] == task["tid"]
            assert task["ts"] <= flow["ts"] <= task["ts"] + task["dur"]
        assert starts[number]["ts"] <= ends[number]["ts"]
    waits = [event for event in events if event.get("cat") == "wait"]
    assert {event["args"]["for"] for event in waits} == {event.before for event in LANES.events}


def test_the_picture_shows_all_of_it() -> None:
    picture = ElementTree.fromstring(draw_timeline(KNOWN, "Two lanes & one <event>"))
    assert picture.find(f"{SVG}title").text == "Two lanes & one <event>"  # type: ignore[union-attr]
    tasks = [each for each in picture.iter(f"{SVG}rect") if each.get("class") == "task"]
    told = [each.findtext(f"{SVG}title", "") for each in tasks]
    assert told[3] == "c: 3.000 s from 3.000 s, waited 1.000 s"
    assert len(tasks) == 4
    assert len({each.get("y") for each in tasks}) == 2
    colours = {name[0]: each.get("fill") for name, each in zip(told, tasks, strict=True)}
    assert colours["a"] == colours["c"] == colours["d"] != colours["b"]
    widths = [float(each.get("width") or 0) for each in tasks]
    assert widths[0] == pytest.approx(3 * widths[2], rel=0.02)
    arrows = [each for each in picture.iter(f"{SVG}path") if each.get("class") == "event"]
    assert [each.find(f"{SVG}title").text for each in arrows] == ["a -> c", "c -> d"]  # type: ignore[union-attr]
    assert len([each for each in picture.iter(f"{SVG}path") if each.get("class") == "wait"]) == 3
    words = [each.text for each in picture.iter(f"{SVG}text")]
    assert {"lane 0", "lane 1", "a", "b", "c", "d", str(KNOWN)} <= set(words)


def test_long_names_are_cut_to_their_bars() -> None:
    name = "a_task_with_a_very_long_name" * 10
    drawn = ElementTree.fromstring(draw_timeline(Timeline((TaskRun(name, 0, 0.0, 0.0, 1.0),)), "long"))
    shown = [each.text or "" for each in drawn.iter(f"{SVG}text")]
    assert any(each.endswith("…") and len(each) < 140 for each in shown)
    short = Timeline((TaskRun("long_name", 0, 0.0, 0.0, 1e-6), TaskRun("rest", 0, 1e-6, 1e-6, 1.0)))
    assert "long_name" not in [
        each.text for each in ElementTree.fromstring(draw_timeline(short, "x")).iter(f"{SVG}text")
    ]
