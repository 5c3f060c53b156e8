"""Schedules in packages: pieces cut where branches part, saved with what they touch, run from the package in lanes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from inlay.capture import Example, capture
from inlay.compile.in_process import compile_lowered
from inlay.compile.load import load_package
from inlay.compile.pack import Contents, add_texts, pack
from inlay.compile.plan import plan
from inlay.errors import ProgramError, UsageError
from inlay.streams import check, grouped, joined, open_lanes, schedule, work_of_program
from inlay.streams.packed import NAME, Laned, cut, in_lanes, plan_lanes, save, saved

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inlay.compile.pack import Lowered

EVENT = 1e-6


class Both(nn.Module):
    """Rows of a cache are written and attended to, beside an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, x)
        attended = torch.softmax(x @ cache.t(), -1) @ cache
        return attended + self.down(torch.relu(self.up(x)))


def _given() -> dict[str, Any]:
    torch.manual_seed(1)
    return {"x": torch.randn(4, 32), "cache": torch.randn(16, 32), "at": torch.tensor([3, 1, 7, 5])}


def _lowered() -> Lowered:
    """Cut into the pieces of two lanes; times are made up, so the cut is always the same."""
    torch.manual_seed(0)
    program = capture(Example(Both().eval(), tuple(_given().values())))
    names = [task.name for task in work_of_program(program).tasks]
    work = grouped(work_of_program(program, dict.fromkeys(names, 1e-4)), 2 * EVENT)
    return cut(program, joined(work, schedule(work, lanes=2, event_seconds=EVENT))[0])


@pytest.fixture(scope="module")
def lowered() -> Iterator[Lowered]:
    """With one intra-op thread, as for lanes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield _lowered()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def package(lowered: Lowered, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("lanes") / "package"
    pack(lowered, path, Contents("both"))
    save(path, plan_lanes(load_package(path), lowered, _given(), event_seconds=0.0))
    return path


@pytest.mark.fast
def test_a_cut_means_the_same(lowered: Lowered) -> None:
    steps = lowered.buckets[-1][2].steps
    assert len(steps) >= 3
    given, wanted = _given(), _given()
    torch.manual_seed(0)
    expected = Both().eval()(*wanted.values())
    (found,) = compile_lowered(lowered, "eager")(given).values()
    torch.testing.assert_close(found, expected)
    assert torch.equal(given["cache"], wanted["cache"])


@pytest.mark.fast
def test_a_call_that_is_in_no_piece(lowered: Lowered) -> None:
    names = [node.name for node in lowered.program.graph.nodes if node.op == "call_function"]
    with pytest.raises(ProgramError, match="is in none of the pieces"):
        plan(lowered.program, cuts=[names[:2], names[3:]])


def test_it_is_saved_and_checked_when_it_is_run(package: Path, lowered: Lowered) -> None:
    loaded = load_package(package, verify=True)
    made = saved(loaded)
    assert made is not None
    assert made == Laned.parse(made.text())
    assert check(made.work, made.schedule).ok
    assert [step for task in made.work.tasks for step in task.steps] == list(range(len(made.work)))
    lanes = open_lanes(2, "cpu")
    try:
        overlapped = in_lanes(loaded, lanes)
        for _ in range(20):
            given, wanted = _given(), _given()
            (expected,), (found,) = loaded(wanted).values(), overlapped(given).values()
            assert torch.equal(found, expected)
            assert torch.equal(given["cache"], wanted["cache"])
    finally:
        lanes.close()


def test_a_schedule_with_a_race_is_not_run(package: Path, lowered: Lowered) -> None:
    made = saved(load_package(package))
    assert made is not None
    apart = replace(made.schedule, lanes=tuple((task.name,) for task in made.work.tasks), events=())
    save(package, Laned(made.work, apart))
    lanes = open_lanes(len(made.work), "cpu")
    try:
        with pytest.raises(UsageError, match="must not be run"):
            in_lanes(load_package(package), lanes)
    finally:
        lanes.close()
        save(package, made)
    assert saved(load_package(package, verify=True)) == made


def test_texts_are_added_and_replaced(package: Path) -> None:
    before = load_package(package).manifest
    after = add_texts(package, {"note.txt": "one\n"})
    assert set(after.files) == {*before.files, "note.txt"}
    loaded = load_package(package, verify=True)
    assert (loaded.folder / "note.txt").read_text() == "one\n"
    add_texts(package, {"note.txt": "two\n"})
    assert (load_package(package, verify=True).folder / "note.txt").read_text() == "two\n"
    assert (loaded.manifest.files[NAME], loaded.manifest.buckets) == (before.files[NAME], before.buckets)
    assert len(list((package / "versions").iterdir())) == 1, "old versions are removed"


def test_a_package_without_a_schedule(lowered: Lowered, tmp_path: Path) -> None:
    program = capture(Example(nn.ReLU(), (torch.randn(4),)))
    pack(cut(program, work_of_program(program)), tmp_path / "relu", Contents("relu"))
    loaded = load_package(tmp_path / "relu")
    assert saved(loaded) is None
    with pytest.raises(UsageError, match="has no schedule"):
        in_lanes(loaded, open_lanes(1, "cpu"))
