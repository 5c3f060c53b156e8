"""Every way of running a program gives what the module gives: results, arguments and state, over two calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from inlay.frontend import Example, capture
from inlay.program import Role
from inlay.program.fold import fold
from inlay.program.text.diff import diff
from inlay.program.text.folded_printer import dump_folded
from inlay.program.text.parser import parse
from inlay.program.text.printer import dump
from tests.program.regression_modules import Layer, SameName, examples, fresh

pytestmark = pytest.mark.fast
EXAMPLES = examples()
FUNCTIONAL = [name for name in EXAMPLES if name not in ("Kept", "Mutating")]


def _assert_same(left: Any, right: Any) -> None:
    for one, two in zip(tree_leaves(left), tree_leaves(right), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, two), (one, two)
        else:
            assert one == two


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("route", ["captured", "copied", "reloaded"])
def test_as_a_module(name: str, route: str) -> None:
    module, args = fresh(EXAMPLES[name])
    program = capture(EXAMPLES[name])
    if route == "copied":
        program = program.copy()
    elif route == "reloaded":
        text = dump(program)
        program = parse(text, program.tensors)
        if name not in ("Fours", "Positions"):  # one type is simplified differently with what export knew of the size
            assert dump(program) == text
    run = program.module()
    _, mine = fresh(EXAMPLES[name])
    before = dump(program)
    for _ in range(2):
        _assert_same(module(*args), run(*mine))
        _assert_same(args, mine)
    for target, value in module.named_buffers():
        assert torch.equal(value, dict(run.named_buffers())[target]), f"the state {target}"
    assert dump(program) == before, "running a program must not change it"
    original, _ = fresh(EXAMPLES[name])
    for target, value in original.named_buffers():
        assert torch.equal(value, dict(EXAMPLES[name].module.named_buffers())[target]), "nor the module it came from"


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_texts_as_python(name: str) -> None:
    module, args = fresh(EXAMPLES[name])
    program = capture(EXAMPLES[name])
    expected = tree_leaves(module(*args))
    for text in (dump(program), dump_folded(program), dump_folded(program, width=60)):
        space: dict[str, Any] = {}
        exec(compile(text, "text.py", "exec"), space)
        held = [program.tensors[row.name].read() for row in program.bindings.ins if row.role is not Role.INPUT]
        result = space["forward"](*([module] if "(folded)" in text else held), *fresh(EXAMPLES[name])[1])
        _assert_same(expected, list(result))


def test_layers_with_other_branches_are_not_one_kind() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                y = layer(x)
                if index == 3:
                    x = torch.cond(x.sum() > 0, lambda a, b: b - a, lambda a, b: a + b, (x, y))
                else:
                    x = torch.cond(x.sum() > 0, lambda a, b: a - b, lambda a, b: a + b, (x, y))
            return x

    folds = fold(capture(Example(Branches(), (torch.randn(3, 8),))))
    assert [len(kind) for kind in folds.kinds] == [5]
    assert len(folds.deviations) == 1


def test_a_buffer_and_an_argument_of_one_name() -> None:
    """The table tells them apart; torch's ExportedProgram does not, so it is not made."""
    from inlay.errors import ProgramError

    program = capture(Example(SameName(), (torch.ones(3),)))
    assert {row.alias.binding for row in program.bindings.outs if row.alias} == {"b_cache", "cache"}
    with pytest.raises(ProgramError, match="cache is the name of an argument and of a buffer"):
        program.module()


class Scaled(torch.nn.Module):
    scale: torch.Tensor

    def __init__(self, value: float, count: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((count,), value), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("count", [8, 100])
def test_values_that_are_in_no_checkpoint_are_compared(count: int) -> None:
    x = torch.ones(2, count)
    one, two, again = (capture(Example(Scaled(value, count), (x,))) for value in (1.0, 2.0, 1.0))
    assert diff(one, again).is_equal
    assert not diff(one, two).is_equal
    assert diff(one, two).binding_changes == ("buffer scale has different values",)


def test_ranges_are_compared_and_true() -> None:
    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] > 1 else x * 3

    axes = {"x": {0: "batch"}}
    asks = capture(Example(Branching(), (torch.ones(4, 3),), axes=axes))
    plain = capture(Example(torch.nn.ReLU(), (torch.ones(4, 3),), axes={"input": {0: "batch"}}))
    assert [symbol.low for symbol in asks.symbols.values()] == [2], "the model asked"
    assert [symbol.low for symbol in plain.symbols.values()] == [1]


def test_nothing_but_operators_can_be_named(tmp_path: Any) -> None:
    from inlay.errors import ProgramError

    text = dump(capture(EXAMPLES["Fours"]))
    for call in (
        "import_module.__call__.__call__('antigravity')",
        "load_library.__call__.__call__('/tmp/none.so')",
        "aten.mul.__call__(x, x)",
        "higher_order.__class__('x')",
    ):
        attacked = text.replace("    return (", f"    evil = {call}\n    return (", 1)
        with pytest.raises(ProgramError, match=r"not an operator|no overload"):
            parse(attacked)
