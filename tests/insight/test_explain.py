"""Near misses: the right node and the right reason first; nothing of it runs unless somebody asks."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import inlay
from inlay.config import resolve_config
from inlay.errors import ContractError
from inlay.insight import explain
from inlay.insight.findings import SUGGESTIONS
from inlay.rewrite.near_misses import find_near_misses
from inlay.rewrite.reasons import Reason
from inlay.testing import program_of
from inlay.transforms import configure, run
from inlay.transforms.base import find_transform
from tests.insight.mutated_models import ALL, SOME, captured, compared, numbers_after, sites, steps_for, verdicts
from tests.insight.mutations import Place, second_consumer

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.insight import Finding
    from inlay.program import Program

SOURCE = Path(inlay.__file__).parent
EXPLAINING = {
    *(str(file) for file in (SOURCE / "insight").glob("*.py")),
    *(str(SOURCE / "rewrite" / name) for name in ("near_misses.py", "partial_match.py", "differences.py")),
}


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _norms(third: Callable[..., Any]) -> Program:
    """Four norms one after another, the third written by `third`."""

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for norm in (_norm, _norm, third, _norm):
            x = norm(x, weight).tanh()
        return x

    return program_of(model, [torch.randn(2, 3, 8), torch.rand(8)])


def _first(program: Program, transform: str = "match_rms_norm") -> Finding:
    (explained,) = explain(program, configure(resolve_config()), transform)
    return explained.findings[0]


def _cube(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6))


def _rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))


def _no_eps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


def _negated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * -torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _root(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _difference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w - x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rounded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * torch.rsqrt(x.bfloat16().pow(2).mean(-1, keepdim=True) + 1e-6))


def _wide_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _norm(x, w[None])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("third", "kind", "node"),
    [
        (_cube, Reason.CONSTANT, "pow"),
        (_rows, Reason.AXIS, "mean"),
        (_no_eps, Reason.MISSING, "rsqrt"),
        (_negated, Reason.EXTRA, "neg"),
        (_root, Reason.MISSING, "sqrt"),
        (_difference, Reason.MISSING, "sub"),
        (_rounded, Reason.DTYPE, "_to_copy"),
        (_wide_weight, Reason.SHAPE, "unsqueeze"),
    ],
)
def test_the_node_that_differs_and_why(third: Any, kind: Reason, node: str) -> None:
    first = _first(_norms(third))
    assert (first.kind, first.node.rstrip("_0123456789")) == (kind, node), first.text
    assert first.suggestion == SUGGESTIONS[kind]


@pytest.mark.fast
def test_other_consumers_are_told_apart_from_other_nodes() -> None:
    def model(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * (x * scale), scale

    first = _first(program_of(model, [torch.randn(2, 3, 8), torch.rand(8)]))
    assert (first.kind, first.node) == (Reason.ANOTHER_CONSUMER, "rsqrt")
    assert (first.matched, first.of, first.sites) == (6, 6, 0)


@pytest.mark.fast
def test_a_refusal_in_the_rules_own_words() -> None:
    class Own(find_transform("match_swiglu")):  # type: ignore[misc]
        def check(self, match: Any) -> None:
            match.require(False, Reason.REFUSED, "not on a Sunday")

    def gated(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * (x + 1)

    from inlay.transforms.pass_manager import TransformStep

    (explained,) = explain(program_of(gated, [torch.ones(3)]), [TransformStep("own", Own())])
    assert [(each.kind, each.reason) for each in explained.findings] == [(Reason.REFUSED, "refused: not on a Sunday")]


@pytest.mark.fast
def test_a_place_that_an_earlier_transform_took() -> None:
    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu

    def model(x: torch.Tensor) -> torch.Tensor:
        for gate in (gelu, silu, gelu):
            x = gate(x) * x.tanh()
        return x

    first = _first(program_of(model, [torch.ones(3)]), "match_geglu")
    assert (first.kind, first.sites) == (Reason.OVERLAP, 2)
    assert "replaced it by inlay.swiglu.default" in first.text


@pytest.mark.fast
def test_of_two_calls_alike_the_one_that_is_unusual_is_extra() -> None:
    class Twice(find_transform("match_clamped_swiglu")):  # type: ignore[misc]
        """As it is."""

    rule = Twice()

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        bounded = x.clamp(max=0.7)
        odd = (y.clamp(-0.7, 0.7) + 1) * (bounded * torch.sigmoid(bounded * 1.702 * 1.01))
        return rule.pattern(x, y, 1.702, -0.7, 0.7) + odd

    program = program_of(model, [torch.ones(3, 4), torch.ones(3, 4)])
    search = find_near_misses(program, rule)
    assert len(search.sites) == 1
    assert search.misses[0].node.args[1] == 1.01, search.misses[0].reason


@pytest.mark.fast
def test_a_program_that_has_nothing_alike_has_no_near_misses() -> None:
    explained = explain(program_of(lambda x: (x @ x).relu(), [torch.ones(3, 3)]), configure(resolve_config()))
    assert not [each for each in explained if each.findings]


@pytest.mark.fast
def test_an_unmet_contract_names_the_node_without_being_asked() -> None:
    """The matcher alone would stop at the factor that is not a norm; here the node too many is named."""
    program = program_of(_negated, [torch.randn(2, 3, 8), torch.rand(8)])
    with pytest.raises(ContractError, match=r"extra node: neg \(aten\.neg\.default\) stands in between"):
        run(program, configure(resolve_config()))


class _Calls:
    """Counts the calls of functions of some files."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Calls:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call" and frame.f_code.co_filename in EXPLAINING


@pytest.mark.fast
def test_a_run_that_asks_for_nothing_executes_no_explaining_code() -> None:
    """With misses in it: a miss that nobody asks about is kept as the matcher tells it."""
    assert all(Path(file).exists() for file in EXPLAINING)
    program, steps = _norms(_cube), configure(resolve_config())
    with _Calls() as plain:
        _, records = run(program, steps)
    assert any(record.remarks for record in records)
    assert plain.count == 0
    with _Calls() as asked:
        explain(program, steps)
    assert asked.count > 100


@pytest.mark.fast
def test_explaining_leaves_the_program_alone() -> None:
    from inlay.program.text.printer import dump

    program = _norms(_negated)
    before = dump(program)
    find_near_misses(program, find_transform("match_rms_norm")())  # type: ignore[arg-type]
    explain(program, configure(resolve_config()))
    assert dump(program) == before


@pytest.mark.fast
def test_findings_are_json() -> None:
    explained = explain(_norms(_cube), configure(resolve_config()), "match_rms_norm")
    (entry,) = json.loads(json.dumps([each.to_json() for each in explained]))
    assert entry["matches"] == 3
    assert entry["findings"][0]["kind"] == "constant differs"


def test_the_same_in_several_layers_is_one_finding() -> None:
    program, rng = captured("llama").copy(), random.Random(0)
    for layer in (1, 3):
        found, output = sites("llama", "match_swiglu")[layer]
        second_consumer(Place.of(program, found, output, rng))
    (explained,) = explain(program, steps_for("match_swiglu"), "match_swiglu")
    (finding,) = explained.findings
    assert (explained.sites, finding.layers, finding.node) == (2, (1, 3), "silu_1")
    assert finding.text.startswith(
        "2 of 4 matched; layers 1 and 3: 2 of 2 nodes: another consumer: silu_1 is also read"
    )
    assert finding.source in finding.text


def test_spoiled_places_are_explained() -> None:
    wrong = [str(verdict) for verdict in verdicts(seed=100, count=2, architectures=SOME) if not verdict.ok]
    assert not wrong, "\n".join(wrong)


def _assert_same_numbers(seed: int, count: int, architectures: tuple[str, ...]) -> None:
    found = list(compared(seed, count, architectures))
    assert [problem for _, problem in found if problem] == []
    assert sum(matches for matches, _ in found) >= count // 2, "too few of the places still match"


def test_numbers_where_a_changed_place_still_matches() -> None:
    _assert_same_numbers(seed=7, count=4, architectures=SOME)


@pytest.mark.nightly
def test_numbers_where_many_changed_places_still_match() -> None:
    _assert_same_numbers(seed=8, count=100, architectures=ALL)


def test_wrong_numbers_at_a_place_that_still_matches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = find_transform("match_swiglu")
    assert numbers_after(captured("llama"), "match_swiglu") is None
    monkeypatch.setattr(rule, "replacement", lambda self, gate, up: torch.ops.inlay.swiglu(up, gate))
    assert "match_swiglu: value 0 differs" in str(numbers_after(captured("llama"), "match_swiglu"))


@pytest.mark.nightly
def test_two_hundred_spoiled_places_are_explained() -> None:
    wrong = [str(verdict) for verdict in verdicts(seed=101, count=200, architectures=ALL) if not verdict.ok]
    assert len(wrong) <= 10, "\n".join(wrong)
