"""A program made functional call by call is the program torch makes of it as a whole."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay import Example
from inlay.frontend import capture
from inlay.frontend.call_deduplication import make_functional
from inlay.program.text.printer import dump
from tests.architectures import ARCHITECTURES
from tests.models import branch, convolutions, random_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch.export import ExportedProgram

    from inlay.program import Program

CAPTURE = importlib.import_module("inlay.frontend.export")
FEW = {"llama", "bloom"}
WRITES = {"mixtral", "qwen3_moe", "gpt_oss", "falcon", "deepseek_v3"}
"""Architectures that write in place on the way."""


def both(model: str | Example, monkeypatch: pytest.MonkeyPatch) -> tuple[Program, Program, list[str]]:
    """A model captured call by call and as a whole, and why the first had to be taken as a whole as well."""
    reasons: list[str] = []

    def as_a_whole(exported: ExportedProgram) -> Any:
        return exported.run_decompositions({})

    monkeypatch.setattr(
        CAPTURE, "make_functional", lambda exported: make_functional(exported, on_fallback=reasons.append)
    )
    ours = capture(model)
    monkeypatch.setattr(CAPTURE, "make_functional", as_a_whole)
    theirs = capture(model)
    # Torch leaves sizes behind that nobody uses.
    for program in (ours, theirs) if reasons else (theirs,):
        program.graph.eliminate_dead_code()
    return ours, theirs, reasons


def nameless(program: Program) -> str:
    """The text of a program, its values numbered."""
    names = {node.name for node in program.graph.nodes if node.op == "call_function"}
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        word = found.group()
        return numbers.setdefault(word, f"%{len(numbers)}") if word in names else word

    return re.sub(r"(?<![\w.])[A-Za-z_]\w*", number, dump(program))


def strides(program: Program) -> list[Any]:
    values = [node.meta.get("val") for node in program.graph.nodes]
    return [
        [
            (str(each.stride()), str(each.storage_offset()))
            for each in torch.utils._pytree.tree_leaves(value)
            if isinstance(each, torch.Tensor)
        ]
        for value in values
    ]


def aliases(program: Program) -> list[int]:
    """Which values share a storage."""
    first: dict[int, int] = {}
    values = [node.meta.get("val") for node in program.graph.nodes]
    return [
        first.setdefault(value.untyped_storage()._cdata, place) if isinstance(value, torch.Tensor) else -1
        for place, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each.model_type, marks=() if each.model_type in FEW else pytest.mark.nightly)
        for each in ARCHITECTURES
    ],
)
def test_architecture(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = next(each for each in ARCHITECTURES if each.model_type == model_type)
    random_model({"model_type": model_type, **architecture.full_config()}).save_pretrained(tmp_path)
    ours, theirs, reasons = both(str(tmp_path), monkeypatch)
    assert bool(reasons) == (model_type in WRITES)
    assert nameless(ours) == nameless(theirs)
    assert ours.op_counts() == theirs.op_counts()
    assert ours.symbols == theirs.symbols
    assert strides(ours) == strides(theirs)
    assert aliases(ours) == aliases(theirs)
    one, two = ours.module(), theirs.module()
    for shape in ((3, 21), (1, 1), (1, 40)):
        ids = torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            assert torch.equal(one(input_ids=ids)["logits"], two(input_ids=ids)["logits"])


class Function(torch.nn.Module):
    count: torch.Tensor

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def example(function: Any) -> Example:
    torch.manual_seed(0)
    return Example(Function(function), (torch.randn(3, 6, 4),), axes={"x": {0: "batch", 1: "length"}})


def equal(one: Any, two: Any) -> bool:
    pairs = zip(*(torch.utils._pytree.tree_leaves(each) for each in (one, two)), strict=True)
    return all(torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right for left, right in pairs)


def parts(module: Function, x: torch.Tensor) -> Any:
    left, right = x.chunk(2, dim=-1)
    top = x.topk(2, dim=-1)
    return [*x.unbind(-1), left * right, top.values, top.indices, *x.split([1, 3], dim=-1), torch.std_mean(x, dim=-1)]


def sizes(module: Function, x: torch.Tensor) -> Any:
    flat = x.reshape(-1, 4)
    rows = torch.arange(x.shape[0] * x.shape[1]).to(x.dtype)
    return flat.t().reshape(4, x.shape[0], x.shape[1]), rows, x.new_zeros(x.shape[1]), torch.cat([x, x], dim=1)


def handed_on(module: Function, x: torch.Tensor) -> Any:
    y = x.contiguous().to(torch.float32)
    return x, y, y.to(torch.float64), torch.dropout(y, 0.5, False), 3, None, module.count, y[..., 1:].detach()


def without_gradients(module: Function, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x.transpose(0, 1).reshape(-1, 4).softmax(-1)
    return y * 2.0, y * -0.0, y * 0.0, y * 2


@pytest.mark.fast
@pytest.mark.parametrize("function", [parts, sizes, handed_on, without_gradients])
def test_calls(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several results, sizes that are computed, operands handed on, nested graphs of torch's own making."""
    ours, theirs, reasons = both(example(function), monkeypatch)
    assert reasons == []
    assert nameless(ours) == nameless(theirs)
    assert strides(ours) == strides(theirs)
    assert aliases(ours) == aliases(theirs)
    for shape in ((3, 6, 4), (1, 1, 4), (2, 5, 4)):
        x = torch.randn(shape)
        assert equal(ours.module()(x), theirs.module()(x))


def writes_through_a_view(module: Function, x: torch.Tensor) -> Any:
    y = x * 2
    y[:, 0].add_(1)
    return y, y.view(-1).sum()


def writes_to_a_buffer(module: Function, x: torch.Tensor) -> Any:
    module.count.add_(1)
    return x + module.count


def writes_to_an_input(module: Function, x: torch.Tensor) -> Any:
    x.mul_(2)
    return x.sum()


def branches(module: Function, x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda value: value + 1, lambda value: value * 2, (x,))


def sizes_from_data(module: Function, x: torch.Tensor) -> Any:
    return x.flatten()[x.flatten() > 0]


def computed_sizes(module: Function, x: torch.Tensor) -> Any:
    return torch.cat([x, x], dim=1).transpose(0, 1).flatten()


def constants(module: Function, x: torch.Tensor) -> Any:
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0])


def returns_sizes(module: Function, x: torch.Tensor) -> Any:
    return x * 2, x.shape[0]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (writes_through_a_view, "writes in place"),
        (writes_to_a_buffer, "writes in place"),
        (writes_to_an_input, "writes in place"),
        (branches, "nested graph"),
        (sizes_from_data, "depends on data"),
        (computed_sizes, "not its operand"),
        (constants, "writes in place"),
        (returns_sizes, "not a single tensor"),
    ],
)
def test_as_a_whole(function: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be taken call by call goes through torch as it always did."""
    ours, theirs, reasons = both(example(function), monkeypatch)
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert nameless(ours) == nameless(theirs)
    for shape in ((3, 6, 4), (2, 5, 4)):
        x = torch.randn(shape)
        one, two = x.clone(), x.clone()
        assert equal(ours.module()(one), theirs.module()(two))
        assert torch.equal(one, two)


@pytest.mark.fast
def test_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, reasons = both(convolutions(), monkeypatch)
    assert reasons == []
    assert nameless(ours) == nameless(theirs)
    ours, theirs, reasons = both(branch(), monkeypatch)
    assert len(reasons) == 1
    assert nameless(ours) == nameless(theirs)


def test_layers_add_no_kinds_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes through torch is the same for 2 layers and for 9."""
    from inlay.frontend import call_kinds
    from inlay.program.functionalization import functionalize_to_exported
    from tests.architectures import without_weights

    counts: list[int] = []

    def counting(module: Any, fakes: Any) -> Any:
        counts.append(len(module.graph.nodes))
        return functionalize_to_exported(module, fakes)

    monkeypatch.setattr(call_kinds, "functionalize_to_exported", counting)
    for layers in (2, 9):
        capture(without_weights(tmp_path / str(layers), "llama", layers))
    assert counts[0] == counts[1] > 0
