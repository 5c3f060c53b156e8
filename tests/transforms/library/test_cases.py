"""Every registered transform: fires where it says it does, and leaves alone what it says it must."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.program.bindings import Role
from inlay.rewrite import Match
from inlay.testing import assert_rewrites, assert_untouched, program_of
from inlay.testing.fuzz.checker import FuzzCounts, check
from inlay.testing.fuzz.program_builder import build_program
from inlay.transforms import Case, registry
from inlay.transforms.base import PatternTransform, Transform, find_transform

if TYPE_CHECKING:
    from inlay.program import Program

FIRES = [(name, case) for name, cls in registry().items() for case in cls.positive_cases()]
LEAVES = [(name, case) for name, cls in registry().items() for case in cls.negative_cases()]
pytestmark = pytest.mark.fast


def _id(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


_CAPTURED: dict[int, Program] = {}


def _captured(case: Case) -> Program:
    """A copy of what the case captures to, which takes longest: every test here starts from the same program."""
    if id(case) not in _CAPTURED:
        _CAPTURED[id(case)] = program_of(case.function, case.args, case.axes, case.prerequisites)
    return _CAPTURED[id(case)].copy()


@pytest.mark.parametrize("cls", registry().values(), ids=lambda cls: cls.name)
def test_declares_its_cases(cls: type[Transform]) -> None:
    assert len(cls.positive_cases()) >= 1
    assert len(cls.negative_cases()) >= 3
    assert cls.summary().endswith(".")


@pytest.mark.parametrize(("name", "case"), FIRES, ids=_id)
def test_fires(name: str, case: Case) -> None:
    applied = find_transform(name)().apply(_captured(case))
    assert applied.sites >= 1, [miss.reason for miss in applied.misses]
    assert_rewrites(_captured(case), name, args=case.args, sites=applied.sites)


@pytest.mark.parametrize(("name", "case"), LEAVES, ids=_id)
def test_leaves_alone(name: str, case: Case) -> None:
    assert_untouched(_captured(case), name, args=case.args)


def test_new_inputs_are_compared_elsewhere() -> None:
    """Transforms the tests here cannot compare by numbers, and which test does."""
    elsewhere = {"insert_kv_cache": "test_insert_kv_cache.py"}
    assert {name for name, cls in registry().items() if cls.adds_inputs} == set(elsewhere)
    for file in elsewhere.values():
        assert (Path(__file__).parent / file).exists()


def _rewrites() -> list[tuple[str, Case]]:
    first = dict(reversed(FIRES))
    return [(name, first[name]) for name, cls in registry().items() if issubclass(cls, PatternTransform)]


def _first_match(program: Program, name: str) -> Match:
    transform = find_transform(name)()
    assert isinstance(transform, PatternTransform)
    return next(found for found in transform.plan(program) if isinstance(found, Match))


@pytest.mark.parametrize(("name", "case"), _rewrites(), ids=_id)
def test_a_value_inside_that_is_read_outside(name: str, case: Case) -> None:
    """Every node inside the pattern, one after the other, gets another consumer."""
    program = _captured(case)
    match = _first_match(program, name)
    for node in match.nodes[:-1]:
        spoiled = program.copy()
        _also_return(spoiled, node.name, torch.ops.aten.neg.default)
        outcome = find_transform(name)().apply(spoiled)
        assert not outcome.sites, node.name
        assert any(miss.reason.startswith("another consumer") for miss in outcome.misses)


@pytest.mark.parametrize(("name", "case"), _rewrites(), ids=_id)
def test_a_result_with_mixed_consumers(name: str, case: Case) -> None:
    """What the pattern computes may be read by several, in several ways."""
    program = _captured(case)
    last = _first_match(program, name).nodes[-1].name
    _also_return(program, last, torch.ops.aten.neg.default)
    _also_return(program, last, torch.ops.aten.sum.default)
    whole = build_program(program.graph, _parameters(program), program.symbols)
    assert check(whole, [_inputs(program, case)], [name]) is None
    assert find_transform(name)().apply(program).sites == 1


@pytest.mark.parametrize(("name", "case"), FIRES, ids=_id)
def test_something_is_written_in_between(name: str, case: Case) -> None:
    """After every call in turn, an input and then the call's own result is written in place."""
    program = _captured(case)
    inputs = _inputs(program, case)
    calls = [node.name for node in program.graph.nodes if node.op == "call_function"]
    fired = set()
    for name_of_call in calls:
        for written in (next(iter(program.graph.nodes)).name, name_of_call):
            spoiled = program.copy()
            by_name = {node.name: node for node in spoiled.graph.nodes}
            value = by_name[written].meta["val"]
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or 0 in value.stride():
                continue
            with spoiled.graph.inserting_after(by_name[name_of_call]):
                node = spoiled.graph.call_function(torch.ops.aten.add_.Tensor, (by_name[written], 0.5))
            node.meta["val"] = value
            tally = FuzzCounts()
            whole = build_program(spoiled.graph, _parameters(spoiled), spoiled.symbols)
            assert check(whole, [inputs], [name], tally) is None
            fired.add(tally.matches[name])
    assert 0 in fired or len(calls) == 1 or not issubclass(registry()[name], PatternTransform), (
        "transforms may adapt, rules not"
    )


def _inputs(program: Program, case: Case) -> dict[str, torch.Tensor]:
    given = iter(case.args)
    return {
        row.name: next(given) if row.role is Role.INPUT else program.tensors[row.name].read()
        for row in program.bindings.ins
    }


def _parameters(program: Program) -> dict[str, torch.Tensor]:
    return {row.name: program.tensors[row.name].read() for row in program.bindings.with_role(Role.PARAMETER)}


def _also_return(program: Program, name: str, target: Any) -> None:
    output = program.graph.output_node()
    node = next(each for each in program.graph.nodes if each.name == name)
    value = node.meta["val"]
    with program.graph.inserting_before(output):
        if not isinstance(value, torch.Tensor):
            node = program.graph.call_function(operator.getitem, (node, 0))
            value = node.meta["val"] = value[0]
        more = program.graph.call_function(target, (node,))
    more.meta["val"] = target(value)
    returned: Any = output.args[0]
    output.args = ((*returned, more),)
