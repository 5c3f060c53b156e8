"""Wrappers of functionalization, written by hand: one that is understood, and each way in which one is not."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx

from inlay.analysis.auto_functionalized import V1, V2, BaseView, parse_auto_functionalized
from inlay.program.program import Symbol
from inlay.program.symbols import FakeValues

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
LISTS = aten._foreach_add_.Scalar
"""Writes to a list of tensors, and returns nothing."""
pytestmark = pytest.mark.fast


class Wrapper:
    """A graph with two tensors and one wrapper."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.y = self.graph.placeholder("x"), self.graph.placeholder("y")
        self.x.meta["val"] = self.y.meta["val"] = torch.empty(4)

    def v1(self, /, **changes: Any) -> fx.Node:
        """What writes to a list of both."""
        given = {"self": [self.x, self.y], "scalar": 1, **changes}
        return self.graph.call_function(V1, (LISTS,), given)

    def v2(self, /, **changes: Any) -> fx.Node:
        """What writes to the first half of `x`."""
        view = {"_self_base_index": 0, "_self_slice_dim": 0, "_self_slice_start": 0, "_self_slice_end": 2}
        given = {"src": self.y, "_all_bases": [self.x], **view, **changes}
        return self.graph.call_function(V2, (aten.copy_.default,), given)

    def result(self, of: fx.Node, index: int) -> fx.Node:
        return self.graph.call_function(operator.getitem, (of, index))


def test_a_list_that_is_written() -> None:
    made = Wrapper()
    call = made.v1()
    made.result(made.result(call, 1), 0)
    found = parse_auto_functionalized(call)
    assert found is not None
    assert (found.bases, found.result_indices, found.lists) == ((made.x, made.y), ((1, 0), (1, 1)), (1,))


def test_a_slice_that_is_written() -> None:
    made = Wrapper()
    found = parse_auto_functionalized(made.v2())
    assert found is not None
    assert (found.bases, found.arguments["self"]) == ((made.x,), BaseView(0, slice=(0, 0, 2)))
    region = found.arguments["self"].byte_range(made.x.meta["val"])
    assert (region.start, region.end) == (0, 8)


def a_list_read_as_a_whole(made: Wrapper) -> fx.Node:
    call = made.v1()
    made.graph.call_function(aten.cat.default, (made.result(call, 1),))
    return call


def a_result_that_is_none_is_read(made: Wrapper) -> fx.Node:
    call = made.v1()
    made.graph.call_function(aten.relu.default, (made.result(call, 0),))
    return call


REFUSED: list[Callable[[Wrapper], fx.Node]] = [
    a_list_read_as_a_whole,
    a_result_that_is_none_is_read,
    lambda made: made.v1(self=[made.x, 3]),
    lambda made: made.v2(_all_bases=None),
    lambda made: made.v2(_all_bases=[]),
    lambda made: made.v2(_all_bases=[made.x, 3]),
    lambda made: made.v2(_self_turned=True),
]


@pytest.mark.parametrize("make", REFUSED)
def test_not_understood(make: Callable[[Wrapper], fx.Node]) -> None:
    assert parse_auto_functionalized(make(Wrapper())) is None


def test_bytes_that_are_not_known() -> None:
    half = BaseView(0, slice=(0, 0, 2))
    fakes = FakeValues([Symbol("batch", 3, None, 4)])
    assert half.byte_range(torch.eye(4).to_sparse()) is None
    assert half.byte_range(fakes.tensor(torch.float32, ("batch",))) is None
