"""`autodeploy:NAME`: the protocol of TensorRT-LLM's passes, on packages written here after its public sources.

TensorRT-LLM itself needs a GPU and was not run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.errors import TransformError, UsageError
from inlay.integrations import load_external_pass
from inlay.testing import program_of
from inlay.transforms import run
from inlay.transforms.pass_manager import TransformStep
from tests.pass_sources import found

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inlay.program import Program
    from inlay.transforms import TransformRecord

pytestmark = pytest.mark.fast
INTERFACE = """
from enum import Enum

class Stages(Enum):
    PATTERN_MATCHER = "pattern_matcher"

class SharedConfig:
    local_rank, world_size = 0, 1

class TransformInfo:
    def __init__(self, skipped, num_matches):
        self.skipped, self.num_matches = skipped, num_matches

class BaseTransform:
    def __init__(self, config):
        self.config = config

    @classmethod
    def from_kwargs(cls, **kwargs):
        return cls(kwargs)

    def __call__(self, gm, cm, factory, shared_config):
        assert shared_config.world_size == 1 and self.config["enabled"]
        gm, info = self._apply(gm, cm, factory, shared_config)
        meta = gm.meta.setdefault("_autodeploy", {}).setdefault("transform_history", {})
        meta[self._transform_key] = info
        return gm

class TransformRegistry:
    _registry = {}

    @classmethod
    def register(cls, name):
        def inner(made):
            cls._registry[name], made._transform_key = made, name
            return made
        return inner

    @classmethod
    def get(cls, name):
        return cls._registry[name]

    @classmethod
    def has(cls, name):
        return name in cls._registry
"""
LIBRARY = """
import torch
from ..interface import BaseTransform, TransformInfo, TransformRegistry

@TransformRegistry.register("swap_relu")
class SwapRelu(BaseTransform):
    def _apply(self, gm, cm, factory, shared_config):
        found = [node for node in gm.graph.nodes if node.target is torch.ops.aten.relu.default]
        for node in found:
            node.target = torch.ops.aten.relu6.default
        return gm, TransformInfo(False, len(found))

@TransformRegistry.register("reports_options")
class ReportsOptions(BaseTransform):
    def _apply(self, gm, cm, factory, shared_config):
        raise RuntimeError(str(sorted(self.config.items(), key=str)))

@TransformRegistry.register("needs_a_cache")
class NeedsACache(BaseTransform):
    def _apply(self, gm, cm, factory, shared_config):
        cm.add_cache("k")

@TransformRegistry.register("skips_itself")
class SkipsItself(BaseTransform):
    def _apply(self, gm, cm, factory, shared_config):
        return gm, TransformInfo(True, 7)

@TransformRegistry.register("returns_a_pair")
class ReturnsAPair(SwapRelu):
    def __call__(self, gm, cm, factory, shared_config):
        return self._apply(gm, cm, factory, shared_config)

@TransformRegistry.register("rejects_its_options")
class RejectsItsOptions(BaseTransform):
    def __init__(self, config):
        raise ValueError("no option enabled")

@TransformRegistry.register("reports_nothing")
class ReportsNothing(BaseTransform):
    def __call__(self, gm, cm, factory, shared_config):
        return gm
"""
PATTERNS = """
import torch
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, register_graph_pattern

def register_add_norm(custom_pass):
    @register_graph_pattern(CallFunction(torch.ops.aten.relu.default, KeywordArg("x")), pass_dict=custom_pass)
    def replace(match, x):
        match.replace_by_example(torch.erf, [x])
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source tree with both sets of passes, on the path."""
    files = {
        "_torch/auto_deploy/transform/interface.py": INTERFACE,
        "_torch/auto_deploy/transform/library/__init__.py": LIBRARY,
        "_torch/auto_deploy/config/default.yaml": "transforms: {reports_options: {stage: x, run_shape_prop: true}}",
        "_torch/compilation/patterns/residual_add_norm.py": PATTERNS,
        "_torch/compilation/remove_copy_pass.py": "",
    }
    for name, text in files.items():
        file = tmp_path / "tensorrt_llm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for folder in file.parents:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "tensorrt_llm":
            del sys.modules[name]


def _program() -> Program:
    return program_of(lambda x: x.relu() + x.relu().sum(), [torch.ones(2)])


def _run(name: str) -> tuple[Program, TransformRecord]:
    result, records = run(_program(), [TransformStep(name, load_external_pass(f"autodeploy:{name}"))])
    return result, records[0]


@pytest.mark.parametrize("name", ["swap_relu", "returns_a_pair", "register_add_norm"])
def test_the_count_is_the_pass_s_own(tree: Path, name: str) -> None:
    result, record = _run(name)
    assert (record.sites, record.has_site_count) == (2, True)
    assert result.op_counts()["aten.relu6.default" if name != "register_add_norm" else "aten.erf.default"] == 2


def test_a_pass_that_was_skipped_has_no_matches(tree: Path) -> None:
    _, record = _run("skips_itself")
    assert (record.sites, record.notes) == (0, ())
    assert record.summary.endswith("[SUMMARY] skipped (its TransformInfo says that AutoDeploy skipped it)")


def test_options_are_those_of_its_default_configuration(tree: Path) -> None:
    with pytest.raises(TransformError, match=r"\('enabled', True\), \('run_shape_prop', True\), \('stage', 'x'\)"):
        _run("reports_options")


def test_what_a_pass_cannot_do_here_is_said(tree: Path) -> None:
    with pytest.raises(TransformError, match=r"needs_a_cache failed: AttributeError.*Inlay passes no `cm`"):
        _run("needs_a_cache")
    with pytest.raises(TransformError, match="reports_nothing did not report its number of matches"):
        _run("reports_nothing")


def test_a_pass_that_cannot_be_created(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"rejects_its_options cannot be created: ValueError: no option enabled"):
        _run("rejects_its_options")


def test_an_unknown_name(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"remove_copy_pass \(AttributeError: module .* has no attribute"):
        _run("remove_copy_for_mutates_args")
    with pytest.raises(UsageError, match=r"registers no zzz\)$"):
        _run("zzz")
    with pytest.raises(UsageError, match=r"transform.library \(registers no swap_rel\)\nDid you mean swap_relu"):
        _run("swap_rel")
    with pytest.raises(UsageError, match=r"compilation.recover_pass \(ModuleNotFoundError"):
        _run("recover_pass")


def test_without_tensorrt_llm() -> None:
    with pytest.raises(pytest.skip.Exception) as skip:
        found("remove_copy_for_mutates_args")
    assert "tensorrt_llm._torch.auto_deploy.transform.interface (ModuleNotFoundError" in str(skip.value)
    assert "tensorrt_llm._torch.compilation.remove_copy_pass (ModuleNotFoundError" in str(skip.value)


def test_from_the_command_line(tree: Path) -> None:
    shown: Any = CliRunner().invoke(app, ["show", "models:convolutions", "--pass", "autodeploy:swap_relu"])
    assert shown.exit_code == 0, shown.output
    assert "autodeploy:swap_relu: [SUMMARY] matches=" in shown.output
