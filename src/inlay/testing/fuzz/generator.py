"""Generate a graph from templates: sites share values, and some are mutated on purpose.

Sizes are numbers or symbols. A site is in the main graph or in a branch of a `cond`. Inputs contain random numbers,
some of them extreme.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from inlay.program.graphs import attach_subgraphs, sizes
from inlay.program.program import Program, Symbol
from inlay.program.symbols import FakeValues
from inlay.testing.fuzz.program_builder import build_program

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from inlay.testing.fuzz.templates import Template


aten = torch.ops.aten
COND = torch.ops.higher_order.cond
_SIBLINGS = (
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    (aten.silu.default, aten.gelu.default, aten.relu.default, aten.tanh.default, aten.sigmoid.default),
    (aten.rsqrt.default, aten.sqrt.default, aten.neg.default, aten.cos.default),
    (aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor),
)
_OTHER_DTYPE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float32,
    torch.int64: torch.int32,
}
_PRODUCTS = {
    *(aten.linear.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
    *(aten.matmul.default, aten.conv1d.default, aten.convolution.default, aten.scaled_dot_product_attention.default),
}
_CONDITIONS = (torch.tensor(False), torch.tensor(True))
_SYMBOLS = (Symbol("one", 1, 128, 3), Symbol("two", 1, 128, 6))
_OTHER_SIZES = (1, 2, 4, 7)
_LARGE_SIZE = 61
"""Larger than the sum of all constants of a mask."""


class GenerationError(Exception):
    """A mutated site that cannot be computed."""


class ProgramGenerator:
    """A graph under construction, with its values and inputs."""

    def __init__(self, rng: random.Random, outer: ProgramGenerator | None = None) -> None:
        self.rng = rng
        self.graph = fx.Graph()
        self.outer = outer
        """The enclosing graph, if this is a branch."""
        self.reuse = rng.choice((0.35, 0.35, 0.8))
        """Probability that a site reads an existing value."""
        self.has_extremes = outer is None and rng.random() < 0.15
        symbols = _SYMBOLS if rng.random() < 0.4 else ()
        self.fakes: FakeValues = outer.fakes if outer is not None else FakeValues(symbols)
        self.inputs: dict[fx.Node, FuzzInput] = {}
        self.fixed_inputs: dict[int, fx.Node] = {}
        """Id of a fixed value of a template → the input that contains it."""
        self.parameters: dict[str, torch.Tensor] = {}
        self.values: list[fx.Node] = []
        self.outputs: list[fx.Node] = []
        self.branches: dict[str, fx.GraphModule] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a call and return its node, or its result if that is a number; raise if it cannot be computed."""
        values, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        _check_operands(target, values)
        try:
            value = target(*values, **named)
        except Exception as error:
            raise GenerationError(str(error)) from error
        if type(value) in (int, float, bool):
            return value
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self.values.append(node)
        return node

    def add_input(self, leaf: FuzzInput) -> fx.Node:
        """Add an input before all calls."""
        calls = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(calls) if calls is not None else self.graph.inserting_after(None):
            node = self.graph.placeholder(f"in_{len(self.inputs)}")
        node.meta["val"] = self.fakes.tensor(leaf.dtype, leaf.shape)
        self.inputs[node] = leaf
        return node

    def pick_input(self, value: torch.Tensor, shape: tuple[int | str, ...], *, fixed: bool) -> fx.Node:
        """Return a value of this type: an existing one, a view, or a new input."""
        rng = self.rng
        if fixed:
            if id(value) not in self.fixed_inputs or rng.random() > self.reuse:
                self.fixed_inputs[id(value)] = self.add_input(FuzzInput(value.dtype, shape, value=value))
            return self.fixed_inputs[id(value)]
        dtype = value.dtype
        wanted = self.fakes.tensor(dtype, shape)
        alike = [node for node in (*self.values, *self.inputs) if _has_same_type(node.meta["val"], wanted)]
        if alike and rng.random() < self.reuse:
            return rng.choice(alike)
        if rng.random() < 0.08:
            dtype, shape = self._mutate_type(dtype, shape)
        extreme = rng.choice(EXTREMES) if self.has_extremes and rng.random() < 0.5 else ""
        leaf = FuzzInput(dtype, shape, rng.randrange(2**31), extreme)
        made: fx.Node = self._view(leaf) if rng.random() < 0.15 and shape else self.add_input(leaf)
        return made

    def _mutate_type(
        self, dtype: torch.dtype, shape: tuple[int | str, ...]
    ) -> tuple[torch.dtype, tuple[int | str, ...]]:
        """Return another dtype or another shape."""
        made = list(shape)
        match self.rng.randrange(4):
            case 0:
                return _OTHER_DTYPE.get(dtype, dtype), shape
            case 1 if made:
                made[self.rng.randrange(len(made))] = 1
            case 2 if made:
                made = made[1:]
            case _:
                made = [self.rng.choice((1, 2)), *made]
        return dtype, tuple(made)

    def _view(self, leaf: FuzzInput) -> Any:
        """Return the value as a view of a larger, transposed or broadcast input."""
        axis = self.rng.randrange(len(leaf.shape))
        shape, size = list(leaf.shape), leaf.shape[axis]
        way = self.rng.randrange(3) if isinstance(size, int) else 1
        match way:
            case 0:
                shape[axis] = 2 * int(size)
                return self.call(aten.slice.Tensor, self.add_input(_with_shape(leaf, shape)), axis, 0, size)
            case 1:
                shape[0], shape[axis] = shape[axis], shape[0]
                return self.call(aten.transpose.int, self.add_input(_with_shape(leaf, shape)), 0, axis)
            case _:
                shape[axis] = 1
                whole = [size if at == axis else -1 for at in range(len(shape))]
                return self.call(aten.expand.default, self.add_input(_with_shape(leaf, shape)), whole)

    def add_sites(self, templates: list[Template]) -> int:
        """Add sites with their calls interleaved at random; return how many could be computed."""
        standing = [self.add_cond_site(each) if self.rng.random() < 0.06 else self.add_site(each) for each in templates]
        done = 0
        while standing:
            place = self.rng.choice(standing)
            try:
                next(place)
            except StopIteration:
                standing.remove(place)
                done += 1
            except GenerationError:
                standing.remove(place)
        return done

    def pick_inputs(self, template: Template) -> list[fx.Node]:
        """Return a node for each placeholder of a template; its symbols are mapped to symbols of this graph."""
        names: dict[str, str] = {}
        found = []
        given = zip(template.example_inputs, template.shapes, template.fixed, template.parameters, strict=True)
        for value, shape, fixed, parameter in given:
            if not self.fakes.symbols:
                shape = tuple(value.shape)
            own = (each if isinstance(each, int) else names.setdefault(each, self._symbol()) for each in shape)
            found.append(self.pick_input(value, tuple(own), fixed=fixed))
            if parameter:
                self.parameters[found[-1].name] = value
        return found

    def _symbol(self) -> str:
        return self.rng.choice([each.name for each in self.fakes.symbols.values()])

    def add_site(
        self, template: Template, leaves: list[fx.Node] | None = None, *, mutate: bool = True
    ) -> Iterator[None]:
        """Add a template to the graph, one call per step, with up to two mutations."""
        calls = [node for node in template.graph.nodes if node.op == "call_function"]
        count = self.rng.choice((0, 0, 1, 1, 2)) if mutate else 0
        wrong = {self.rng.randrange(max(len(calls), 1)) for _ in range(count)}
        made: dict[fx.Node, Any] = {}
        given = iter(self.pick_inputs(template) if leaves is None else leaves)
        for node in template.graph.nodes:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
                spoiled = calls.index(node) in wrong
                made[node] = (
                    self._mutate_call(node, args, kwargs) if spoiled else self.call(node.target, *args, **kwargs)
                )
                yield
            elif node.op == "output":
                found = [made[each] for each in tree_leaves(node.args) if isinstance(each, fx.Node)]
                self.outputs += [each for each in found if isinstance(each, fx.Node)]

    def add_cond_site(self, template: Template) -> Iterator[None]:
        """Add a site with mutations in one branch of a `cond` and without in the other."""
        operands = self.pick_inputs(template)
        yield
        branches = []
        for spoil in (True, False):
            inner = ProgramGenerator(self.rng, self)
            given = [inner.graph.placeholder(f"arg_{index}") for index in range(len(operands))]
            for node, operand in zip(given, operands, strict=True):
                node.meta["val"] = operand.meta["val"]
            for _ in inner.add_site(template, given, mutate=spoil):
                pass
            branches.append(inner.finish_branch())
        types = [[_kind(node.meta["val"]) for node in outputs] for _, outputs in branches]
        if types[0] != types[1] or not types[0]:
            raise GenerationError("the branches return different types")
        self.rng.shuffle(branches)
        condition = self.add_input(FuzzInput(torch.bool, (), value=self.rng.choice(_CONDITIONS)))
        called = [self._branch(module) for module, _ in branches]
        node = self.graph.call_function(COND, (condition, *called, tuple(operands)))
        node.meta["val"] = tuple(each.meta["val"] for each in branches[0][1])
        for index in range(len(types[0])):
            self.outputs.append(self.call(operator.getitem, node, index))

    def finish_branch(self) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Return the graph as a branch; a branch must not return an operand, nor one value twice."""
        outputs = list(dict.fromkeys(node for node in self.outputs if _is_tensor(node)))
        if any(node.op == "placeholder" for node in outputs):
            raise GenerationError("a branch would return an operand")
        self.graph.output(tuple(outputs))
        return fx.GraphModule(torch.nn.Module(), self.graph), outputs

    def _branch(self, module: fx.GraphModule) -> fx.Node:
        name = f"branch_{len(self.branches)}"
        self.branches[name] = module
        attach_subgraphs(self.graph, self.branches)
        return self.graph.get_attr(name)

    def _mutate_call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Add the call with one difference from the template."""
        rng = self.rng
        target: Any = node.target
        writes = ("write", "write") if self.outer is None else ()  # a branch must not write to its operands
        kind = rng.choice(("consumer", "constant", "insert", "insert", "swap", "other", "target", *writes))
        flat, spec = tree_flatten((args, kwargs))
        tensors = [index for index, each in enumerate(flat) if isinstance(each, fx.Node) and _is_tensor(each)]
        numbers = [index for index, each in enumerate(flat) if isinstance(each, (bool, int, float, torch.dtype))]
        if kind == "constant" and numbers:
            place = rng.choice(numbers)
            flat[place] = _other_constant(flat[place], rng)
        elif kind == "insert" and tensors:
            place = rng.choice(tensors)
            flat[place] = self._insert_call(flat[place])
        elif kind == "other" and tensors:
            place = rng.choice(tensors)
            value = flat[place].meta["val"]
            alike = [each for each in (*self.values, *self.inputs) if _has_same_type(each.meta["val"], value)]
            flat[place] = rng.choice(alike or [flat[place]])
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
        if kind == "consumer" and isinstance(made, fx.Node) and _is_tensor(made):
            self.outputs.append(self.call(aten.neg.default, made) if rng.random() < 0.6 else made)
        return made

    def _insert_call(self, node: fx.Node) -> Any:
        """Insert a call before an operand."""
        value, rng = node.meta["val"], self.rng
        last = max(value.dim() - 1, 0)
        ways = [
            lambda: self.call(aten.clone.default, node),
            lambda: self.call(aten.add.Tensor, node, rng.choice((0, 1))),
            lambda: self.call(aten.mul.Tensor, node, rng.choice((1.0, 2.0))),
            lambda: self.call(aten.neg.default, node),
            lambda: self.call(aten._to_copy.default, node, dtype=_OTHER_DTYPE.get(value.dtype, value.dtype)),
            lambda: self.call(
                aten._to_copy.default, self.call(aten._to_copy.default, node, dtype=torch.bfloat16), dtype=value.dtype
            ),
            lambda: self.call(aten.transpose.int, self.call(aten.transpose.int, node, 0, last), 0, last),
            lambda: self.call(aten.transpose.int, node, 0, last),
            lambda: self.call(aten.slice.Tensor, node, 0, 0, 9223372036854775807),
            lambda: self.call(aten.view.default, node, self._sizes(node)),
            lambda: self.call(aten.unsqueeze.default, node, 0),
            lambda: self.call(aten.expand.default, node, self._sizes(node)),
        ]
        return rng.choice(ways)()

    def _sizes(self, node: fx.Node) -> list[Any]:
        """Return the sizes of a value, as numbers and calls."""
        shape = node.meta["val"].shape
        return [
            size if isinstance(size, int) else self.call(aten.sym_size.int, node, axis)
            for axis, size in enumerate(shape)
        ]

    def _write(self, flat: list[Any], tensors: list[int]) -> None:
        """Write in place to an operand, another value, or an input."""
        near = [flat[index] for index in tensors]
        pool = near if near and self.rng.random() < 0.6 else [*self.values, *self.inputs]
        node = self.rng.choice(pool)
        value = node.meta["val"]
        if value.is_complex() or "0" in [str(step) for step in value.stride()]:
            raise GenerationError("this value cannot be written in place")
        if value.dtype is torch.bool:
            self.call(aten.bitwise_not_.default, node)
        elif value.is_floating_point():
            self.call(aten.add_.Tensor, node, 0.5)
        else:
            raise GenerationError("integer values such as positions and tokens are not written")

    def program(self) -> Program:
        """Return the graph as a program."""
        outputs = list(dict.fromkeys(node for node in self.outputs if _is_tensor(node)))
        self.graph.output(tuple(outputs))
        return build_program(self.graph, self.parameters, self.fakes.symbols)

    def runs(self) -> list[dict[str, torch.Tensor]]:
        """Return inputs by name, for several sizes if the graph has symbols."""
        symbols = list(self.fakes.symbols.values())
        chosen = [{each.name: each.example for each in symbols}]
        if symbols:
            chosen.append({each.name: self.rng.choice(_OTHER_SIZES) for each in symbols})
            chosen.append(chosen[0] | {self.rng.choice(symbols).name: _LARGE_SIZE})
        inputs = {node.name: self._limit_extreme(leaf) for node, leaf in self.inputs.items()}
        return [{name: leaf.instantiate(each) for name, leaf in inputs.items()} for each in chosen]

    def _limit_extreme(self, leaf: FuzzInput) -> FuzzInput:
        """Limit float16 inputs where a mask adds the lowest number of float16: that mask assumes smaller scores
        (`analysis/masks/classification.py`)."""
        if leaf.extreme != "largest" or leaf.dtype != torch.float16:
            return leaf
        graphs = [self.graph, *(module.graph for module in self.branches.values())]
        constants = [each for graph in graphs for node in graph.nodes for each in tree_leaves((node.args, node.kwargs))]
        return replace(leaf, extreme="large") if torch.finfo(torch.float16).min in constants else leaf


def _check_operands(target: Any, values: Sequence[Any]) -> None:
    """Raise for operands that torch accepts as fake values but not as real ones."""
    if target in _PRODUCTS:
        dtypes = {each.dtype for each in values if isinstance(each, torch.Tensor) and each.dtype is not torch.bool}
        if len(dtypes) > 1:
            raise GenerationError(f"a product of {' and '.join(sorted(map(str, dtypes)))}")
    if target is aten.scaled_dot_product_attention.default and sizes(values[1])[:-1] != sizes(values[2])[:-1]:
        raise GenerationError("torch reads such keys and values out of bounds instead of raising an error")


def _with_shape(leaf: FuzzInput, shape: list[int | str]) -> FuzzInput:
    return replace(leaf, shape=tuple(shape))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def _kind(value: torch.Tensor) -> tuple[Any, ...]:
    return (value.dtype, *sizes(value))


def _has_same_type(one: torch.Tensor, two: torch.Tensor) -> bool:
    return _kind(one) == _kind(two)


def _other_constant(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, torch.dtype):
        return _OTHER_DTYPE.get(value, torch.float32)
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, operator.neg(value), 0, 2 * value))
    return rng.choice((2 * value, value + 0.25, -value))


def generate_program(
    rng: random.Random, sample_template: Any, rounds: int = 2, width: int = 3
) -> tuple[Program, list[dict[str, torch.Tensor]], int]:
    """Return a random program, inputs by name for each run, and the number of sites that could be computed."""
    growth = ProgramGenerator(rng)
    templates = [[sample_template(rng) for _ in range(width)] for _ in range(rounds)]
    if rng.random() < 0.25:
        templates[-1] = templates[0]  # repeat the first sites later; they may read the same values
    with growth.fakes.forbid_guards():
        places = sum(growth.add_sites(each) for each in templates)
    return growth.program(), growth.runs(), places


EXTREMES = ("nan", "inf", "-inf", "zero", "-zero", "largest", "large", "small", "smallest", "all equal")


@dataclass(frozen=True, eq=False)
class FuzzInput:
    """The contents of an input, independent of the values of its symbols."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    seed: int = 0
    """Seed of the random contents."""
    extreme: str = ""
    value: torch.Tensor | None = None
    """Fixed contents instead of random numbers."""

    def instantiate(self, symbols: Mapping[str, int]) -> torch.Tensor:
        """Return the input for these values of the symbols."""
        shape = [size if isinstance(size, int) else symbols[size] for size in self.shape]
        if self.value is None:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randn(shape, generator=generator).to(self.dtype)
            return _extreme(drawn, self.extreme, generator) if self.extreme and drawn.numel() else drawn
        value: torch.Tensor = self.value
        for axis, (now, wanted) in enumerate(zip(value.shape, shape, strict=True)):
            if now != wanted:
                value = value.index_select(axis, torch.arange(wanted) % now)
        return value.clone()


def _extreme(value: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Return the value with about a third of its elements extreme, or all of them large, small or equal."""
    limits = torch.finfo(value.dtype)
    if kind in ("large", "small"):
        scaled: torch.Tensor = value * (limits.max**0.25 if kind == "large" else limits.tiny**0.25)
        return scaled
    if kind == "all equal":
        return torch.full_like(value, float(value.flatten()[0]))
    number = {"zero": 0.0, "-zero": -0.0, "largest": limits.max, "smallest": limits.tiny / 2}.get(kind)
    chosen = torch.rand(value.shape, generator=generator) < 0.35
    return value.masked_fill(chosen, float(kind) if number is None else number)
