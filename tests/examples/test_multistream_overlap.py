"""The example of independent branches: what it prints, what it writes, and that it notices what is wrong."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from inlay.lowering.executable import BoundStep
from inlay.streams import BoundWork, Timeline, overlap_comparison
from inlay.streams.bound_work import bind_program
from tests.examples.test_examples import load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.fast
SMALL = ("--width", "64", "--tokens", "16", "--rounds", "2")


@pytest.fixture(scope="module")
def example() -> Any:
    return load("multistream_overlap")


def test_branches(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two equal branches, twice, in two lanes. How much faster that is depends on the machine: see
    tools/benchmarks/lanes.
    """
    trace, picture, saved = tmp_path / "trace.json", tmp_path / "picture.svg", tmp_path / "timeline.json"
    files = ["--trace", str(trace), "--picture", str(picture), "--timeline", str(saved)]
    assert example.main(["--rounds", "5", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 lanes, 3 events" in lines[0]
    assert "yes  the schedule has no race" in lines
    assert "yes  the results are bitwise equal to one lane" in lines
    told = json.loads(lines[-1])
    assert set(told) == {"overlapped_over_serial", "trace"}
    assert told["overlapped_over_serial"] > 0
    assert told["trace"] == str(trace)
    assert {event["tid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}
    assert Timeline.from_json(saved.read_bytes()).lane_count == 2
    assert ElementTree.fromstring(picture.read_text()).get("width") == "960"


@pytest.mark.parametrize("layer", ["experts", "parallel"])
def test_stock_layers(example: Any, layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--layer", layer, *SMALL, "--trace", str(tmp_path / "trace.json")]) == 0
    assert "yes  the results are bitwise equal to one lane" in capsys.readouterr().out


def test_other_numbers_are_noticed(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, calls = bind_program, count()

    def drifting(program: Any, work: Any) -> BoundWork:
        bound = whole(program, work)
        last = work.tasks[-1].name
        step = bound.steps[last]

        def call(values: list[Any]) -> list[Any]:
            return [each + next(calls) for each in step.run(values)]

        return BoundWork(work, {**bound.steps, last: BoundStep(call, step.ins, step.outs)}, bound.results)

    monkeypatch.setattr(overlap_comparison, "bind_program", drifting)
    assert example.main([*SMALL, "--trace", str(tmp_path / "trace.json")]) == 1
    assert "NO   the results are bitwise equal to one lane" in capsys.readouterr().out


def test_help(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    text = capsys.readouterr().out
    assert "python examples/multistream_overlap.py" in text
    assert "--layer {branches,experts,parallel}" in text
