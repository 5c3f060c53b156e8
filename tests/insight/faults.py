"""Ways in which a transform gets one site wrong, and ways in which two sites are wrong only together."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import origin
from inlay.transforms.pass_manager import TransformStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program
    from inlay.transforms.base import TransformResult


class Impossible(Exception):  # noqa: N818 - drawn again
    """This site cannot be spoiled so."""


@dataclass(frozen=True, eq=False)
class Spot:
    """What a transform made of a site: the call it put in, if any, and the value that others read."""

    graph: fx.Graph
    call: fx.Node | None
    value: fx.Node
    readers: tuple[fx.Node, ...]
    rng: random.Random

    def operands(self) -> list[tuple[str, fx.Node]]:
        """The tensors that the call reads, by name."""
        given = self.arguments()
        return [(name, value) for name, value in given.items() if isinstance(value, fx.Node) and _is_float(value)]

    def arguments(self) -> dict[str, Any]:
        return dict(normalize_args(self.the_call()))

    def the_call(self) -> fx.Node:
        if self.call is None:
            raise Impossible("nothing was put in")
        return self.call

    def put(self, **arguments: Any) -> None:
        """Give the call other arguments."""
        given = {**self.arguments(), **arguments}
        call = self.the_call()
        by_name = {each.name for each in call.target._schema.arguments if each.kwarg_only}  # type: ignore[union-attr]
        call.args = tuple(value for name, value in given.items() if name not in by_name)
        call.kwargs = {name: value for name, value in given.items() if name in by_name}

    def insert(self, function: Callable[[Tensor], Tensor], value: fx.Node, before: fx.Node) -> fx.Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(function, (value,))
        node.meta = {"val": value.meta["val"]}
        return node

    def change_operand(self, function: Callable[[Tensor], Tensor]) -> None:
        name, value = self.pick(self.operands())
        self.put(**{name: self.insert(function, value, self.the_call())})

    def change_value(self, *functions: Callable[[Tensor], Tensor]) -> None:
        made = self.value
        for function in functions:
            made = self.insert(function, made, self.value.next if made is self.value else made.next)
        for reader in self.readers:
            reader.replace_input_with(self.value, made)

    def pick(self, choices: list[Any]) -> Any:
        if not choices:
            raise Impossible("nothing here to change")
        return self.rng.choice(choices)


_LASTING = (torch.ops.aten.linear.default, torch.ops.aten.embedding.default, torch.ops.aten.transpose.int)
"""Calls that no transform takes away: whatever else was rewritten, the choice among them is the same."""


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _same(one: fx.Node, two: fx.Node) -> bool:
    left, right = one.meta.get("val"), two.meta.get("val")
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return False
    return left.dtype == right.dtype and str(left.shape) == str(right.shape)


def wrong_constant(spot: Spot) -> None:
    """A number, such as an eps or a scale, is another one."""
    choices = [(name, value) for name, value in spot.arguments().items() if type(value) is float and value]
    name, value = spot.pick(choices)
    spot.put(**{name: value * spot.rng.choice([100.0, 0.01])})


def swapped_operands(spot: Spot) -> None:
    """Two operands stand the other way round."""
    given = spot.operands()
    pairs = [(one, two) for one in given for two in given if one[0] < two[0] and _same(one[1], two[1])]
    one, two = spot.pick([pair for pair in pairs if pair[0][1] is not pair[1][1]])
    spot.put(**{one[0]: two[1], two[0]: one[1]})


def wrong_weight(spot: Spot) -> None:
    """The weight of another place is read."""
    name, weight = spot.pick([pair for pair in spot.operands() if pair[1].op == "placeholder"])
    others = [node for node in spot.graph.nodes if node.op == "placeholder" and _same(node, weight)]
    spot.put(**{name: spot.pick([node for node in others if node is not weight])})


def stale_value(spot: Spot) -> None:
    """A value of the same type is read that was computed earlier."""
    name, value = spot.pick(spot.operands())
    earlier = [node for node in spot.graph.nodes if node.target in _LASTING and node < spot.the_call()]
    spot.put(**{name: spot.pick([node for node in earlier if _same(node, value) and node is not value])})


def lost_mask(spot: Spot) -> None:
    """Attention sees what comes later."""
    given = spot.arguments()
    if given.get("causal"):
        spot.put(causal=False)
    elif isinstance(given.get("mask"), fx.Node):
        spot.put(mask=None)
    else:
        raise Impossible("no mask")


def lost_operand(spot: Spot) -> None:
    """An operand, such as a residual, is lost."""
    spot.change_operand(torch.zeros_like)


def sign_flip(spot: Spot) -> None:
    spot.change_operand(torch.neg)


def off_by_one(spot: Spot) -> None:
    """An operand is read one place further."""
    spot.change_operand(_next)


def cast_too_many(spot: Spot) -> None:
    """An operand is rounded to half precision."""
    spot.change_operand(_rounded)


def wrong_scale(spot: Spot) -> None:
    spot.change_value(_larger)


def wrong_axis(spot: Spot) -> None:
    """The result is laid out along another axis."""
    spot.change_value(_relaid)


def short_slice(spot: Spot) -> None:
    """The last column is not computed."""
    spot.change_value(_shortened)


def _next(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def _previous(x: Tensor) -> Tensor:
    return x.roll(-1, -1)


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _larger(x: Tensor) -> Tensor:
    return x * 1.25


def _relaid(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).reshape(x.shape)


def _shortened(x: Tensor) -> Tensor:
    return torch.cat([x[..., :-1], x[..., -1:] * 0], -1)


def _twice(x: Tensor) -> Tensor:
    return x * 2


def _half(x: Tensor) -> Tensor:
    return x * 0.5


def _turned(x: Tensor) -> Tensor:
    return x.flip(-1)


def _turned_back(x: Tensor) -> Tensor:
    return x.flip(-1)


def _negated(x: Tensor) -> Tensor:
    return -x


def _negated_back(x: Tensor) -> Tensor:
    return -x


KINDS: tuple[Callable[[Spot], None], ...] = (
    *(wrong_constant, swapped_operands, wrong_weight, stale_value, lost_mask, lost_operand, sign_flip, off_by_one),
    *(cast_too_many, wrong_scale, wrong_axis, short_slice),
)
PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "pair: sign": (_negated, _negated_back),
    "pair: scale": (_twice, _half),
    "pair: place": (_next, _previous),
    "pair: order": (_turned, _turned_back),
}
"""One site leaves its value changed and puts a call after it that undoes it; another one takes such calls away."""


def owing(kind: str) -> Callable[[Spot], None]:
    """The first of a pair: right as long as nobody takes the second call away."""
    return lambda spot: spot.change_value(*PAIRS[kind])


def forgetting(kind: str) -> Callable[[Spot], None]:
    """The second of a pair: right as long as there is nothing to take away."""

    def forget(spot: Spot) -> None:
        for node in list(spot.graph.nodes):
            if node.target is PAIRS[kind][1]:
                node.replace_all_uses_with(node.args[0])
                spot.graph.erase_node(node)

    return forget


def by_external(change: Callable[[Tensor], Tensor], share: float) -> Callable[[fx.GraphModule], None]:
    """A pass of somebody else that changes the result of one linear layer."""

    def spoil(module: fx.GraphModule) -> None:
        calls = [node for node in module.graph.nodes if node.target is torch.ops.aten.linear.default]
        call = calls[int(share * len(calls))]
        Spot(module.graph, call, call, tuple(call.users), random.Random()).change_value(change)

    return spoil


EXTERNAL = (_larger, _relaid, _shortened, torch.neg)


@dataclass(frozen=True)
class Fault:
    """A site, told by the captured node it stands for, and what is done wrong there."""

    site: str
    change: Callable[[Spot], None]
    seed: float
    """So that it is the same fault whatever else is left out."""


def broken(step: TransformStep, faults: list[Fault]) -> TransformStep:
    """The same transform, which gets some of its sites wrong whenever it rewrites them."""

    class Broken(type(step.transform)):  # type: ignore[misc]
        def apply(self, program: Program) -> TransformResult:
            before = {node: (node.name, set(node.all_input_nodes), tuple(node.users)) for node in program.graph.nodes}
            places = {origin(node): node for node in before}
            applied: TransformResult = super().apply(program)
            for fault in faults:
                if before[places[fault.site]][0] in applied.matched_roots:
                    fault.change(_spot(applied.program.graph, fault, places[fault.site], before))
            return applied

    transform = object.__new__(Broken)
    transform.__dict__.update(step.transform.__dict__)
    return TransformStep(step.key, transform)


def _spot(graph: fx.Graph, fault: Fault, place: fx.Node, before: dict[fx.Node, Any]) -> Spot:
    rng = random.Random(fault.seed)
    made = [node for node in graph.nodes if node not in before and origin(node) == fault.site]
    calls = [node for node in made if isinstance(node.target, torch._ops.OpOverload)]
    if calls:
        call = calls[-1]
        value = call if isinstance(call.meta["val"], Tensor) else next(iter(call.users))
        return Spot(graph, call, value, tuple(value.users), rng)
    # A clean-up puts nothing in: who read what it took away reads what that had read.
    left = set(graph.nodes)
    readers = [node for node in before[place][2] if node in left]
    values = {node for reader in readers for node in reader.all_input_nodes if node not in before[reader][1]}
    if len(values) != 1:
        raise Impossible("nobody reads it")
    return Spot(graph, None, values.pop(), tuple(readers), rng)
