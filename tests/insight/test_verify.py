"""Every transform is classified; planted faults are found and named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx

from inlay.config import resolve_config
from inlay.errors import ProgramError
from inlay.frontend import capture
from inlay.frontend.huggingface.checkpoint import HFOptions
from inlay.insight.interpreter import ProgramInterpreter, random_inputs
from inlay.insight.verify import Change, NumericsCheck, NumericsVerdict
from inlay.testing import program_of
from inlay.transforms import configure, run
from inlay.transforms.base import Numerics, Stage, Transform, TransformResult
from inlay.transforms.pass_manager import TransformStep
from tests.architectures import config_of
from tests.models import LLAMA, llama_folder, random_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inlay.program.program import Program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return capture(str(llama_folder(tmp_path_factory.mktemp("llama"))), HFOptions(dtype=torch.bfloat16))


def _verdicts(program: Program, *steps: TransformStep, expected: dict[str, int] | None = None) -> list[NumericsVerdict]:
    seen = NumericsCheck(expected or {})
    run(program, list(steps), [seen])
    return seen.verdicts


def _changes(node_of: str, change: Callable[[fx.Graph, fx.Node], fx.Node]) -> TransformStep:
    """A transform that changes the first call of an operator."""

    class Changes(Transform):
        """For one test."""

        name, stage, numerics = "changes", Stage.FUSE, Numerics.ROUNDING

        def apply(self, program: Program) -> TransformResult:
            node = next(each for each in program.graph.nodes if node_of in str(each.target))
            with program.graph.inserting_after(node):
                new = change(program.graph, node)
            new.meta = {**node.meta, **new.meta}
            node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
            return TransformResult(program, 1)

    return TransformStep("changes", Changes())


def _call(target: Any, *rest: Any) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    return lambda graph, node: graph.call_function(target, (node, *rest))


def test_the_default_transforms(program: Program) -> None:
    verdicts = _verdicts(program, *configure(resolve_config(settings=["match_geglu.enabled=false"])))
    assert {each.transform for each in verdicts} >= {"match_rms_norm", "match_attention", "match_rope", "match_swiglu"}
    for each in verdicts:
        assert each.change in (Change.NONE, Change.MORE_ACCURATE, Change.LESS_ACCURATE)
        assert 0 < each.error_after < 0.05, "bfloat16 against float64"


def test_wrong(program: Program) -> None:
    (verdict,) = _verdicts(program, _changes("silu", _call(torch.ops.aten.mul.Tensor, 3.0)))
    assert verdict.change is Change.WRONG
    assert verdict.worst
    assert any("modeling_llama.py" in each.source for each in verdict.worst)


def test_not_finite(program: Program) -> None:
    (verdict,) = _verdicts(program, _changes("silu", _call(torch.ops.aten.mul.Tensor, float("nan"))))
    assert (verdict.change, verdict.reason) == (Change.WRONG, "not finite")


def test_rounding(program: Program) -> None:
    (verdict,) = _verdicts(program, _changes("silu", _call(torch.ops.aten.mul.Tensor, 1.004)))
    assert verdict.change in (Change.MORE_ACCURATE, Change.LESS_ACCURATE)
    assert verdict.difference > 0
    assert (verdict.error_after <= verdict.error_before) == (verdict.change is Change.MORE_ACCURATE)


def test_nothing(program: Program) -> None:
    (verdict,) = _verdicts(program, _changes("silu", _call(torch.ops.aten.clone.default)))
    assert (verdict.change, verdict.difference) == (Change.NONE, 0.0)


@torch.library.custom_op("inlay_test::in_float64_only", mutates_args=())
def _in_float64_only(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float64:
        raise RuntimeError("no kernel")
    return x + 1


@_in_float64_only.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.fast
def test_a_program_that_fails_is_not_passed_over() -> None:
    """Without its results, no transform could be compared, and none would be called wrong."""
    step = _changes("aten.relu", _call(torch.ops.aten.mul.Tensor, 2.0))
    failing = program_of(lambda x: torch.relu(_in_float64_only(x)), [torch.ones(3)])
    with pytest.raises(ProgramError, match=r"The program fails before the transforms run: .*no kernel\."):
        _verdicts(failing, step)
    (verdict,) = _verdicts(program_of(torch.relu, [torch.ones(3)]), step)
    assert verdict.change is Change.WRONG


def test_lost_sources(program: Program) -> None:
    def clone(graph: fx.Graph, node: fx.Node) -> fx.Node:
        new = graph.call_function(torch.ops.aten.clone.default, (node,))
        new.meta = {"val": node.meta["val"], "source": "", "module": ""}
        return new

    (verdict,) = _verdicts(program, _changes("silu", clone))
    assert verdict.change is Change.METADATA_LOSS
    assert "1 calls lost their source location" in verdict.reason


def test_fewer_sites_than_before(program: Program) -> None:
    steps = configure(resolve_config(settings=["match_rms_norm.enabled=true"]))
    (norm,) = [step for step in steps if step.key == "match_rms_norm"]
    (verdict,) = _verdicts(program, norm, expected={"match_rms_norm": 9})
    assert (verdict.change, verdict.reason) == (Change.MATCH_LOSS, "4 fewer sites than expected")


def test_precise_running_is_more_precise(program: Program) -> None:
    runner, inputs = ProgramInterpreter(), random_inputs(program)
    (rough,), (precise,) = runner(program, inputs), runner(program, inputs, compute_dtype=torch.float64)
    assert (rough.dtype, precise.dtype) == (torch.bfloat16, torch.float64)
    assert rough.shape == precise.shape
    error = float((rough.double() - precise).norm() / precise.norm())
    assert 1e-4 < error < 5e-2
    assert LLAMA["num_hidden_layers"] == 2


FIVE = ("llama", "qwen3", "gemma2", "cohere", "bloom")


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(each, marks=pytest.mark.nightly) for each in FIVE[1:])]
)
def test_architectures_in_half_precision(architecture: str, tmp_path: Path) -> None:
    """Every transform is classified. Weights are large enough for attention to prefer some tokens to others."""
    config = config_of(architecture, num_hidden_layers=2, initializer_range=0.2)
    random_model(config).save_pretrained(tmp_path)
    program = capture(str(tmp_path), HFOptions(dtype=torch.bfloat16))
    seen = NumericsCheck(rounds=8)
    _, records = run(program, configure(resolve_config()), [seen])
    assert [each.transform for each in seen.verdicts] == [record.key for record in records if record.sites]
    changes = {each.transform: each.change for each in seen.verdicts}
    may_round = {"cohere": {"match_layer_norm"}, "bloom": {"match_softmax_attention"}}.get(architecture, set())
    assert {key for key, change in changes.items() if change is not Change.NONE} <= may_round
    assert not set(changes.values()) & {Change.WRONG, Change.MATCH_LOSS, Change.METADATA_LOSS}
    if architecture == "bloom":
        (fused,) = [each for each in seen.verdicts if each.transform == "match_softmax_attention"]
        assert fused.change is Change.MORE_ACCURATE, "scores are not rounded to half precision before the softmax"
        assert fused.error_after < 0.98 * fused.error_before
