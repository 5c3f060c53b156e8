"""The fuzzer: a thousand places in CI, a hundred thousand and the deletion of every condition in the nightly tier."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.analysis.masks.classification import MaskAnalysis, MaskKind
from inlay.testing import program_of
from inlay.testing.fuzz.__main__ import run
from inlay.testing.fuzz.checker import FuzzCounts, InvalidProgramError, check, compute
from inlay.testing.fuzz.generator import generate_program
from inlay.testing.fuzz.reducer import reduce_failure, render_script
from inlay.testing.fuzz.templates import Templates
from inlay.transforms import registry
from inlay.transforms.library.match_layer_norm import MatchLayerNorm
from inlay.transforms.library.match_swiglu import MatchSwiGLU

if TYPE_CHECKING:
    from inlay.program import Program
    from inlay.rewrite import Match


def _assert_sound(report: dict[str, Any], places: int, fired: int) -> None:
    assert report["failures"] == []
    assert report["places"] >= places
    assert sum(report["not computed"].values()) <= report["graphs"] // 50, report["not computed"]
    assert report["ill-conditioned"] <= report["values"] // 10
    # A transform that adds inputs needs sizes that change, which these graphs have not: test_insert_kv_cache_refusals
    # grows its own.
    seldom = {name: counts["fired"] for name, counts in report["transforms"].items() if counts["fired"] < fired}
    assert {name for name in seldom if not registry()[name].adds_inputs and name != LARGE} == set()


LARGE = "match_routed_experts"
"""Of so many calls that hardly one place is left whole among those of others: it has graphs of its own."""


def test_some_hundred_places(tmp_path: Path) -> None:
    _assert_sound(run(54, 16, [], tmp_path), places=200, fired=1)  # with this seed every transform fires


@pytest.mark.nightly
def test_routed_experts(tmp_path: Path) -> None:
    report = run(1_600, 1, [LARGE], tmp_path)
    assert report["failures"] == []
    assert report["places"] >= 5_000
    assert report["transforms"][LARGE]["fired"] >= 20


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_thousand_places(seed: int, tmp_path: Path) -> None:
    """Twice: a hundred thousand."""
    _assert_sound(run(10_000, seed, [], tmp_path), places=50_000, fired=500)


@pytest.mark.nightly
def test_no_condition_can_be_deleted_unnoticed() -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[3] / "tools" / "condition_deletion.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.fast
def test_the_same_seed_grows_the_same_graph() -> None:
    templates = Templates(["match_swiglu"])
    one, two = (generate_program(random.Random("1/2"), templates.sample) for _ in range(2))
    assert str(one[0].graph) == str(two[0].graph)
    for left, right in zip(one[1], two[1], strict=True):
        assert all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.fast
def test_a_wrong_rule_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def anything(self: MatchSwiGLU, match: Match) -> None:
        pass

    monkeypatch.setattr(MatchSwiGLU, "check", anything)
    monkeypatch.setattr(MatchSwiGLU, "replacement", lambda self, gate, up: torch.ops.inlay.swiglu(up, gate))
    templates = Templates(["match_swiglu"])
    for index in range(200):
        program, inputs, _ = generate_program(random.Random(f"3/{index}"), templates.sample)
        found = check(program, inputs, ["match_swiglu"])
        if found is not None:
            break
    assert found is not None
    small = reduce_failure(found)
    calls = [node for node in small.program.graph.nodes if node.op == "call_function"]
    assert len(calls) == 2
    file = tmp_path / "repro.py"
    file.write_text(render_script(small, "a test"))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True)
    assert done.stdout == "the numbers agree\n", "the rule is only wrong in this process"
    assert done.returncode == 0


def _first_off(rule: MatchLayerNorm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    right = LAYER_NORM(rule, x, weight, eps).reshape(-1)
    return torch.cat([right[:1] + 1e-3, right[1:]]).reshape(x.shape)


LAYER_NORM = MatchLayerNorm.replacement
SMALL_FAULTS = {
    "another eps": lambda self, x, weight, eps: LAYER_NORM(self, x, weight, eps + 1e-5),
    "one element off by 1e-3": _first_off,
    "a scale off by 0.1 %": lambda self, x, weight, eps: LAYER_NORM(self, x, weight * 1.001, eps),
}


@pytest.mark.fast
@pytest.mark.parametrize("fault", [None, *SMALL_FAULTS])
def test_small_faults_beside_large_values(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would have passed within 1e-3 of the largest value, which is what a tolerance for a whole tensor gives."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 8, generator=generator), torch.ones(8)
    weight[-1] = 500.0
    program = program_of(lambda x, w: MatchLayerNorm().pattern(x, w, 1e-6), [x, weight])
    inputs = {row.name: value for row, value in zip(program.bindings.ins, (x, weight), strict=True)}
    tally = FuzzCounts()
    if fault is None:
        assert check(program, [inputs], ["match_layer_norm"], tally) is None
        assert tally.matches["match_layer_norm"] == 1
        return
    monkeypatch.setattr(MatchLayerNorm, "replacement", SMALL_FAULTS[fault])
    found = check(program, [inputs], ["match_layer_norm"], tally)
    assert found is not None
    assert found.problem.startswith("value 0 differs by ")
    right, wrong = (compute(each, inputs).values[0] for each in (program, _applied(program)))
    assert (right - wrong).abs().max() < 1e-3 * (1 + right.abs().max())


@pytest.mark.fast
@pytest.mark.parametrize(("number", "noticed"), [(math.nan, True), (math.inf, True), (1e30, False)])
def test_what_is_not_finite(number: float, noticed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement that hides NaN is noticed where it went in; squares that overflow show nothing either way."""
    hiding = lambda self, x, weight, eps: LAYER_NORM(self, x.clamp(-1e9, 1e9).nan_to_num(), weight, eps)  # noqa: E731
    monkeypatch.setattr(MatchLayerNorm, "replacement", hiding)
    x, weight = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)), torch.ones(8)
    x[0, 0, 0], x[0, 0, 1] = number, -number
    program = program_of(lambda x, w: MatchLayerNorm().pattern(x, w, 1e-6), [x, weight])
    inputs = {row.name: value for row, value in zip(program.bindings.ins, (x, weight), strict=True)}
    tally = FuzzCounts()
    found = check(program, [inputs], ["match_layer_norm"], tally)
    assert (found is not None) is noticed
    assert noticed or tally.ill_conditioned == x.numel(), "it is counted as showing little"


@pytest.mark.fast
def test_a_mask_of_infinities_hides_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """-inf that a program writes down is no overflow: a mask that is misunderstood is found."""
    x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))

    def attend(x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[2])
        mask = torch.where(at[None, :] <= at[:, None], 0.0, -math.inf)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    program = program_of(attend, [x])
    inputs = {program.bindings.ins[0].name: x}
    assert check(program, [inputs], ["match_attention"]) is None
    monkeypatch.setattr(MaskAnalysis, "classify", lambda self, mask, reader: MaskKind(False))
    assert check(program, [inputs], ["match_attention"]) is not None


def _applied(program: Program) -> Program:
    return MatchLayerNorm().apply(program.copy()).program


@pytest.mark.fast
def test_what_cannot_be_computed_is_not_counted() -> None:
    program = program_of(lambda x, index: x[index].relu(), [torch.ones(3), torch.tensor([1])])
    inputs = [{"x": torch.ones(3), "index": torch.tensor([7])}]
    inputs = [{row.name: value for row, value in zip(program.bindings.ins, inputs[0].values(), strict=True)}]
    with pytest.raises(InvalidProgramError, match="out of bounds"):
        check(program, inputs)


@pytest.mark.nightly
def test_everything_is_drawn() -> None:
    """Symbols, empty tensors, branches, every dtype, extremes, one value read far apart, masks that are written."""
    templates = Templates(["match_swiglu", "match_attention"], variants=4)
    seen: set[str] = set()
    for index in range(150):
        program, runs, _ = generate_program(random.Random(f"5/{index}"), templates.sample)
        seen |= {f"{len(runs)} runs", *(str(value.dtype) for value in runs[0].values())}
        values = [value for value in runs[0].values() if value.is_floating_point()]
        seen |= {"nan" for value in values if value.isnan().any()} | {"inf" for value in values if value.isinf().any()}
        seen |= {"empty" for value in values if not value.numel()}
        nodes = list(program.graph.nodes)
        for node in nodes:
            places = [nodes.index(user) for user in node.users]
            seen |= {"far apart"} if places and max(places) - min(places) > 20 else set()
            seen |= {str(node.target)} if node.op == "call_function" else set()
    assert seen >= {"1 runs", "3 runs", "nan", "inf", "empty", "far apart", "cond", "aten.bitwise_not_.default"}
    assert seen >= {f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64")}


@pytest.mark.fast
def test_every_transform_has_templates() -> None:
    assert set(Templates().keys) == set(registry())


@pytest.mark.fast
def test_attention_without_a_mask_drops_nan() -> None:
    """torch 2.13 on a CPU. Where this fails, `_may_drop_nan` of the checker has no reason any more."""
    query = torch.randn(1, 2, 5, 8)
    query[:, :, 2] = float("nan")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert not sdpa(query, query[:, :, :2], query[:, :, :2]).isnan().any()
    assert sdpa(query, query[:, :, :2], query[:, :, :2], torch.ones(5, 2, dtype=torch.bool)).isnan().any()
