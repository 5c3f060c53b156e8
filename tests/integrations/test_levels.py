"""Programs at the post-grad level, exported models, and Inductor's replacements explained on both levels."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

import inlay
from inlay import Example, Program
from inlay.cli.main import app
from inlay.errors import ExitCode
from inlay.integrations.post_grad import post_grad_program
from inlay.program.graphs import SOURCE
from inlay.program.text.parser import parse
from inlay.program.text.printer import dump
from inlay.rewrite.reasons import Reason
from tests.models import Branch, branch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.fast
THIS = "tests.integrations.test_levels"


class Norm(torch.nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(16)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Layers(torch.nn.Module):
    """The second layer has another epsilon."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Norm(1e-6), Norm(1e-5), Norm(1e-6)])
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.linear(layer(x))
        return x


def layers() -> Example:
    torch.manual_seed(0)
    return Example(Layers(), (torch.randn(4, 16),), axes={"x": {0: "batch"}})


def search(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def replacement(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-6)


RULE = inlay.from_replacement(search, replacement, [torch.empty(4, 8), torch.empty(8)])


def swapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


SWAPPED = inlay.from_replacement(swapped, replacement, [torch.empty(4, 8), torch.empty(8)])


PASS: Any = RULE.adapter.source  # type: ignore[attr-defined]
"""The PatternMatcherPass, as a command names it."""


@pytest.mark.parametrize("at", ["captured", "post-grad"])
def test_a_replacement_is_explained_in_one_line(at: str) -> None:
    program = inlay.capture(layers())
    program = post_grad_program(program) if at == "post-grad" else program
    (found,) = inlay.explain(program, RULE)
    (finding,) = found.near_misses
    assert (found.sites, finding.kind, finding.layers) == (2, Reason.CONSTANT, (1,))
    assert "2 of 3 matched; layer 1: 6 of 6 nodes: constant differs: other of" in finding.text
    assert "is 1e-05; expected 1e-06 (test_levels.py:" in finding.text


def test_a_replacement_that_fits_nowhere_says_why() -> None:
    (found,) = inlay.explain(layers(), SWAPPED)
    assert found.sites == 0
    assert [(each.layers, "are swapped" in each.text) for each in found.near_misses] == [((0, 1, 2), True)]


def test_the_post_grad_program_computes_the_same() -> None:
    example = layers()
    program = post_grad_program(inlay.capture(example))
    assert program.op_counts()["aten.linear.default"] == 0
    assert program.op_counts()["aten.addmm.default"] == 3
    assert {"p_layers_0_weight", "x"} <= {row.name for row in program.bindings.ins}
    assert any(node.meta.get(SOURCE, "").startswith("test_levels.py") for node in program.graph.nodes)
    x = torch.randn(7, 16)
    weights = [program.tensors[row.name].read() for row in program.bindings.ins if row.name in program.tensors]
    (result,) = torch.fx.Interpreter(torch.fx.GraphModule(torch.nn.Module(), program.graph)).run(*weights, x)
    torch.testing.assert_close(result, example.module(x))


def test_the_post_grad_program_is_dumped_and_read() -> None:
    program = post_grad_program(inlay.capture(layers()))
    text = dump(program)
    assert dump(parse(text, program.tensors)) == text


def test_a_graph_becomes_a_program_that_is_dumped_and_read() -> None:
    exported = torch.export.export(
        Layers(), (torch.randn(4, 16),), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )
    program = Program.from_graph(exported.run_decompositions().graph)
    text = dump(program)
    assert dump(parse(text, {})) == text


def test_exported_programs_are_models(tmp_path: Path) -> None:
    example = branch()
    assert isinstance(example.module, Branch)
    exported = torch.export.export(example.module, example.args)
    torch.export.save(exported, tmp_path / "branch.pt2")
    ours = inlay.capture(exported)
    assert ours.op_counts() == inlay.capture(str(tmp_path / "branch.pt2")).op_counts()
    assert [row.name for row in ours.bindings.state] == [row.name for row in inlay.capture(example).bindings.state]
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "branch.pt2")])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("branch  ")
    (tmp_path / "broken.pt2").write_text("no archive")
    refused = CliRunner().invoke(app, ["show", str(tmp_path / "broken.pt2")])
    assert refused.exit_code == ExitCode.MODEL
    assert "cannot be read by torch.export.load" in refused.output
    typed = CliRunner().invoke(app, ["show", str(tmp_path / "branch.pt2"), "--dtype", "bfloat16"])
    assert typed.exit_code == ExitCode.USAGE


def test_commands_at_the_post_grad_level(tmp_path: Path) -> None:
    model = f"{THIS}:layers"
    shown = CliRunner().invoke(app, ["show", model, "--at", "post-grad"])
    assert "aten.addmm" in shown.stdout
    (found,) = json.loads(
        CliRunner().invoke(app, ["explain", model, "--at", "post-grad", "--pass", f"{THIS}:PASS", "--json"]).stdout
    )
    assert (found["matches"], found["findings"][0]["layers"]) == (2, [1])
    lock = tmp_path / "post-grad.lock"
    assert CliRunner().invoke(app, ["lock", model, "--at", "post-grad", "-o", str(lock)]).exit_code == 0
    assert "at: post-grad" in lock.read_text()
    checked = CliRunner().invoke(app, ["check", "--lock", str(lock), "--json"])
    assert (checked.exit_code, json.loads(checked.stdout)["holds"]) == (0, True)
    same = CliRunner().invoke(app, ["diff", model, model, "--at", "post-grad"])
    assert same.exit_code == 0
