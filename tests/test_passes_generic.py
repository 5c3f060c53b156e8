"""What holds for every pass: numbers stay, a second run finds nothing new, what is not its business is untouched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import TransformError
from inlay.integrations.graph_module_pass import graph_pass
from inlay.program.text.printer import dump
from inlay.testing import program_of
from inlay.transforms import Case, Numerics, registry
from inlay.transforms.base import find_transform
from tests.pass_sources import expect_match, found, run_external

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program

pytestmark = pytest.mark.fast
EVERY = [(name, case) for name, cls in registry().items() if not cls.adds_inputs for case in cls.positive_cases()]
ON_WEIGHTS = [(name, case) for name, case in EVERY if isinstance(case.function, torch.nn.Module)]
"""Cases of transforms that change weights. A plain module has them as inputs, which are the caller's."""
FIRES = [pair for pair in EVERY if pair not in ON_WEIGHTS]


def _id(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


def _module(program: Program) -> fx.GraphModule:
    """A plain GraphModule, parameters as placeholders: what a pass of this kind is handed."""
    return program.copy().to_exported().graph_module


def _code(module: fx.GraphModule) -> str:
    return str(module.code) + "".join(str(each.code) for _, each in module.named_children())


def _assert_same_numbers(before: Callable[..., Any], after: Callable[..., Any], args: Any, tolerance: float) -> None:
    with torch.no_grad():
        for want, got in zip(tree_leaves(before(*args)), tree_leaves(after(*args)), strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


# --- Inlay's own


@pytest.mark.parametrize(("name", "case"), FIRES, ids=_id)
def test_inlay_as_a_plain_function(name: str, case: Case) -> None:
    """GraphModule in, GraphModule out: fires, keeps the numbers, leaves the one that went in alone, fires once."""
    given = _module(program_of(case.function, case.args, case.axes, case.prerequisites))
    before = _code(given)
    run = graph_pass(name)
    made = run(given)
    assert made is not given
    assert _code(given) == before
    assert _code(made) != before
    half = any(isinstance(each, torch.Tensor) and each.dtype is torch.bfloat16 for each in case.args)
    rounding = 0.0 if find_transform(name).numerics is Numerics.EXACT else 2e-2 if half else 1e-5
    _assert_same_numbers(given, made, case.args, rounding)
    assert _code(run(made)) == _code(made), "a second run changes nothing"


@pytest.mark.parametrize(("name", "case"), ON_WEIGHTS, ids=_id)
def test_weights_that_are_inputs_stay(name: str, case: Case) -> None:
    given = _module(program_of(case.function, case.args, case.axes, case.prerequisites))
    before = _code(given)
    assert _code(graph_pass(name)(given)) == before


def _unrelated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sinh().amax(-1), torch.bmm(x, x.transpose(1, 2)).erf()


@pytest.mark.parametrize("name", registry())
def test_inlay_without_anchors(name: str) -> None:
    given = _module(program_of(_unrelated, [torch.randn(2, 3, 4)]))
    before = _code(given)
    assert graph_pass(name)(given) is given
    assert _code(given) == before


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4))
        self.scale = torch.nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.scale * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_inlay_with_weights_inside() -> None:
    """Weights as attributes, as torch.export's `module()` has them, stay attributes."""
    model, example = Normed(), torch.randn(2, 4)
    given = torch.export.export(model, (example,)).run_decompositions({}).module(check_guards=False)
    made = graph_pass("match_rms_norm")(given)
    names = [[node.target for node in each.graph.nodes if node.op == "get_attr"] for each in (given, made)]
    assert names[0] == names[1] != []
    assert any(node.target is torch.ops.inlay.rms_norm.default for node in made.graph.nodes)
    _assert_same_numbers(model, made, (example,), 0.0)


def test_inlay_refuses_in_place_graphs() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)),))
    with pytest.raises(TransformError, match="match_rope requires a functional graph"):
        graph_pass("match_rope")(fx.GraphModule(torch.nn.Module(), graph))


# --- TensorRT-LLM's, where it is installed

CLEANING = {
    "cleanup_noop_slice": lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, sys.maxsize).relu(),
    "cleanup_noop_add": lambda x: (x + torch.zeros(1)).relu(),
    "eliminate_redundant_transposes": lambda x: x.transpose(1, 2).transpose(1, 2).relu(),
}


def _assert_external_is_sound(function: Any, model: Callable[..., Any]) -> None:
    x = torch.randn(2, 3, 4)
    program = program_of(model, [x])
    result, _ = run_external(program, function)
    _assert_same_numbers(program.module(), result.module(), (x,), 1e-5)
    again, record = run_external(result, function)
    assert record.sites == 0
    assert dump(again) == dump(result)
    other = program_of(_unrelated, [x])
    untouched, record = run_external(other, function)
    assert record.sites == 0
    assert dump(untouched) == dump(other)


@pytest.mark.parametrize("name", CLEANING)
def test_autodeploy(name: str) -> None:
    _assert_external_is_sound(found(name), CLEANING[name])


@pytest.mark.parametrize("name", ["remove_copy_for_mutates_args", "recover_pass"])
def test_legacy(name: str) -> None:
    _assert_external_is_sound(found(name), lambda x: x.relu() + 1)


# --- the way to them


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU a failing pass fails the test")
def test_expected_failures_say_why() -> None:
    program = program_of(torch.relu, [torch.ones(2)])

    def needs_a_gpu(gm: fx.GraphModule) -> None:
        raise RuntimeError("no CUDA device")

    with pytest.raises(pytest.xfail.Exception, match=r"without a GPU: .*no CUDA device"):
        run_external(program, needs_a_gpu)
    _, record = run_external(program, lambda gm: gm)
    with pytest.raises(pytest.xfail.Exception, match="nothing recognised: another spelling"):
        expect_match(record, "another spelling")
