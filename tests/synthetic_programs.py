"""Programs built directly in FX: as large and as odd as a test needs, without an export."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from inlay.program import Binding, Bindings, Facts, Program, Role
from inlay.program.program import CallSpec, Symbol
from inlay.program.symbols import FakeValues
from inlay.program.weights import InMemoryTensor

aten = torch.ops.aten
WIDTH = 8


class Builder:
    """Adds nodes to a graph; every value is a `[batch, WIDTH]` tensor."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.fakes = FakeValues([Symbol("batch", 1, None, 6)])
        self.value = self.fakes.tensor(torch.float32, ("batch", WIDTH))
        self.square = self.fakes.tensor(torch.float32, (WIDTH, WIDTH))
        self.rows: list[Binding] = []
        self.tensors: dict[str, Any] = {}
        self.last_placeholder: fx.Node | None = None
        self.x = self.placeholder("x", Role.INPUT, "x", self.value, ("batch", WIDTH))

    def placeholder(self, name: str, role: Role, target: str, value: torch.Tensor, shape: tuple[Any, ...]) -> fx.Node:
        if self.last_placeholder is None:
            node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self.last_placeholder):
                node = self.graph.placeholder(name)
        self.last_placeholder = node
        node.meta["val"] = value
        self.rows.append(Binding(name, role, target, "float32", shape))
        return node

    def weight(self, target: str) -> fx.Node:
        name = "p_" + target.replace(".", "_")
        self.tensors[name] = InMemoryTensor(torch.eye(WIDTH))
        return self.placeholder(name, Role.PARAMETER, target, self.square, (WIDTH, WIDTH))

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = self.value
        node.meta["source"] = "synthetic.py:1"
        return node

    def finish(self, result: fx.Node) -> Program:
        self.graph.output((result,))
        rows = (*self.rows, Binding("output", Role.OUTPUT, "output", "float32", ("batch", WIDTH)))
        spec = CallSpec(pytree.tree_structure(((0,), {})), pytree.tree_structure(0), ("x",))
        return Program("synthetic", self.graph, Bindings(rows), self.tensors, self.fakes.symbols, spec, Facts())


def layered(layers: int, *, odd: tuple[int, ...] = ()) -> Program:
    """`layers` equal residual layers of ten nodes; the layers in `odd` have one node more."""
    make = Builder()
    hidden = make.call(aten.mul.Tensor, make.x, 3.0)
    for layer in range(layers):
        normed = make.call(aten.mul.Tensor, hidden, make.call(aten.sigmoid.default, hidden))
        up = make.call(aten.linear.default, normed, make.weight(f"layers.{layer}.up.weight"))
        gate = make.call(
            aten.silu.default, make.call(aten.linear.default, normed, make.weight(f"layers.{layer}.gate.weight"))
        )
        mixed = make.call(aten.mul.Tensor, up, gate)
        if layer in odd:
            mixed = make.call(aten.tanh.default, mixed)
        down = make.call(aten.linear.default, mixed, make.weight(f"layers.{layer}.down.weight"))
        hidden = make.call(aten.add.Tensor, hidden, make.call(aten.mul.Tensor, down, 0.5))
    return make.finish(make.call(aten.relu.default, hidden))


def irregular(nodes: int, seed: int = 0) -> Program:
    """A random graph without repeated blocks."""
    rng = random.Random(seed)
    make = Builder()
    unary = (aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.neg.default, aten.exp.default)
    recent = [make.x]
    for _ in range(nodes):
        if rng.random() < 0.4:
            node = make.call(rng.choice(unary), rng.choice(recent))
        else:
            node = make.call(rng.choice((aten.add.Tensor, aten.mul.Tensor)), rng.choice(recent), rng.randrange(50))
        recent = [*recent[-6:], node]
    return make.finish(recent[-1])
