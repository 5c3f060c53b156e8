"""Spoil one place of a captured model so that one rule misses it, knowing which node and which reason are right.

Every operator takes a site of the unspoiled program and changes the program as it was captured, before any transform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import ProgramError
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import MODULE, SOURCE, operands
from inlay.program.symbols import FakeValues
from inlay.rewrite.pattern_trees import PatternCall, PatternVariable, children
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from inlay.program import Program
    from inlay.rewrite.matcher import PatternMatch

aten = torch.ops.aten
_AXES = {"dim", "dim0", "dim1", "dims"}
_OTHER: dict[Any, tuple[Any, ...]] = {
    aten.silu.default: (aten.relu.default, aten.gelu.default, aten.tanh.default, aten.sigmoid.default),
    aten.gelu.default: (aten.relu.default, aten.tanh.default),  # with silu it would be the site of another rule
    aten.rsqrt.default: (aten.sqrt.default, aten.reciprocal.default, aten.exp.default),
    aten.neg.default: (aten.abs.default, aten.relu.default),
    aten.tanh.default: (aten.sigmoid.default, aten.sin.default),
    aten.sigmoid.default: (aten.tanh.default,),
    aten.mean.dim: (aten.sum.dim_IntList, aten.amax.default),
    aten.add.Tensor: (aten.sub.Tensor, aten.mul.Tensor),
    aten.mul.Tensor: (aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor),
    aten.sub.Tensor: (aten.add.Tensor, aten.mul.Tensor),
    aten.div.Tensor: (aten.mul.Tensor,),
}
_OTHER_DTYPE = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float16}


class Impossible(Exception):  # noqa: N818 - drawn again
    """This place cannot be spoiled so."""


@dataclass(frozen=True)
class Right:
    """The nodes that an explanation may blame, and the reasons it may give."""

    nodes: frozenset[str]
    reasons: frozenset[Reason]


@dataclass(frozen=True, eq=False)
class Place:
    """A site, told by the nodes of the captured program, and the tools to change that program."""

    program: Program
    calls: dict[PatternCall, fx.Node]
    values: dict[str, fx.Node]
    output: fx.Node
    rng: random.Random

    @staticmethod
    def of(program: Program, found: PatternMatch, output: fx.Node, rng: random.Random) -> Place:
        nodes = {node.name: node for node in program.graph.nodes}
        try:
            calls = {call: nodes[node.name] for call, node in found.nodes.items()}
            values = {name: nodes[value.name] for name, value in found.values.items() if isinstance(value, fx.Node)}
        except KeyError as error:
            raise Impossible(f"{error} was made by a transform") from error
        return Place(program, calls, values, nodes[output.name], rng)

    @property
    def inner(self) -> list[fx.Node]:
        return [node for node in self.calls.values() if node is not self.output]

    def edges(self) -> list[tuple[fx.Node, fx.Node]]:
        """Pairs (value, reader) in which a node too many is seen: values inside, and outside ones read twice."""
        inside, found = set(self.calls.values()), []
        reads = [(child, node) for call, node in self.calls.items() for child in children(call)]
        for child, reader in reads:
            value = self.calls.get(child) if isinstance(child, PatternCall) else self.values.get(child.name)
            twice = isinstance(child, PatternVariable) and sum(each == child for each, _ in reads) > 1
            if value is not None and (value in inside or twice) and value in operands(reader):
                found.append((value, reader))
        return found

    def insert(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.program.graph.inserting_before(before):
            node = self.program.graph.call_function(target, args, kwargs)
        node.meta = {key: before.meta[key] for key in (SOURCE, MODULE) if key in before.meta}
        self.retype(node)
        return node

    def retype(self, start: fx.Node) -> None:
        """Types from `start` on; what cannot be computed any more, or gives the rest another type, is impossible."""
        held = str(_type(self.output)) if start is not self.output else ""
        fakes = FakeValues.from_graph(self.program.graph)
        changed = {start}
        for node in self.program.graph.nodes:
            if node.op != "call_function" or not (node in changed or changed.intersection(operands(node))):
                continue
            before = _type(node)
            try:
                node.meta["val"] = fakes.compute_value(node)
            except ProgramError as error:
                raise Impossible(str(error)) from error
            if _type(node) != before or node is start:
                changed.add(node)
        if held and str(_type(self.output)) != held:
            raise Impossible("the place would give another type")


def _type(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (value.dtype, *map(str, value.shape)) if isinstance(value, torch.Tensor) else (str(value),)


def _right(nodes: list[fx.Node], *reasons: Reason) -> Right:
    return Right(frozenset(node.name for node in nodes), frozenset(reasons))


def _pick(rng: random.Random, choices: list[Any]) -> Any:
    if not choices:
        raise Impossible("nothing here to change")
    return rng.choice(choices)


def second_consumer(place: Place) -> Right:
    """An inner value is returned as well."""
    node = _pick(place.rng, place.inner)
    output = next(iter(reversed(place.program.graph.nodes)))
    output.args = ((*output.args[0], node),)
    return _right([node], Reason.ANOTHER_CONSUMER)


def other_reader(place: Place) -> Right:
    """An inner value is read by another call too, whose result is returned."""
    node = _pick(place.rng, place.inner)
    output = next(iter(reversed(place.program.graph.nodes)))
    reader = place.insert(output, aten.sum.default, node)
    output.args = ((*output.args[0], reader),)
    return _right([node], Reason.ANOTHER_CONSUMER)


def _set(node: fx.Node, name: str, value: Any) -> None:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        raise Impossible("a call without a schema")
    names = [argument.name for argument in schema.arguments]
    index = names.index(name)
    if index < len(node.args):
        node.args = (*node.args[:index], value, *node.args[index + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}


def other_constant(place: Place) -> Right:
    """A number that the pattern states is another one."""
    choices = [
        (node, name, value)
        for call, node in place.calls.items()
        for name, value in call.args
        if type(value) in (int, float) and name not in _AXES and abs(value) < 100
    ]
    node, name, value = _pick(place.rng, choices)
    _set(node, name, value + 1)
    place.retype(node)
    return _right([node], Reason.CONSTANT)


def other_axis(place: Place) -> Right:
    """A call works along another axis."""
    choices = [
        (node, name, value)
        for call, node in place.calls.items()
        for name, value in call.args
        if name in _AXES and (type(value) is int or (isinstance(value, list) and len(value) == 1))
    ]
    node, name, value = _pick(place.rng, choices)
    first = operands(node)[0].meta["val"]
    axis = value[0] if isinstance(value, list) else value
    other = place.rng.choice([each for each in range(-first.dim(), 0) if each != axis])
    _set(node, name, [other] if isinstance(value, list) else other)
    place.retype(node)
    return _right([node], Reason.AXIS)


def cast_between(place: Place) -> Right:
    """A value inside is rounded to another dtype."""
    value, reader = _pick(place.rng, place.edges())
    dtype = _OTHER_DTYPE.get(value.meta["val"].dtype)
    if dtype is None:
        raise Impossible("no floating-point value")
    cast = place.insert(reader, aten._to_copy.default, value, dtype=dtype)
    reader.replace_input_with(value, cast)
    place.retype(cast)
    return _right([cast], Reason.DTYPE)


def extra_node(place: Place) -> Right:
    """A call stands in between."""
    value, reader = _pick(place.rng, place.edges())
    target, *args = place.rng.choice(
        [
            (aten.neg.default,),
            (aten.mul.Tensor, 1.01),
            (aten.relu.default,),
            (aten.add.Tensor, 0.5),
            (aten.clone.default,),
        ]
    )
    node = place.insert(reader, target, value, *args)
    reader.replace_input_with(value, node)
    place.retype(node)
    return _right([node], Reason.EXTRA)


def lacking_node(place: Place) -> Right:
    """A call is left out: its readers read its operand."""
    inside = set(place.calls.values())
    choices = []
    for node in inside:
        read = operands(node)
        if read and not any(each in inside for each in read[1:]) and len(node.users) == 1:
            choices.append((node, read[0]))
    node, first = _pick(place.rng, sorted(choices))
    if first not in inside and node is place.output:
        raise Impossible("nothing of the place would be left")
    readers = list(node.users)
    node.replace_all_uses_with(first)
    place.program.graph.erase_node(node)
    for reader in readers:
        if reader.op == "call_function":
            place.retype(reader)
    return _right([first, *readers], Reason.MISSING)


def other_operator(place: Place) -> Right:
    """A call is of another operator."""
    node = _pick(place.rng, [each for each in place.calls.values() if each.target in _OTHER])
    node.target = place.rng.choice(_OTHER[node.target])
    if node.target is aten.gelu.default:
        node.args = node.args[:1]
    node.kwargs = {}
    place.retype(node)
    return _right([node], Reason.MISSING)


def written_out(place: Place) -> Right:
    """A call is written as two: rsqrt as reciprocal and square root, silu as a product, a square as a product."""
    choices = [
        node
        for node in place.calls.values()
        if node.target in (aten.rsqrt.default, aten.silu.default, aten.pow.Tensor_Scalar, aten.neg.default)
    ]
    node = _pick(place.rng, choices)
    x = operands(node)[0]
    if node.target is aten.rsqrt.default:
        made = [place.insert(node, aten.sqrt.default, x)]
        made.append(place.insert(node, aten.reciprocal.default, made[0]))
    elif node.target is aten.silu.default:
        made = [place.insert(node, aten.sigmoid.default, x)]
        made.append(place.insert(node, aten.mul.Tensor, x, made[0]))
    else:
        other = x if node.target is aten.pow.Tensor_Scalar else -1.0
        made = [place.insert(node, aten.mul.Tensor, x, other)]
    node.replace_all_uses_with(made[-1])
    place.program.graph.erase_node(node)
    return _right(made, Reason.MISSING, Reason.EXTRA)


def swapped_operands(place: Place) -> Right:
    """The operands of a call that is not commutative stand the other way round."""
    choices = [node for node in place.calls.values() if node.target in (aten.sub.Tensor, aten.div.Tensor)]
    choices = [node for node in choices if len(operands(node)) == 2]
    joined = [node for node in place.calls.values() if node.target is aten.cat.default]
    choices += [node for node in joined if isinstance(node.args[0], (list, tuple)) and len(node.args[0]) == 2]
    node = _pick(place.rng, choices)
    if node.target is aten.cat.default:
        node.args = (list(reversed(node.args[0])), *node.args[1:])
    else:
        node.args = (node.args[1], node.args[0], *node.args[2:])
    place.retype(node)
    return _right([node], Reason.MISSING)


def write_between(place: Place) -> Right:
    """Something is written in place between the first and the last call."""
    ordered = sorted(place.calls.values())
    reader = _pick(place.rng, ordered[1:])
    copied = place.insert(reader, aten.clone.default, _pick(place.rng, list(place.values.values())))
    write = place.insert(reader, aten.add_.Tensor, copied, 1)
    return _right([write], Reason.MUTATION)


def other_shape(place: Place) -> Right:
    """An operand from outside, read once, is broadcast, or has an axis more."""
    value, readers = _operand(place)
    held = value.meta["val"]
    if len(readers) > 1:
        raise Impossible("cut and whole are both read")
    if held.dim() == 1 or place.rng.random() < 0.3:
        node = place.insert(readers[0], aten.unsqueeze.default, value, 0)
    else:
        node = place.insert(readers[0], aten.slice.Tensor, value, -1, 0, 1)
    for reader in readers:
        reader.replace_input_with(value, node)
    place.retype(node)
    return _right([node], Reason.SHAPE)


def other_dtype(place: Place) -> Right:
    """An operand from outside is of another dtype."""
    value, readers = _operand(place)
    dtype = _OTHER_DTYPE.get(value.meta["val"].dtype)
    if dtype is None:
        raise Impossible("no floating-point value")
    node = place.insert(readers[0], aten._to_copy.default, value, dtype=dtype)
    for reader in readers:
        reader.replace_input_with(value, node)
    place.retype(node)
    return _right([node], Reason.DTYPE)


def _operand(place: Place) -> tuple[fx.Node, list[fx.Node]]:
    inside = set(place.calls.values())
    choices = []
    for value in place.values.values():
        readers = sorted(user for user in value.users if user in inside)
        if readers and isinstance(value.meta["val"], torch.Tensor):
            choices.append((value, readers))
    value, readers = _pick(place.rng, choices)
    return value, readers


def computed_constant(place: Place) -> Right:
    """A number is computed instead of stated."""
    choices = []
    for call, node in place.calls.items():
        numbers = [
            child for child in children(call) if isinstance(child, PatternVariable) and child.name not in place.values
        ]
        if numbers and len(node.args) == 2 and type(node.args[1]) is float:
            choices.append(node)
    node = _pick(place.rng, choices)
    weight = next((each for each in place.values.values() if each.op == "placeholder"), None)
    if weight is None:
        raise Impossible("nothing to compute a number from")
    number = place.insert(node, aten.mean.default, weight)
    node.args = (node.args[0], number)
    place.retype(node)
    return _right([number], Reason.CONSTANT)


KINDS: tuple[Callable[[Place], Right], ...] = (
    *(second_consumer, other_reader, other_constant, other_axis, cast_between, extra_node, lacking_node),
    *(other_operator, written_out, swapped_operands, write_between, other_shape, other_dtype, computed_constant),
)


def other_number(place: Place) -> None:
    """A number that the pattern leaves open is another one."""
    choices = []
    for call, node in place.calls.items():
        held = dict(normalize_args(node))
        open_ones = [
            name for name, value in call.args if isinstance(value, PatternVariable) and value.name not in place.values
        ]
        choices += [(node, name, held[name]) for name in open_ones if type(held[name]) is float]
    node, name, value = _pick(place.rng, choices)
    _set(node, name, 1.5 * value + 0.01)


def commuted(place: Place) -> None:
    """The operands of a commutative call stand the other way round."""
    sums = [node for node in place.calls.values() if node.target in (aten.add.Tensor, aten.mul.Tensor)]
    node = _pick(place.rng, [each for each in sums if len(operands(each)) == 2 and len(each.args) == 2])
    node.args = (node.args[1], node.args[0])


def other_operand(place: Place) -> None:
    """An operand from outside is another value."""
    value, readers = _operand(place)
    if not value.meta["val"].is_floating_point():
        raise Impossible("no floating-point value")
    node = place.insert(readers[0], aten.mul.Tensor, value, 1.25)
    for reader in readers:
        reader.replace_input_with(value, node)


def read_result(place: Place) -> None:
    """The result is returned as well."""
    output = place.program.graph.output_node()
    output.args = ((*output.args[0], place.output),)  # type: ignore[misc]


KEEPING: tuple[Callable[[Place], None], ...] = (other_number, commuted, other_operand, read_result)
"""Changes after which a rule may still match: numbers say whether it does so rightly."""
