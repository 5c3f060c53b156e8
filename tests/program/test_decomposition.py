"""Making a program functional gives what torch's public way gives, whichever way is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export
from torch.nn import functional

from inlay.program import decomposition as adapter
from inlay.program.decomposition import ALWAYS_DECOMPOSED, decompose

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.fast

_ATEN = torch.ops.aten

APART: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    _ATEN.to.dtype: lambda x, y: x.to(torch.bfloat16),
    _ATEN.to.device: lambda x, y: _ATEN.to.device(x, torch.device("cpu"), torch.float64),
    _ATEN.to.dtype_layout: lambda x, y: _ATEN.to.dtype_layout(x, dtype=torch.float16),
    _ATEN.to.other: lambda x, y: _ATEN.to.other(x, y.half()),
    _ATEN.contiguous.default: lambda x, y: x.transpose(0, 1).contiguous(),
    _ATEN.reshape.default: lambda x, y: x.transpose(0, 1).reshape(-1),
    _ATEN.flatten.using_ints: lambda x, y: x.flatten(0, 1),
    _ATEN.unflatten.int: lambda x, y: x.unflatten(1, (2, -1)),
    _ATEN.view_as.default: lambda x, y: x.view_as(y),
    _ATEN.expand_as.default: lambda x, y: x[:, :1].expand_as(y),
    _ATEN.movedim.int: lambda x, y: x.movedim(0, 1),
    _ATEN.movedim.intlist: lambda x, y: x.movedim((0, 1), (1, 0)),
    _ATEN.sym_size.int: lambda x, y: x.sum() * x.shape[0],
    _ATEN.sym_numel.default: lambda x, y: x.sum() * x.numel(),
    _ATEN.chunk.default: lambda x, y: x.chunk(3, 1),
    _ATEN.narrow.default: lambda x, y: x.narrow(1, 1, 2),
    _ATEN.dropout.default: lambda x, y: functional.dropout(x, 0.5, training=True),
    _ATEN.numpy_T.default: lambda x, y: x.T,
}
"""An operator that is taken apart → a function that calls it."""


def _index(y: Tensor) -> Any:
    index = y.long()[0, 0].item()
    torch._check(index >= 0)
    torch._check(index < 5)
    return index


OTHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda x, y: (x, y),
    "plain": lambda x, y: torch.tanh(x * y + 1),
    "stays whole": lambda x, y: functional.linear(x, y).softmax(-1),
    "attention": lambda x, y: functional.scaled_dot_product_attention(x[None], y[None], y[None], is_causal=True),
    "in a sum of products": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "written in place": lambda x, y: (x + 1).add_(y).mul_(2),
    "an input is written": lambda x, y: x.copy_(y) + 1,
    "written through a view": lambda x, y: x.clone()[:, 0].fill_(1.0),
    "a composite operator in place": lambda x, y: (x + 1).multiply_(y),
    "a number read from a tensor": lambda x, y: x * y[0, 0].item(),
    "a slice at a number read from a tensor": lambda x, y: x.narrow(0, _index(y), 1),
    "a mask": lambda x, y: torch.where(x > 0, x, -torch.inf),
    "batch norm": lambda x, y: functional.batch_norm(x, y[0], y[0].abs(), training=False),
    "an upsampled image": lambda x, y: functional.interpolate(x[None], scale_factor=2),
}


class _Calls(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def _same(function: Callable[[Tensor, Tensor], Any], *, dynamic: bool) -> Any:
    sizes = {0: Dim("rows", max=64)} if dynamic else None
    shapes = {"x": sizes, "y": sizes} if dynamic else None
    made = [
        export(_Calls(function), (torch.randn(6, 6), torch.randn(6, 6)), dynamic_shapes=shapes, strict=False)
        for _ in range(2)
    ]
    one, two = decompose(made[0]), made[1].run_decompositions({})
    assert str(one.graph) == str(two.graph)
    assert str(one.graph_signature) == str(two.graph_signature)
    assert str(one.range_constraints) == str(two.range_constraints)
    types = [[str(node.meta.get("val")) for node in each.graph.nodes] for each in (one, two)]
    assert types[0] == types[1]
    return made[0]


def test_parts_are_not_composite() -> None:
    """All such operators in a graph that the short way takes: nothing they consist of would stay whole."""
    fixed = _same(lambda x, y: [each(x, y) for each in APART.values()], dynamic=False)
    free = _same(
        lambda x, y: [each(x, y) for name, each in APART.items() if "unflatten" not in str(name)], dynamic=True
    )
    called = {node.target for each in (fixed, free) for node in each.graph.nodes}
    assert (
        {*map(str, APART)}
        == {*map(str, ALWAYS_DECOMPOSED)}
        == {str(each) for each in called if each in ALWAYS_DECOMPOSED}
    )


def test_type_as_is_a_cast() -> None:
    x, y = torch.randn(6, 6) * 9, torch.randn(6, 6)
    program = decompose(export(_Calls(lambda x, y: x.type_as(y.int())), (x, y), strict=False))
    assert _ATEN.type_as.default not in {node.target for node in program.graph.nodes}
    assert torch.equal(program.module()(x, y), x.int())


@pytest.mark.parametrize("name", OTHERS)
def test_as_the_public_way(name: str) -> None:
    _same(OTHERS[name], dynamic=False)


def test_a_nested_graph_and_a_composite_operator_of_ours() -> None:
    library = torch.library.Library("inlay_test_composite", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: functional.linear(x, torch.eye(6)) * 2, "CompositeImplicitAutograd")
    _same(lambda x, y: torch.ops.inlay_test_composite.twice(x), dynamic=False)
    _same(lambda x, y: torch.cond(x.sum() > 0, lambda a: functional.linear(a, a), lambda a: a + 1, (x,)), dynamic=False)


def test_which_way_is_taken() -> None:
    """The short way exists on this torch, and is left for what it does not know."""
    assert adapter._load_torch_internals() is not None
    for target in (*ALWAYS_DECOMPOSED, _ATEN.linear.default, _ATEN.mul.Tensor, _ATEN.add_.Tensor, _ATEN.copy_.default):
        assert adapter._is_known(target), target
    for target in (torch.ops.higher_order.cond, _ATEN.multiply_.Tensor, _ATEN.feature_dropout_.default):
        assert not adapter._is_known(target), target


def test_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_load_torch_internals", lambda: None)
    _same(OTHERS["stays whole"], dynamic=False)
