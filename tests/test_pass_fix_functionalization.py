"""Mutation through passes: none is lost, none is made twice.

A program says in its bindings which outputs live in whose storage. Undoing functionalization in the graph, so that no
copy is left, is not done yet; what can be broken already is tested here: every transform, alone and in order, keeps the
table, the number of copies, and the state a model leaves behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.config import resolve
from inlay.testing import program_of
from inlay.transforms import configure, run
from inlay.transforms.pipeline import Step
from pass_sources import AutoDeploy, LegacyRemoveCopies, expect_match, run_foreign

if TYPE_CHECKING:
    from inlay.program import Program

pytestmark = pytest.mark.fast
STEPS = 3
COPIES = ("aten.copy.default", "aten.copy_.default", "aten.clone.default", "aten.index_copy.default")
STATE = {"b_keys", "b_count", "values"}


class Decoder(torch.nn.Module):
    """A step of attention over caches written in place: one a buffer, one an input; and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.gate, self.up = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(1, 2, 4, 4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        wide = x + x.tanh()
        normed = self.norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))
        heads = normed.view(1, 1, 2, 4).transpose(1, 2)
        self.keys.index_copy_(2, place, heads * 2)
        values.index_copy_(2, place, heads + self.count)
        read = torch.nn.functional.scaled_dot_product_attention(heads, self.keys, values)
        hidden = read.transpose(1, 2).reshape(1, 1, 8)
        return torch.nn.functional.silu(self.gate(hidden)) * self.up(hidden)


def _inputs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 8).reshape(1, 1, 8) * (step + 1), torch.tensor([step])


@pytest.fixture(scope="module")
def program() -> Program:
    x, place = _inputs(0)
    return program_of(Decoder(), [x, torch.zeros(1, 2, 4, 4), place])


def _trace_of(module: Any, values: torch.Tensor) -> list[torch.Tensor]:
    """Results and state after each of a few steps."""
    seen = []
    for step in range(STEPS):
        x, place = _inputs(step)
        with torch.no_grad():
            result = module(x, values, place)
        seen += [each.clone() for each in (result, values, module.keys, module.count)]
    return seen


def _copies(program: Program) -> dict[str, int]:
    return {name: program.op_counts()[name] for name in COPIES if program.op_counts()[name]}


def assert_mutation_kept(before: Program, after: Program) -> None:
    """The same bindings are written, by as many copies, and hold the same numbers after every step as eagerly."""
    assert [(row.name, row.alias) for row in after.bindings.outs] == [
        (row.name, row.alias) for row in before.bindings.outs
    ]
    assert {row.name for row in after.bindings.state} == STATE
    assert _copies(after) == _copies(before)
    got = _trace_of(after.module(), torch.zeros(1, 2, 4, 4))
    want = _trace_of(Decoder(), torch.zeros(1, 2, 4, 4))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    assert want[-1].item() == STEPS, "the counter counts"
    assert not torch.equal(want[2], torch.zeros(1, 2, 4, 4)), "the cache is written"


def _configured() -> list[Step]:
    return configure(resolve())


def test_inlay_captures_mutation(program: Program) -> None:
    assert_mutation_kept(program, program)


@pytest.mark.parametrize("step", _configured(), ids=lambda step: step.key)
def test_inlay_each_alone(program: Program, step: Step) -> None:
    relaxed = step.transform.options.model_copy(update={"expect": "any", "reason": "alone"})
    result, _ = run(program, [Step(step.key, type(step.transform)(relaxed))])
    assert_mutation_kept(program, result)


def test_inlay_all(program: Program) -> None:
    result, records = run(program, _configured())
    matched = {record.key for record in records if record.sites}
    assert {"match_rms_norm", "match_attention", "match_swiglu", "fuse_add_rms_norm"} <= matched
    assert_mutation_kept(program, result)


def test_a_lost_mutation_is_noticed(program: Program) -> None:
    """The check above can fail: a pass that hands the old cache on instead of the written one."""

    def forget(gm: Any) -> None:
        output = next(iter(reversed(gm.graph.nodes)))
        old = {row.name: node for row in program.bindings.ins for node in gm.graph.nodes if node.name == row.name}
        outs = zip(program.bindings.outs, output.args[0], strict=True)
        output.args = (tuple(old["b_count"] if row.target == "count" else value for row, value in outs),)

    result, record = run_foreign(program, forget)
    assert record.sites == 1
    with pytest.raises(AssertionError):
        assert_mutation_kept(program, result)


def test_autodeploy(program: Program) -> None:
    """AutoDeploy has no pass that undoes functionalization; one that cleans up must not lose a mutation."""
    result, record = run_foreign(program, AutoDeploy("cleanup_noop_slice", "cleanup_noop_slice"))
    assert record.sites == 0
    assert_mutation_kept(program, result)


def test_legacy(program: Program) -> None:
    result, record = run_foreign(program, LegacyRemoveCopies())
    assert_mutation_kept(program, result)
    expect_match(record, "it puts back operators of its own list only, and a captured program calls none of them")
