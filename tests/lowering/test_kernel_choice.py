"""What code packages bring: kernels chosen by measurement, and packages for lesser processors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

import inlay
from inlay import machine
from inlay.bench.probe import probe_kernels
from inlay.cli.main import app
from inlay.errors import PackageError
from inlay.flow import BuildOptions
from inlay.lowering import kernel_choice
from inlay.lowering.aoti_runtime import Container
from inlay.lowering.buckets import measured_kernels
from inlay.lowering.executable import PlanExecutor
from inlay.ops.weight_layout import Packing
from inlay.package.loader import load_package, read_manifest
from inlay.runtime.session import Session

if TYPE_CHECKING:
    from pathlib import Path


class Packages(dict[str, "Path"]):
    """The package of each target; the portable one is built when it is first used."""

    def __init__(self, native: Path, home: Path) -> None:
        super().__init__(native=native)
        self.home = home

    def __missing__(self, target: str) -> Path:
        options = BuildOptions(buckets=(), max_length=128, max_batch=4, weights="int4", kernels=target)
        self[target] = inlay.build(str(self["native"].parent / "model"), self.home / target, options).path
        return self[target]


@pytest.fixture(scope="module")
def packages(int4_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(int4_package, tmp_path_factory.mktemp("kernels"))


def scores(path: Path) -> torch.Tensor:
    session = Session(load_package(path), 2)
    tokens = torch.arange(40).reshape(2, 20) % 50
    first = session.advance(tokens)
    return torch.stack([first, session.advance([[3], [4]])])


@pytest.mark.nightly
def test_portable_code_uses_no_wide_registers(packages: dict[str, Path]) -> None:
    found = {}
    for level in ("native", "portable"):
        folder = read_manifest(packages[level])[1]
        text = "".join(
            subprocess.run(["objdump", "-d", str(file)], capture_output=True, text=True, check=True).stdout
            for file in folder.glob("*.so")
        )
        found[level] = len(re.findall(r"%(?:zmm|tmm|k)\d", text))
    assert found["portable"] == 0
    if "avx512f" in machine.cpu_features():
        assert found["native"] > 0


@pytest.mark.nightly
def test_both_compute_the_same(packages: dict[str, Path]) -> None:
    native, portable = scores(packages["native"]), scores(packages["portable"])
    assert (native - portable).abs().max() < 3e-2 * native.abs().max()


@pytest.mark.nightly
def test_a_lesser_processor_gets_a_sentence(packages: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_features", lambda: ("avx2",))
    load_package(packages["portable"])
    if read_manifest(packages["native"])[0].target.cpu_features != ("avx2",):
        with pytest.raises(PackageError, match="was built for a CPU with"):
            load_package(packages["native"])


def test_choices_are_recorded_and_shown(packages: dict[str, Path]) -> None:
    manifest, _ = read_manifest(packages["native"])
    rows = [row for bucket in manifest.buckets for piece in bucket.pieces for row in piece.kernels]
    assert {row.bits for row in rows} == {4, 8}
    for row in rows:
        for count, took in row.timings.items():
            assert set(took) >= set(kernel_choice.VARIANTS)
            assert row.variant(int(count)) in took
    shown = CliRunner().invoke(app, ["inspect", str(packages["native"])])
    assert shown.exit_code == 0
    assert "kernel" in shown.output
    assert "dot" in shown.output
    assert json.loads(manifest.text())["buckets"][0]["pieces"][-1]["kernels"]


def test_choices_travel_and_can_be_probed(packages: dict[str, Path], tmp_path: Path) -> None:
    """A copy of the package has the choices of every bucket. The probe times exactly those, by count and structure."""
    shutil.copytree(packages["native"], tmp_path / "moved", symlinks=True)
    manifest, _ = read_manifest(tmp_path / "moved")
    recorded = measured_kernels(manifest.buckets)
    assert {key[0] for key in recorded} == {"length=1", "all"}
    done = CliRunner().invoke(app, ["bench", str(tmp_path / "moved"), "--probe", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == sum(len(row.timings) for row in recorded.values())
    for row in rows:
        known = recorded[row["bucket"], row["features"], row["depth"], row["bits"]]
        assert row["recorded"] == known.variant(row["rows"])
        assert row["tuned"] in kernel_choice.VARIANTS
        assert set(row["p50_us"]) == set(row["p99_us"]) >= set(kernel_choice.VARIANTS)
        assert all(row["p50_us"][way] <= row["p99_us"][way] for way in row["p50_us"])
    shown = CliRunner().invoke(app, ["bench", str(tmp_path / "moved"), "--probe"])
    assert re.search(rf"Autotune would change \d+ of\s+{len(rows)} choices", shown.output)


@pytest.mark.nightly
def test_nothing_to_probe(packages: dict[str, Path]) -> None:
    shown = CliRunner().invoke(app, ["bench", str(packages["portable"]), "--probe"])
    assert shown.exit_code == 0
    assert "no measured kernel choice" in shown.output


def test_what_autotune_would_change(packages: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one kernel is twice as fast, it is chosen for all rows; where it is in the package already, it stays."""
    manifest, _ = read_manifest(packages["native"])
    for best in kernel_choice.VARIANTS:
        took = {way: [1e-5 if way == best else 2e-5] * 9 + [9e-5] for way in kernel_choice.VARIANTS}
        monkeypatch.setattr(kernel_choice, "sample_kernels", lambda *args, took=took: dict.fromkeys(args[-1], took))
        rows = probe_kernels(manifest)
        assert {row.tuned for row in rows} == {best}
        assert {row.gain for row in rows if row.recorded == best} <= {1.0}
        assert {row.gain for row in rows if row.recorded != best} <= {2.0}
        assert (rows[0].p50_us[best], rows[0].p99_us[best]) == (10.0, 90.0)


def test_steps_run_without_python(packages: dict[str, Path]) -> None:
    package = load_package(packages["native"])
    for _, execution in package.buckets:
        assert isinstance(execution, PlanExecutor)
        assert len(execution.steps) == 1
        chain = execution.steps[0][0]
        assert len(chain.steps) > 2
        assert all(isinstance(step, Container) for step in chain.steps)


@pytest.mark.parametrize("second", [False, True], ids=["one package", "a second with the same kernels"])
def test_a_failing_step_is_an_error(packages: dict[str, Path], second: bool, tmp_path: Path) -> None:
    """What a piece or a kernel refuses comes back as an exception that says why; the next call works.

    The steps are called past the checks of the package, which would refuse all of this before.
    """
    package = load_package(packages["native"])
    if second:
        shutil.copytree(packages["native"], tmp_path / "copy", symlinks=True)
        package = load_package(tmp_path / "copy")
    bucket, run = package.buckets[0]
    assert bucket.sizes["length"] == (1, 1)
    state = {name: value.zero_() for name, value in package.new_state().items()}
    right = {"input_ids": torch.tensor([[1]]), "slots": torch.tensor([1]), "lengths": torch.tensor([0])}
    for name, value, sentence in (
        ("slots", 99, "index out of bounds"),
        ("slots", -1, "slot -1 at 0 is not from 0 to 3"),
        ("lengths", -1, "length -1 at 0 is not from 0 to 127"),
        ("input_ids", 10**6, "token 1000000 at 0 is not from 0 to"),
    ):
        wrong = right | {name: torch.full_like(right[name], value)}
        with pytest.raises(PackageError, match=rf"Step \d of the package failed: .*{sentence}"):
            run({**state, **wrong})
    assert torch.isfinite(package({**state, **right})["logits"]).all()


def test_thresholds_follow_the_clock() -> None:
    timings, spread = kernel_choice.time_kernels(64, 128, Packing(4, -1), torch.float32, (1, 16))
    assert spread >= 1
    assert set(timings) == {1, 16}
    assert all(value > 0 for took in timings.values() for value in took.values())
    faster = {"dot": 1.0, "tiles8": 2.0, "tiles16": 3.0}
    assert kernel_choice.thresholds({1: faster, 16: faster}) == (16, kernel_choice.MAX_ROWS)
