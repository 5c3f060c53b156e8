"""Candidates: found by structure with the right counts, looked up before recommended, never counted twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import inlay
from inlay.config import resolve_config
from inlay.frontend import capture
from inlay.insight.candidates import Recommendation, find_candidates
from inlay.insight.candidates.measurement import measure
from inlay.insight.explanation import drop_contract
from inlay.ops.catalog import KERNELS, lookup
from inlay.testing import generated_code, program_of
from inlay.transforms import configure, run
from tests.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from inlay.insight.candidates import Candidate
    from inlay.program import Program

QUICK = ("lfm2",)


def _by_name(program: Program) -> dict[str, Candidate]:
    return {each.name: each for each in find_candidates(program).candidates}


def test_smollm2(smollm2_program: Program) -> None:
    """All transforms off: everything a decoder has, as often as it has it. Switched on: gone."""
    found = find_candidates(smollm2_program).candidates
    counts = {each.name: len(each.regions) for each in found[:10]}
    layers = smollm2_program.facts.layers
    assert layers is not None
    assert counts["rms_norm"] == 2 * layers.value + 1 == 61
    assert counts["rope"] == 60
    assert next(each for each in found if each.name == "rope").sharing.startswith("30 × 2 ")
    assert counts["add_rms_norm"] == 60
    assert (counts["swiglu"], counts["qkv_gemm"], counts["gate_up_gemm"]) == (30, 30, 30)
    steps = configure(resolve_config(architecture=smollm2_program.facts.architecture))
    left = _by_name(run(smollm2_program, steps)[0])
    assert not left.keys() & {"rms_norm", "rope", "add_rms_norm", "swiglu", "attention", "qkv_gemm", "gate_up_gemm"}
    assert {each.advice.recommendation for each in left.values()} <= {
        Recommendation.USE_EXISTING,
        Recommendation.DEFER,
    }


def _chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(x / 30) * 30 @ y
    return x


@pytest.mark.fast
def test_what_is_saved() -> None:
    """Three kernels of 64 bytes: two launches, and two values that are neither written nor read again."""
    (found,) = find_candidates(program_of(_chain, [torch.ones(4, 4)] * 2)).candidates
    assert (found.name, len(found.regions), found.pattern) == ("div_tanh_mul", 3, "tanh(x / 30) * 30")
    assert (found.savings.launches, found.savings.decode) == (3 * 2, 3 * 2 * 2 * 64)


@pytest.mark.fast
def test_a_way_out_and_back_in_is_no_chain() -> None:
    def around(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            z = x.tanh()
            x = z * (z @ y)
        return x

    assert "tanh_mul" not in _by_name(program_of(around, [torch.ones(4, 4)] * 2))


def _convolved(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = torch.nn.functional.conv1d(x, w, None, 1, 1, 1, 4).tanh() @ y
    return x


def test_what_inductor_does_by_itself() -> None:
    """The catalog says: pointwise chains and norms yes, a convolution with what stands around it no."""

    def normed(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        total = x + r
        return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)

    for function, name in ((lambda x, y: torch.tanh(x / 30) * 30 * y, "pointwise"), (normed, "reduction")):
        assert lookup([name])[0].source == "inductor"
        code = generated_code(function, (torch.randn(8, 64), torch.randn(8, 64)))
        assert (sum(code.kernels.values()), dict(code.external_kernels)) == (1, {})
    args = (torch.randn(2, 4, 4), torch.randn(4, 1, 3), torch.randn(4, 4))
    (found,) = find_candidates(program_of(_convolved, args)).candidates
    assert (found.advice.lookup, found.advice.recommendation) == ("not_found", Recommendation.TRITON)
    assert "causal_conv1d" in found.advice.weaknesses, "a part of it is known"
    code = generated_code(lambda x, w: torch.nn.functional.conv1d(x, w, None, 1, 1, 1, 4).tanh(), args[:2])
    assert code.external_kernels == {"convolution": 1}
    assert sum(code.kernels.values()) >= 1


def _small(folder: Path, model_type: str, layers: int = 2) -> Program:
    found = next(each for each in ARCHITECTURES if each.model_type == model_type)
    layers = layers if "layer_types" not in found.config else found.config["num_hidden_layers"]
    fields = found.full_config() | {"model_type": model_type, "num_hidden_layers": layers}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return capture(str(folder))


def _check(program: Program) -> dict[str, Candidate]:
    found = find_candidates(program)
    for each in found.candidates:
        advice = each.advice
        assert not (advice.kernels and advice.recommendation is Recommendation.TRITON), each.name
        assert advice.kernels or advice.recommendation is not Recommendation.USE_EXISTING
        if advice.recommendation is Recommendation.USE_EXISTING:
            assert advice.kernels[0].is_usable(each.dtype)
        assert advice.evidence
        assert advice.strengths
        assert advice.weaknesses
        assert advice.risks
    names = [each.name for each in found.candidates]
    assert len(set(names)) == len(names)
    told: dict[frozenset[str], str] = {}
    for each in found.candidates:
        for region in each.regions:
            assert told.setdefault(region.calls, each.name) == each.name, "one region under two names"
    return {each.name: each for each in found.candidates}


@pytest.mark.parametrize("model_type", QUICK)
def test_never_triton_where_something_was_found(model_type: str, tmp_path: Path) -> None:
    program = _small(tmp_path, model_type)
    raw = _check(program)
    steps = configure(resolve_config())
    _check(run(program, [drop_contract(step) for step in steps])[0])
    if model_type == "lfm2":
        conv = raw["gated_short_conv"]
        assert (len(conv.regions), conv.advice.kernels[0].transform) == (4, "match_gated_short_conv")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [each.model_type for each in ARCHITECTURES if each.model_type not in QUICK])
def test_never_triton_in_any_architecture(model_type: str, tmp_path: Path) -> None:
    program = _small(tmp_path, model_type)
    _check(program)
    _check(run(program, [drop_contract(step) for step in configure(resolve_config())])[0])


@pytest.mark.fast
def test_overlaps_are_told_and_not_counted_twice() -> None:
    def model(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            r = x + r
            x = (w * (r * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + 1e-6))) @ r.transpose(0, 1) @ r
        return x + r

    found = find_candidates(program_of(model, [torch.ones(4, 8), torch.ones(4, 8), torch.ones(8)]))
    both = {each.name: each for each in found.candidates}
    assert [len(both[name].regions) for name in ("rms_norm", "add_rms_norm")] == [3, 3]
    assert any("contains rms_norm (all)" in text for text in both["add_rms_norm"].overlaps)
    assert both["add_rms_norm"].savings.launches == 3, "only the addition: the norm's own are the norm's"
    kernels = sum(count for name, count in found.program.op_counts().items() if "transpose" not in name)
    assert found.total.launches < kernels


@pytest.mark.fast
def test_measured_times_decide_the_order() -> None:
    def model(x: torch.Tensor, y: torch.Tensor, big: torch.Tensor) -> Any:
        for _ in range(2):
            x = (((x / 3).tanh() * 3).exp() + 1) @ y
            big = (big * 2).sigmoid() @ big
        return x, big

    args = [torch.ones(4, 4), torch.ones(4, 4), torch.ones(600, 600)]
    plain = find_candidates(program_of(model, args))
    times = measure(plain)
    assert all(
        each.measurement is not None and each.measurement.seconds > each.measurement.savings
        for each in times.candidates
    )
    saved = [each.score for each in times.candidates]
    assert saved == sorted(saved, reverse=True)


@pytest.mark.fast
@pytest.mark.parametrize("entry", KERNELS, ids=lambda entry: entry.name)
def test_entries_of_the_catalog(entry: Any) -> None:
    """What is said to be in torch or Inlay is: file, symbol and operator. What is elsewhere names its repository."""
    place, _, symbols = entry.evidence.rpartition(":")
    roots = {"torch": Path(torch.__file__).parent, "inlay": Path(inlay.__file__).parent}
    first, _, rest = place.partition("/")
    if first in roots:
        text = (roots[first] / rest).read_text()
        for symbol in symbols.split(", "):
            assert all(f" {part}" in text for part in symbol.split(".")), symbol
    if entry.source in ("aten", "onednn", "quantized", "inlay", "inductor"):
        assert entry.is_available
    else:
        repository, _, path = place.partition(" ")
        assert repository.count("/") == 1
        assert path.endswith((".py", ".cpp"))


@pytest.mark.fast
def test_operators_of_installed_packages_are_found() -> None:
    name = "squashed_pairs"
    assert not lookup([name])
    library = torch.library.Library("somebody", "DEF")
    library.define(f"{name}(Tensor x) -> Tensor")
    (entry,) = lookup([name])
    assert (entry.source, entry.is_available, entry.evidence) == ("somebody", True, f"torch.ops.somebody.{name}")
