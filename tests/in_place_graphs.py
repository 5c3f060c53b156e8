"""Post-grad graphs written by hand, for fix_functionalization: writes that go in place."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tools.fuzz_writes import operators  # noqa: F401 - registers torch.ops.inlay_fuzz
from torch import fx

from inlay.analysis.auto_functionalized import V1, V2

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.analysis.liveness import CopyReason

aten, fuzz = torch.ops.aten, torch.ops.inlay_fuzz


class Build:
    """A graph, run as it is built. Values are integers, so that results are exact."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: dict[str, torch.Tensor] = {}
        self.root = torch.nn.Module()

    def input(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        value = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
        self.inputs[node.name] = value
        node.meta["val"] = value.clone()
        return node

    def buffer(self) -> fx.Node:
        self.root.register_buffer("held", torch.arange(8).reshape(2, 4))
        node = self.graph.get_attr("held")
        node.meta["val"] = self.root.get_buffer("held").clone()
        return node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        given, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        value = target(*given, **named)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def put(self, base: fx.Node, y: fx.Node, **view: Any) -> fx.Node:
        """`put` in the second form of wrapper; its new value."""
        views = {f"_x_{name}": value for name, value in view.items()}
        return self.item(self(V2, fuzz.put.default, y=y, _x_base_index=0, **views, _all_bases=[base]), 1)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        return self(operator.getitem, node, index)

    def back(self, to: fx.Node, value: fx.Node) -> fx.Node:
        return self(aten.copy_.default, to, value)

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(self.root, self.graph)


@dataclass(frozen=True)
class Case:
    """A graph, how many writes go in place, why the others stay, and how many copies back are left."""

    build: Callable[[Build], fx.GraphModule]
    in_place: int
    stays: tuple[CopyReason, ...] = ()
    copies_left: int = 0


def v1_input(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.item(g(V1, fuzz.put.default, x=x, y=y), 1)
    g.back(x, new)
    return g.module(g(aten.add.Tensor, new, 1))


def v2_input(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.put(x, y)
    g.back(x, new)
    return g.module(g(aten.add.Tensor, new, 1))


def a_slice_of_an_input(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 4, 4), g.input("y", 4)
    g.back(x, g.put(x, y, slice_dim=0, slice_start=1, slice_end=3))
    return g.module()


def a_column_of_an_input(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 4, 4), g.input("y", 4)
    g.back(x, g.put(x, y, size=(4,), stride=(4,), storage_offset=1))
    return g.module()


def a_value_of_its_own(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    return g.module(g.put(g(aten.mul.Tensor, x, 2), y))


def a_clone_and_its_origin(g: Build) -> fx.GraphModule:
    """pytorch#198031 while the clone is there: the clone is written, its origin is read."""
    x = g.input("x", 2, 4)
    return g.module(g.put(g(aten.clone.default, x), x))


def two_writes_one_copy_back(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    once = g.put(x, y)
    twice = g.put(once, g(aten.mul.Tensor, once, 2))
    g.back(x, twice)
    return g.module(g(aten.add.Tensor, twice, 1))


def keys_and_values(g: Build) -> fx.GraphModule:
    k, v, y = g.input("k", 2, 4), g.input("v", 2, 4), g.input("y", 4)
    call = g(V2, fuzz.two.default, y=y, _x_base_index=0, _z_base_index=1, _all_bases=[k, v])
    g.back(k, g.item(call, 1))
    g.back(v, g.item(call, 2))
    return g.module(g.item(call, 0))


def a_list(g: Build) -> fx.GraphModule:
    k, v, y = g.input("k", 2, 4), g.input("v", 2, 4), g.input("y", 4)
    new = g.item(g(V1, fuzz.many.default, xs=[k, v], y=y), 1)
    g.back(k, g.item(new, 0))
    g.back(v, g.item(new, 1))
    return g.module()


def a_list_of_rows(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    rows: dict[str, Any] = {"_xs_length": 2}
    for row in range(2):
        rows |= {f"_xs_{row}_base_index": 0, f"_xs_{row}_slice_dim": 0}
        rows |= {f"_xs_{row}_slice_start": row, f"_xs_{row}_slice_end": row + 1}
    g.back(x, g.item(g(V2, fuzz.many.default, y=y, **rows, _all_bases=[x]), 1))
    return g.module()


def what_is_written_is_handed_on(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    call = g(V2, fuzz.bump_.default, y=y, _x_base_index=0, _all_bases=[x])
    g.back(x, g.item(call, 1))
    return g.module(g(aten.add.Tensor, g.item(call, 0), 1))


def one_is_missing(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    call = g(V2, fuzz.both.default, y=y, _x_base_index=0, _z_base_index=None, _all_bases=[x])
    g.back(x, g.item(call, 2))
    return g.module(g.item(call, 0), g.item(call, 1))


def read_before(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    old = g(aten.mul.Tensor, g(aten.select.int, x, 0, 0), 2)
    g.back(x, g.put(x, y))
    return g.module(g(aten.add.Tensor, old, 1))


def another_row_is_read_later(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 4, 4), g.input("y", 4)
    row = g(aten.select.int, x, 0, 3)
    new = g.put(x, y, slice_dim=0, slice_start=0, slice_end=2)
    read = g(aten.mul.Tensor, row, 2)
    g.back(x, new)
    return g.module(read)


def another_row_is_an_argument(g: Build) -> fx.GraphModule:
    x = g.input("x", 4, 4)
    g.back(x, g.put(x, g(aten.select.int, x, 0, 3), slice_dim=0, slice_start=0, slice_end=2))
    return g.module()


def copied_back_by_way_of_views(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    flat = g(aten.view.default, x, [8])
    g.back(x, g(aten.view.default, g.item(g(V1, fuzz.put.default, x=flat, y=y), 1), [2, 4]))
    return g.module()


def something_else_is_copied_over(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    g.back(x, g(aten.add.Tensor, g.put(x, y), 1))
    return g.module()


def a_buffer(g: Build) -> fx.GraphModule:
    y = g.input("y", 4)
    held = g.buffer()
    g.back(held, g.put(held, y))
    return g.module()


def sizes_are_read_later(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.put(g(aten.mul.Tensor, x, 2), y)
    g(aten.sym_size.int, g.graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0], 0)
    return g.module(new)


def an_input_with_gaps(g: Build) -> fx.GraphModule:
    """Its new value has no gaps, and lies in memory in another way."""
    x, y = g.input("x", 2, 4), g.input("y", 4)
    whole = torch.arange(16).reshape(2, 8)
    g.inputs["x"], x.meta["val"] = whole[:, ::2], whole.clone()[:, ::2]
    g.back(x, g.put(x, y))
    return g.module()


FIRES = {
    v1_input: Case(v1_input, 1),
    v2_input: Case(v2_input, 1),
    a_slice_of_an_input: Case(a_slice_of_an_input, 1),
    a_column_of_an_input: Case(a_column_of_an_input, 1),
    a_value_of_its_own: Case(a_value_of_its_own, 1),
    a_clone_and_its_origin: Case(a_clone_and_its_origin, 1),
    two_writes_one_copy_back: Case(two_writes_one_copy_back, 2),
    keys_and_values: Case(keys_and_values, 2),
    a_list: Case(a_list, 2),
    a_list_of_rows: Case(a_list_of_rows, 1),
    what_is_written_is_handed_on: Case(what_is_written_is_handed_on, 1),
    one_is_missing: Case(one_is_missing, 1),
    read_before: Case(read_before, 1),
    another_row_is_read_later: Case(another_row_is_read_later, 1),
    another_row_is_an_argument: Case(another_row_is_an_argument, 1),
    copied_back_by_way_of_views: Case(copied_back_by_way_of_views, 1),
    something_else_is_copied_over: Case(something_else_is_copied_over, 1, copies_left=1),
    a_buffer: Case(a_buffer, 1),
    an_input_with_gaps: Case(an_input_with_gaps, 1),
    sizes_are_read_later: Case(sizes_are_read_later, 1),
}
