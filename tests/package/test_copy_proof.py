"""The copy proof holds for what is in place, and fails for every way to lose that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from typer.testing import CliRunner

import inlay
from inlay.cli.main import app
from inlay.flow import BuildOptions, build
from inlay.package import copy_proof
from inlay.package.copy_proof import Proof, prove
from inlay.package.loader import LoadedPackage, load_package, read_manifest
from inlay.package.manifest import FileRow, parse, sha256
from inlay.transforms.base import Numerics, Stage, Transform, TransformResult, transform

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program.program import Program

SHAPE = (512, 64)


class Cache(torch.nn.Module):
    """Rows of a cache, written at given places."""

    cache: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(SHAPE, dtype=dtype))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, x)
        return self.cache.sum(0)


class CannotBeInPlace(Cache):
    """Every row moves: the new value is made of the old one as a whole."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.copy_(torch.cat([self.cache[2:], x]))
        return self.cache.sum(0)


class ReadsTheOldValue(Cache):
    """The value before the write is wanted after it."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        before = self.cache.clone()
        self.cache.index_copy_(0, at, x)
        return torch.sort(self.cache.flatten())[0][:4] + torch.sort(before.flatten())[0][:4]


class Casts(Cache):
    """The update is computed in another number format and cast back."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        wide = self.cache.double().index_copy(0, at, torch.sort(x.double(), 0)[0])
        self.cache.copy_(wide.to(self.cache.dtype))
        return self.cache.sum(0)


class Sorts(Cache):
    """A call with several results, each as large as the cache."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, x)
        return torch.sort(self.cache, 0)[0][0]


class Attends(Cache):
    """A call with several results that reads all of the cache and gives little."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, x)
        rows = self.cache.view(1, 1, *SHAPE)
        return torch.nn.functional.scaled_dot_product_attention(x.view(1, 1, 2, SHAPE[1]), rows, rows)


def _built(module: torch.nn.Module, path: Path, *settings: str, config: tuple[Path, ...] = ()) -> LoadedPackage:
    example = inlay.Example(module, (torch.ones(2, SHAPE[1]), torch.tensor([1, 2])))
    build(example, path, BuildOptions(settings=settings, config=config))
    return load_package(path)


def _state(proof: Proof) -> Any:
    (state,) = proof.states
    return state


def test_a_decoder(package: Path) -> None:
    proof = prove(load_package(package))
    assert proof.holds, proof.problems
    assert len(proof.states) == 6
    for state in proof.states:
        assert state.kind == "kv_cache_update"
        assert state.bytes_copied == 0
        assert state.bytes_written == 2 * 16 * 4, "one row: two heads of sixteen numbers"
        # of the largest call: two heads of three sequences, each a run of rows on one page or two; the state has 32
        assert 0 < state.pages_written <= 12
        assert {each["kernel"].rpartition(".")[0] for each in state.accesses} >= {"inlay.cached_attention"}


def test_state_of_the_module(tmp_path: Path) -> None:
    proof = prove(_built(Cache(), tmp_path / "package"))
    assert proof.holds, proof.problems
    assert _state(proof).bytes_written == 2 * SHAPE[1] * 4
    assert _state(proof).pages_written == 1


def test_reading_all_of_it_is_no_copy(tmp_path: Path) -> None:
    proof = prove(_built(Attends(), tmp_path / "package"))
    assert proof.holds, proof.problems
    assert any(int(each.get("reads", 0)) == SHAPE[0] * SHAPE[1] * 4 for each in _state(proof).accesses)


@pytest.mark.parametrize(
    "fault",
    [CannotBeInPlace, ReadsTheOldValue, *(pytest.param(each, marks=pytest.mark.nightly) for each in (Casts, Sorts))],
)
def test_faults_of_a_model(fault: type[Cache], tmp_path: Path) -> None:
    proof = prove(_built(fault(), tmp_path / "package"))
    assert not proof.holds
    assert _state(proof).bytes_copied >= SHAPE[0] * SHAPE[1] * 4
    shown = CliRunner().invoke(app, ["prove", str(tmp_path / "package"), "--json"])
    assert shown.exit_code == 1
    (row,) = json.loads(shown.stdout)["states"]
    assert {"name", "kind", "bytes_written", "bytes_copied"} <= set(row)
    assert row["bytes_copied"] >= SHAPE[0] * SHAPE[1] * 4


@pytest.fixture
def adds_a_clone() -> str:
    @transform("adds_a_clone", stage=Stage.LOWER, numerics=Numerics.EXACT)
    class AddsAClone(Transform):
        """Whoever reads the cache reads a copy of it, laid out differently."""

        def apply(self, program: Program) -> TransformResult:
            puts = [node for node in program.graph.nodes if "index_copy" in str(node.target)]
            for put in puts:
                readers = [user for user in put.users if user.op != "output"]
                with program.graph.inserting_after(put):
                    turned = program.graph.call_function(torch.ops.aten.transpose.int, (put, 0, 1))
                with program.graph.inserting_after(turned):
                    copy = program.graph.call_function(
                        torch.ops.aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
                    )
                with program.graph.inserting_after(copy):
                    back = program.graph.call_function(torch.ops.aten.transpose.int, (copy, 0, 1))
                for node in (turned, copy, back):
                    target: Any = node.target
                    node.meta["val"] = target(*fx.map_arg(node.args, lambda each: each.meta["val"]), **node.kwargs)
                for reader in readers:
                    reader.replace_input_with(put, back)
            return TransformResult(program, len(puts))

    return "adds_a_clone"


class Reads(Cache):
    """Reads its cache with an operator that takes it as it is in memory."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, x)
        return torch.nn.functional.linear(x, self.cache)


def test_a_transform_that_adds_a_clone(adds_a_clone: str, tmp_path: Path) -> None:
    assert prove(_built(Reads(), tmp_path / "without")).holds
    config = tmp_path / "config.yaml"
    config.write_text(f"transforms:\n  {adds_a_clone}: {{}}\n")
    proof = prove(_built(Reads(), tmp_path / "with", config=(config,)))
    assert not proof.holds
    assert _state(proof).bytes_copied >= SHAPE[0] * SHAPE[1] * 4


def test_a_boundary_that_stages_the_cache(package: Path, tmp_path: Path) -> None:
    """A plan that copies the cache before a piece and back after it computes the same, and is found out."""
    manifest, folder = read_manifest(package)
    (tmp_path / "staged").mkdir()
    for file in folder.iterdir():
        (tmp_path / "staged" / file.name).symlink_to(file)
    stage = {"ins": ["x"], "calls": [["y", "aten.clone.default", [{"value": "x"}], {}]], "outs": [{"value": "y"}]}
    file = tmp_path / "staged" / "stage.json"
    file.write_text(json.dumps(stage))
    found = json.loads(manifest.text())
    for bucket in found["buckets"]:
        piece = {"name": "stage", "file": "stage.json", "constants": [], "ins": ["x"], "outs": ["y"]}
        bucket["pieces"].append(piece)
        place = next(index for index, step in enumerate(bucket["steps"]) if "keys_1" in step["ins"])
        step = bucket["steps"][place]
        step["ins"] = ["staged" if name == "keys_1" else name for name in step["ins"]]
        bucket["steps"].insert(place, {"piece": "stage", "constants": [], "ins": ["keys_1"], "outs": ["staged"]})
    changed = parse(json.dumps(found))
    changed.files["stage.json"] = FileRow(file.stat().st_size, sha256(file))
    proof = prove(LoadedPackage(changed, tmp_path / "staged"))
    assert not proof.holds
    assert any("a cache is staged there" in problem for problem in proof.problems)
    assert any("code that was not analyzed" in problem for problem in proof.problems)
    assert any("nothing writes to keys_1" in problem for problem in proof.problems)


def _edited(package: Path, folder: Path, old: str, new: str) -> LoadedPackage:
    """A package whose generated source says something else."""
    manifest, home = read_manifest(package)
    folder.mkdir()
    for file in home.iterdir():
        (folder / file.name).symlink_to(file)
    for file in folder.glob("*.cpp"):
        text = file.read_text()
        assert old in text
        file.unlink()
        file.write_text(text.replace(old, new, 1))
    return LoadedPackage(manifest, folder)


END = "} // AOTInductorModel::run_impl"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("    auto buf99 = std::move(arg12_1);  // reuse\n", "cannot be parsed"),
        ("    do_something(arg12_1);\n", "cannot be parsed"),
    ],
)
def test_code_that_is_not_understood(package: Path, tmp_path: Path, line: str, problem: str) -> None:
    manifest, folder = read_manifest(package)
    piece = next(piece for piece in manifest.buckets[0].pieces if piece.states)
    text = (folder / piece.file).with_suffix(".cpp").read_text()
    place = piece.ins.index(piece.states[0])
    name = next(line.split()[1] for line in text.splitlines() if f"std::move(inputs[{place}])" in line)
    proof = prove(_edited(package, tmp_path / "edited", END, line.replace("arg12_1", name) + END))
    assert any(problem in each for each in proof.problems), proof.problems


def test_reading_generated_code() -> None:
    text = """void AOTInductorModel::run_impl(
    auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 2);
    auto arg0_1 = std::move(inputs[0]);
    auto arg1_1 = std::move(inputs[1]);
    auto arg0_1_size = arg0_1.sizes();
    if (_check_aoti_runtime_check_inputs_env()) { assert_size_stride(arg0_1, {4L}, {1L}, "input"); }
    cpp_fused_index_put_0((const int64_t*)(arg1_1.data_ptr()), (float*)(arg0_1.data_ptr()), s0);
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, {arg0_1}));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(buf1, arg0_1, 0));
    arg0_1.reset();
    std::swap(arg0_1, buf3);
} // AOTInductorModel::run_impl
"""
    found = list(copy_proof.find_input_uses(text, [{"node": {"target": "inlay::cached_attention"}}]))
    assert [(each.input_index, each.callee, each.reads, each.writes, each.is_understood) for each in found] == [
        (1, "cpp_fused_index_put_0", True, False, True),
        (0, "cpp_fused_index_put_0", False, True, True),
        (0, "inlay::cached_attention", True, False, True),
        (0, "copy_", True, True, True),
        (0, "std::swap(arg0_1, buf3);", False, False, False),
    ]
    assert not next(copy_proof.find_input_uses("nothing", [])).is_understood
