"""`inlay streams` as a person runs it: the table, the files, and a schedule that somebody changed."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from inlay import Example
from inlay.cli.main import app
from inlay.cli.streams import build_inputs, choose_sizes
from inlay.frontend import capture
from inlay.lowering.state.buffers import lift_mutated_buffers
from inlay.lowering.state.in_place_writes import write_in_place
from inlay.streams import (
    OverlapComparison,
    Schedule,
    Timeline,
    WorkGraph,
    check_schedule,
    compare_lanes,
    overlap_comparison,
    plan_overlap,
)
from inlay.streams.bound_work import bind_program
from inlay.testing import program_of
from tests.models import config_folder, llama_folder

if TYPE_CHECKING:
    from typer.testing import Result

    from inlay.program import Program
    from inlay.streams import BoundWork

pytestmark = pytest.mark.fast
TESTS = Path(__file__).parents[1]
FEW = ("--rounds", "2")


def _inlay(*arguments: str, check: int = 0) -> Result:
    with contextlib.chdir(TESTS):
        run = CliRunner().invoke(app, ["streams", *arguments], env={"COLUMNS": "120"})
    assert run.exit_code == check, run.output
    assert "Traceback" not in run.stderr
    return run


class Filling(torch.nn.Module):
    """Two branches and a cache that is full after two calls: the next one fails."""

    cache: torch.Tensor
    filled: torch.Tensor

    def __init__(self, rows: int = 4, width: int = 256) -> None:
        super().__init__()
        self.left, self.right = (torch.nn.Linear(width, width) for _ in range(2))
        self.register_buffer("cache", torch.zeros(2 * rows, width))
        self.register_buffer("filled", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, self.filled + torch.arange(x.shape[0]), x)
        self.filled.add_(x.shape[0])
        return self.left(x).tanh() * self.right(x).tanh() + self.cache.sum(0)


def filling() -> Example:
    torch.manual_seed(0)
    return Example(Filling(), (torch.randn(4, 256),))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A small Llama, wide enough for two lanes to be planned, and what the verb said of it."""
    folder = tmp_path_factory.mktemp("streams")
    sizes = {"hidden_size": 512, "intermediate_size": 2048}
    llama = llama_folder(folder / "llama", num_hidden_layers=1, **sizes)
    return folder / "out", _inlay(str(llama), *FEW, "-o", str(folder / "out"))


def test_a_folder(written: tuple[Path, Result]) -> None:
    lines = written[1].stdout.splitlines()
    assert lines[0].endswith("llama; inputs: batch 1, length 128")
    assert lines[2].split("  ")[:3] == ["operators", "pieces", "lanes"]
    assert "events ÷ edges  recorded  planned ÷ in order" in lines[2]
    operators, pieces, lanes, *_ = map(int, lines[3].split()[:5])
    assert operators > pieces > lanes == 2
    assert "The schedule has no race. Results and states are identical to those of one lane." in lines
    for way in ("one lane ", "2 lanes ", "one lane with 2 intra-op threads "):
        assert any(line.startswith(way) for line in lines)
    assert "Time relative to one lane: 2 lanes × " in lines[-1]
    assert "wrote work.json, schedule.json, trace.json, timeline.json, lanes.svg" in written[1].stderr


def test_what_is_written_parses_back(written: tuple[Path, Result]) -> None:
    folder = written[0]
    work = WorkGraph.from_json((folder / "work.json").read_bytes())
    made = Schedule.from_json((folder / "schedule.json").read_bytes())
    assert check_schedule(work, made).ok
    timeline = Timeline.from_json((folder / "timeline.json").read_bytes())
    assert {each.task for each in timeline.runs} == {task.name for task in work.tasks}
    assert timeline.events == made.events
    assert {event["tid"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]} == {0, 1}
    assert ElementTree.fromstring((folder / "lanes.svg").read_text()).get("width") == "960"
    assert _inlay("--check", str(folder)).stdout == "no race\n"


def test_an_event_that_is_gone_is_a_race(written: tuple[Path, Result]) -> None:
    saved = json.loads((written[0] / "schedule.json").read_text())
    gone = saved["events"].pop()
    changed = written[0] / "changed.json"
    changed.write_text(json.dumps(saved))
    text = _inlay("--check", str(changed), check=1).stdout
    assert f"{gone['before']} does not wait for {gone['after']}. Add the event" in text
    told = json.loads(_inlay("--check", str(changed), "--json", check=1).stdout)
    assert (told["ok"], told["flaws"]) == (False, [])
    assert told["races"] == text.splitlines()


def test_json_of_a_factory() -> None:
    told = json.loads(_inlay("models:convolutions", "--json", "--length", "16", *FEW).stdout)
    assert told["sizes"] == {"batch": 1, "frames": 16}
    assert (told["plan"]["operators"], told["bit_for_bit"]) == (27, True)
    assert told["plan"]["pieces"] >= told["plan"]["lanes"] >= 1
    assert set(told["plan"]) >= {"edges", "events", "events_over_edges", "recorded", "planned_over_in_order"}
    assert told["seconds"]["one lane"]["over_one_lane"] == 1
    assert told["pays"] in (True, False, None)
    assert told["says"].startswith(("Lanes are faster here", "Lanes are not faster here", "The result is inconclusive"))


def test_a_factory_with_state() -> None:
    """A counter of the module, a cache of the caller."""
    told = json.loads(_inlay("models:branch", "--json", *FEW).stdout)
    assert (told["sizes"], told["bit_for_bit"]) == ({"batch": 1}, True)


def test_states_begin_anew() -> None:
    """Every run begins with the states that the first began with: a cache that is full after two calls stays usable."""
    program = write_in_place(lift_mutated_buffers(capture(filling()))).program
    given = build_inputs(program, choose_sizes(program, 4))
    plan = plan_overlap(program, given, event_seconds=1e-7)
    assert len(plan.schedule.lanes) == 2
    compared = compare_lanes(plan, given, rounds=3)
    assert compared.is_identical
    assert {len(each) for each in compared.seconds.values()} == {3}
    assert given["b_filled"].tolist() == [0]
    plan.bound_work(given)
    plan.bound_work(given)
    with pytest.raises(IndexError):
        plan.bound_work(given)


def test_random_numbers_are_the_same_in_every_way() -> None:
    noisy = program_of(lambda x: (torch.rand_like(x) @ x) * (x @ torch.rand_like(x)), [torch.ones(64, 64)])
    given = {"values_0": torch.ones(64, 64)}
    plan = plan_overlap(noisy, given, event_seconds=1e-7)
    assert compare_lanes(plan, given, rounds=2).is_identical
    assert not torch.equal(plan.bound_work(given)[0], plan.bound_work(given)[0])


def test_other_numbers_are_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = bind_program, count()

    def drifting(program: Program, work: WorkGraph) -> BoundWork:
        bound, last = whole(program, work), work.tasks[-1].name
        step = bound.steps[last]
        other = replace(step, run=lambda values: [each + next(calls) for each in step.run(values)])
        return replace(bound, steps={**bound.steps, last: other})

    monkeypatch.setattr(overlap_comparison, "bind_program", drifting)
    assert "Results and states differ from those of one lane" in _inlay("models:convolutions", *FEW, check=1).stdout


@pytest.mark.parametrize(
    ("lanes", "threads", "pays", "says"),
    [
        (0.6, 0.8, True, "Lanes are faster here. Time relative to one lane: 2 lanes × 0.60, threads × 0.80."),
        (0.6, 0.5, False, "Lanes are not faster here. Time relative to one lane: 2 lanes × 0.60, threads × 0.50."),
        (1.1, 1.2, False, "Lanes are not faster here. Time relative to one lane: 2 lanes × 1.10, threads × 1.20."),
    ],
)
def test_whether_lanes_pay(lanes: float, threads: float, pays: bool, says: str) -> None:
    seconds = {"one lane": [1.0, 2.0], "2 lanes": [lanes, 2 * lanes], "threads": [threads, 2 * threads]}
    compared = OverlapComparison(True, seconds, "2 lanes", Timeline(()))
    assert (compared.is_faster, str(compared)) == (pays, says)


def test_rounds_that_disagree() -> None:
    seconds = {"one lane": [1.0, 1.0, 1.0, 1.0], "2 lanes": [0.8, 1.3, 0.7, 1.2]}
    compared = OverlapComparison(True, seconds, "2 lanes", Timeline(()))
    assert compared.is_faster is None
    assert str(compared).startswith("The result is inconclusive: the rounds differ too much.")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ((), 2, "either MODEL or --check"),
        (("models:convolutions", "--check", "schedule.json"), 2, "either MODEL or --check"),
        (("--check", "no/such/schedule.json"), 2, "no/such/schedule.json cannot be read: No such file"),
        (("--check", "models.py"), 2, "work.json cannot be read"),
        (("models:convolutions", "--output", "models.py"), 2, "models.py cannot be created"),
        (("no/such/model.gguf",), 3, "There is no file or folder"),
    ],
)
def test_errors_are_sentences(arguments: tuple[str, ...], code: int, sentence: str) -> None:
    assert sentence in " ".join(_inlay(*arguments, check=code).stderr.split())


def test_files_that_are_something_else(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"tasks": [], "storages": []}
    (tmp_path / "work.json").write_text(json.dumps(saved))
    (tmp_path / "schedule.json").write_text("{}")
    assert "The JSON is not a valid schedule" in _inlay("--check", str(tmp_path), check=8).stderr


def test_without_weights_nothing_is_measured(tmp_path: Path) -> None:
    run = _inlay(str(config_folder(tmp_path / "tiny")), check=3)
    assert "captured from its configuration alone" in " ".join(run.stderr.split())


def test_help() -> None:
    assert "Example" in _inlay("--help").stdout
