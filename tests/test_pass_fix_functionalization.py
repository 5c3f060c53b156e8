"""Mutation through passes: none is lost, none is made twice.

A program says in its bindings which outputs live in whose storage. Every transform, alone and in order, keeps the
table, the number of copies, and the state a model leaves behind. Undoing functionalization leaves no copy: in the
program, where the eager backend writes to the caller's memory, and in a post-grad graph, by `fix_functionalization`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tools.fuzz_writes.check import run as written_by

from inlay.analysis.auto_functionalized import is_auto_functionalized
from inlay.config import resolve_config
from inlay.lowering.compiled_program import compile_program
from inlay.lowering.state.defunctionalization import fix_functionalization
from inlay.program.graphs import is_mutation
from inlay.testing import program_of
from inlay.transforms import configure, run
from inlay.transforms.pass_manager import TransformStep
from tests.in_place_graphs import Build, keys_and_values, two_writes_one_copy_back, v2_input
from tests.pass_sources import expect_match, found, run_external

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from inlay.program import Program

pytestmark = pytest.mark.fast
STEPS = 3
COPIES = ("aten.copy.default", "aten.copy_.default", "aten.clone.default", "aten.index_copy.default")
STATE = {"b_keys", "b_count", "values"}


class Decoder(torch.nn.Module):
    """A step of attention over caches written in place: one a buffer, one an input; and a counter."""

    keys: torch.Tensor
    count: torch.Tensor

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


def _configured() -> list[TransformStep]:
    return configure(resolve_config())


def test_inlay_captures_mutation(program: Program) -> None:
    assert_mutation_kept(program, program)


@pytest.mark.parametrize("step", _configured(), ids=lambda step: step.key)
def test_inlay_each_alone(program: Program, step: TransformStep) -> None:
    relaxed = step.transform.options.model_copy(update={"expect": "any", "reason": "alone"})
    result, _ = run(program, [TransformStep(step.key, type(step.transform)(relaxed))])
    assert_mutation_kept(program, result)


def test_inlay_all(program: Program) -> None:
    result, records = run(program, _configured())
    matched = {record.key for record in records if record.sites}
    assert {"match_rms_norm", "match_attention", "match_swiglu", "fuse_add_rms_norm"} <= matched
    assert_mutation_kept(program, result)


def test_inlay_writes_in_place(program: Program) -> None:
    """After all transforms every state is written where it lies, without a copy, and steps leave what eager leaves."""
    result, _ = run(program, _configured())
    step, values = compile_program(result, "eager"), torch.zeros(1, 2, 4, 4)
    assert {state.binding.name for state in step.states if state.is_eligible} == STATE
    assert not _copies(step.in_place_program.program)
    state = [values, step.owned_tensors["b_keys"], step.owned_tensors["b_count"]]
    places = [each.data_ptr() for each in state]
    seen = []
    for at in range(STEPS):
        x, place = _inputs(at)
        seen += [each.clone() for each in (step(x, values, place), *state)]
    for one, other in zip(seen, _trace_of(Decoder(), torch.zeros(1, 2, 4, 4)), strict=True):
        torch.testing.assert_close(one, other)
    assert places == [each.data_ptr() for each in state]


WRITES = [v2_input, keys_and_values, two_writes_one_copy_back]


@pytest.mark.parametrize("build", WRITES, ids=lambda build: build.__name__)
def test_inlay_fix_functionalization(build: Callable[[Build], fx.GraphModule]) -> None:
    """In a post-grad graph: no wrapper and no copy back is left, and every byte of results and state is the same."""
    given = Build()
    module = build(given)
    before = written_by(module, given.inputs)
    assert any(map(is_auto_functionalized, module.graph.nodes))
    fixed = fix_functionalization(module.graph)
    assert fixed.in_place
    assert not fixed.copied
    assert not any(
        is_auto_functionalized(node) or node.target is torch.ops.aten.copy_.default for node in module.graph.nodes
    )
    after = written_by(module, given.inputs)
    assert all(torch.equal(one, two) for one, two in zip(before.values, after.values, strict=True))


def test_a_write_that_fix_functionalization_lost_would_be_noticed() -> None:
    given = Build()
    module = v2_input(given)
    before = written_by(module, given.inputs)
    fix_functionalization(module.graph)
    (write,) = [node for node in module.graph.nodes if is_mutation(node)]
    module.graph.erase_node(write)
    after = written_by(module, given.inputs)
    assert not all(torch.equal(one, two) for one, two in zip(before.values, after.values, strict=True))


def test_a_lost_mutation_is_noticed(program: Program) -> None:
    """The check above can fail: a pass that hands the old cache on instead of the written one."""

    def forget(gm: Any) -> None:
        output = next(iter(reversed(gm.graph.nodes)))
        old = {row.name: node for row in program.bindings.ins for node in gm.graph.nodes if node.name == row.name}
        outs = zip(program.bindings.outs, output.args[0], strict=True)
        output.args = (tuple(old["b_count"] if row.target == "count" else value for row, value in outs),)

    result, record = run_external(program, forget)
    assert record.sites == 1
    with pytest.raises(AssertionError):
        assert_mutation_kept(program, result)


def test_autodeploy(program: Program) -> None:
    """AutoDeploy has no pass that undoes functionalization; one that cleans up must not lose a mutation."""
    result, record = run_external(program, found("cleanup_noop_slice"))
    assert record.sites == 0
    assert_mutation_kept(program, result)


def test_legacy(program: Program) -> None:
    result, record = run_external(program, found("remove_copy_for_mutates_args"))
    assert_mutation_kept(program, result)
    expect_match(record, "it puts back operators of its own list only, and a captured program calls none of them")
