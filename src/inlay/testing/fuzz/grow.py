"""Grow a graph from templates: places stand side by side, read each other's values, and some are spoiled on purpose."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from inlay.program.bindings import Binding, Bindings, Role
from inlay.program.facts import Facts
from inlay.program.program import Calling, Program
from inlay.program.symbols import FakeValues, symbolic_sizes
from inlay.program.weights import InMemory

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping

    from inlay.testing.fuzz.templates import Template

aten = torch.ops.aten
_SIBLINGS = (
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    (aten.silu.default, aten.gelu.default, aten.relu.default, aten.tanh.default, aten.sigmoid.default),
    (aten.rsqrt.default, aten.sqrt.default, aten.neg.default, aten.cos.default),
)
_OTHER_DTYPE = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.int64: torch.int32}


class Impossible(Exception):  # noqa: N818 - a spoiled place that no longer computes anything is a result
    """A place that cannot be computed the way it was spoiled."""


class Growth:
    """A graph that grows, the values in it, and what its inputs are."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.graph = fx.Graph()
        self.fakes = FakeValues([])
        self.inputs: dict[fx.Node, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.values: list[fx.Node] = []
        self.outputs: list[fx.Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One call more; impossible if it cannot be computed."""
        values, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        if target is aten.scaled_dot_product_attention.default and values[1].shape[:-1] != values[2].shape[:-1]:
            raise Impossible("torch reads past the end of such keys and values instead of saying so")
        try:
            with self.fakes.mode:
                value = target(*values, **named)
        except Exception as error:
            raise Impossible(str(error)) from error
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self.values.append(node)
        return node

    def input(self, value: torch.Tensor) -> fx.Node:
        """A new input, which stands before every call."""
        calls = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(calls) if calls is not None else self.graph.inserting_after(None):
            node = self.graph.placeholder(f"in_{len(self.inputs)}")
        node.meta["val"] = self.fakes.tensor(value.dtype, tuple(value.shape))
        self.inputs[node] = value
        return node

    def leaf(self, value: torch.Tensor, *, fixed: bool) -> fx.Node:
        """A value of this type: one that is there, a view of something larger, or a new input."""
        rng = self.rng
        if not fixed:
            alike = [node for node in (*self.values, *self.inputs) if _alike(node.meta["val"], value)]
            if alike and rng.random() < 0.35:
                return rng.choice(alike)
            value = self._spoiled(value) if rng.random() < 0.08 else value
            value = torch.randn(value.shape, generator=self._generator()).to(value.dtype)
            if rng.random() < 0.15 and value.dim():
                return self._view(value)
        return self.input(value)

    def _spoiled(self, value: torch.Tensor) -> torch.Tensor:
        """Another dtype or another shape."""
        shape = list(value.shape)
        match self.rng.randrange(4):
            case 0:
                return value.to(_OTHER_DTYPE.get(value.dtype, value.dtype))
            case 1 if shape:
                shape[self.rng.randrange(len(shape))] = 1
            case 2 if shape:
                shape = shape[1:]
            case _:
                shape = [self.rng.choice((1, 2)), *shape]
        return torch.ones(shape, dtype=value.dtype)

    def _view(self, value: torch.Tensor) -> fx.Node:
        """The value as a view of a larger, turned or broadcast one."""
        axis = self.rng.randrange(value.dim())
        match self.rng.randrange(3):
            case 0:
                whole = self.input(torch.cat([value, value], axis))
                return self.call(aten.slice.Tensor, whole, axis, 0, value.shape[axis])
            case 1:
                turned = self.input(value.transpose(0, axis).contiguous())
                return self.call(aten.transpose.int, turned, 0, axis)
            case _:
                part = self.input(value.narrow(axis, 0, 1).contiguous())
                return self.call(aten.expand.default, part, list(value.shape))

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.rng.randrange(2**31))

    def wave(self, templates: list[Template]) -> int:
        """Places that grow at the same time, call by call in random order; how many could be computed."""
        standing = [self.place(template) for template in templates]
        done = 0
        while standing:
            place = self.rng.choice(standing)
            try:
                next(place)
            except StopIteration:
                standing.remove(place)
                done += 1
            except Impossible:
                standing.remove(place)
        return done

    def place(self, template: Template) -> Iterator[None]:
        """Put a template into the graph, a call at each step, with none, one or two things wrong."""
        calls = [node for node in template.graph.nodes if node.op == "call_function"]
        wrong = {self.rng.randrange(max(len(calls), 1)) for _ in range(self.rng.choice((0, 0, 1, 1, 2)))}
        made: dict[fx.Node, Any] = {}
        given = iter(zip(template.leaves, template.fixed, template.parameters, strict=True))
        for node in template.graph.nodes:
            if node.op == "placeholder":
                value, fixed, parameter = next(given)
                made[node] = self.leaf(value, fixed=fixed)
                if parameter:
                    self.parameters[made[node].name] = value
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
                spoil = calls.index(node) in wrong
                made[node] = self._spoil(node, args, kwargs) if spoil else self.call(node.target, *args, **kwargs)
                yield
            elif node.op == "output":
                self.outputs += [made[each] for each in tree_leaves(node.args) if isinstance(each, fx.Node)]

    def _spoil(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """The call with one thing different from the template."""
        rng = self.rng
        target: Any = node.target
        kind = rng.choice(("consumer", "constant", "insert", "insert", "swap", "other", "write", "write", "target"))
        flat, spec = tree_flatten((args, kwargs))
        tensors = [index for index, each in enumerate(flat) if isinstance(each, fx.Node) and _is_tensor(each)]
        numbers = [index for index, each in enumerate(flat) if isinstance(each, (bool, int, float, torch.dtype))]
        if kind == "constant" and numbers:
            place = rng.choice(numbers)
            flat[place] = _other_constant(flat[place], rng)
        elif kind == "insert" and tensors:
            place = rng.choice(tensors)
            flat[place] = self._inserted(flat[place])
        elif kind == "other" and tensors:
            place = rng.choice(tensors)
            value = flat[place].meta["val"]
            alike = [each for each in (*self.values, *self.inputs) if _alike(each.meta["val"], value)]
            flat[place] = rng.choice(alike)
        elif kind == "swap" and len(tensors) > 1:
            one, two = rng.sample(tensors, 2)
            flat[one], flat[two] = flat[two], flat[one]
        elif kind == "write":
            self._write(flat, tensors)
        elif kind == "target":
            family = next((each for each in _SIBLINGS if target in each), (target,))
            target = rng.choice(family)
        args, kwargs = tree_unflatten(flat, spec)
        made = self.call(target, *args, **kwargs)
        if kind == "consumer" and _is_tensor(made):
            self.outputs.append(self.call(aten.neg.default, made) if rng.random() < 0.6 else made)
        return made

    def _inserted(self, node: fx.Node) -> fx.Node:
        """A call on the way to an operand."""
        value, rng = node.meta["val"], self.rng
        last = max(value.dim() - 1, 0)
        ways = [
            lambda: self.call(aten.clone.default, node),
            lambda: self.call(aten.add.Tensor, node, rng.choice((0, 1))),
            lambda: self.call(aten.mul.Tensor, node, rng.choice((1.0, 2.0))),
            lambda: self.call(aten.neg.default, node),
            lambda: self.call(aten._to_copy.default, node, dtype=_OTHER_DTYPE.get(value.dtype, value.dtype)),
            lambda: self.call(
                aten._to_copy.default,
                self.call(aten._to_copy.default, node, dtype=torch.bfloat16),
                dtype=value.dtype,
            ),
            lambda: self.call(aten.transpose.int, self.call(aten.transpose.int, node, 0, last), 0, last),
            lambda: self.call(aten.transpose.int, node, 0, last),
            lambda: self.call(aten.slice.Tensor, node, 0, 0, 9223372036854775807),
            lambda: self.call(aten.view.default, node, list(value.shape)),
            lambda: self.call(aten.unsqueeze.default, node, 0),
            lambda: self.call(aten.expand.default, node, list(value.shape)),
        ]
        return rng.choice(ways)()

    def _write(self, flat: list[Any], tensors: list[int]) -> None:
        """Something is written in place: an operand, another value, or an input."""
        near = [flat[index] for index in tensors]
        pool = near if near and self.rng.random() < 0.6 else [*self.values, *self.inputs]
        node = self.rng.choice(pool)
        if not node.meta["val"].is_floating_point() or 0 in node.meta["val"].stride():
            raise Impossible("not a place to write to")
        self.call(aten.add_.Tensor, node, 0.5)

    def program(self) -> Program:
        """What has grown, as a program."""
        outputs = list(dict.fromkeys(node for node in self.outputs if _is_tensor(node)))
        self.graph.output(tuple(outputs))
        return as_program(self.graph, self.parameters)


def as_program(graph: fx.Graph, parameters: Mapping[str, torch.Tensor] | None = None) -> Program:
    """A program around a graph of static sizes: placeholders are parameters or inputs, what is returned is outputs."""
    tensors = {name: InMemory(value) for name, value in (parameters or {}).items()}
    ins = [node for node in graph.nodes if node.op == "placeholder"]
    outs = list(next(iter(reversed(graph.nodes))).args[0])
    rows = [_row(node.name, Role.PARAMETER if node.name in tensors else Role.INPUT, node) for node in ins]
    rows += [_row(f"out_{index}", Role.OUTPUT, node) for index, node in enumerate(outs)]
    names = tuple(row.name for row in rows if row.role is Role.INPUT)
    in_spec = tree_structure((tuple(range(len(names))), {}))
    calling = Calling(in_spec, tree_structure(tuple(range(len(outs)))), names)
    fx.GraphModule(torch.nn.Module(), graph)
    return Program("fuzz", graph, Bindings(tuple(rows)), tensors, {}, calling, Facts())


def _row(name: str, role: Role, node: fx.Node) -> Binding:
    value = node.meta["val"]
    return Binding(name, role, name, str(value.dtype).removeprefix("torch."), tuple(map(int, value.shape)))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def _alike(one: Any, two: torch.Tensor) -> bool:
    return bool(one.dtype == two.dtype and tuple(one.shape) == tuple(two.shape))


def _other_constant(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, torch.dtype):
        return _OTHER_DTYPE.get(value, torch.float32)
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, operator.neg(value), 0, 2 * value))
    return rng.choice((2 * value, value + 0.25, -value))


def grow(rng: random.Random, draw: Any, waves: int = 2, width: int = 3) -> tuple[Program, dict[str, torch.Tensor], int]:
    """A program of some places, its inputs by name, and how many places could be computed."""
    growth = Growth(rng)
    templates = [[draw(rng) for _ in range(width)] for _ in range(waves)]
    with symbolic_sizes():
        places = sum(growth.wave(each) for each in templates)
    program = growth.program()
    return program, {node.name: value for node, value in growth.inputs.items()}, places
