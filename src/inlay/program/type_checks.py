"""Types that nodes state (dtype, shape, strides), held against what computes them: a fake kernel, or a run.

Memory plans, views and the transforms that follow believe what a node states. A fake kernel that is wrong, or a value
that was replaced by one of another type, makes them wrong without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from inlay.errors import TransformError
from inlay.program.graphs import TypeFormatter, all_graphs, operands, target_text
from inlay.program.symbols import FakeValues, is_data_dependent, is_same_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.program.program import Program


_RUNTIME_LAYOUT_OPS = ("aten.scaled_dot_product_attention.default", "inlay.attention.default")
"""torch takes one of several kernels when it runs, whose results lie in memory in different ways (torch 2.13)."""


def type_mismatch(
    one: Any, two: Any, types: TypeFormatter, is_same: Callable[[Any, Any], bool] = is_same_size
) -> tuple[str, str]:
    """Two values as text, where dtype, shape or strides differ; two empty texts where they do not.

    Strides of an axis of one element, or of a tensor without any, mean nothing.

    >>> type_mismatch(torch.ones(2, 3), torch.ones(3, 2).T, TypeFormatter({}))
    ('f32[2, 3] strides [3, 1]', 'f32[2, 3] strides [1, 2]')
    >>> type_mismatch(torch.ones(2, 1), torch.ones(1, 2).T, TypeFormatter({}))
    ('', '')
    """
    left, right = tree_leaves(one), tree_leaves(two)
    if len(left) != len(right):
        return types.text(one), types.text(two)
    for each, other in zip(left, right, strict=True):
        if not isinstance(each, torch.Tensor) or not isinstance(other, torch.Tensor):
            numbers = (int, torch.SymInt)
            if isinstance(each, torch.Tensor) or isinstance(other, torch.Tensor):
                return types.text(each), types.text(other)
            if isinstance(each, numbers) and isinstance(other, numbers) and not is_same(each, other):
                return types.text(each), types.text(other)
            continue
        if each.dtype != other.dtype or each.dim() != other.dim() or not all(map(is_same, each.shape, other.shape)):
            return types.text(each), types.text(other)
        if not _same_strides(each, other, is_same):
            return types.layout(each), types.layout(other)
    return "", ""


def _same_strides(one: torch.Tensor, two: torch.Tensor, same: Callable[[Any, Any], bool]) -> bool:
    sizes = [int(size) if isinstance(size, int) else None for size in two.shape]  # of two, which may be a real value
    if 0 in sizes:
        return True
    steps = zip(sizes, one.stride(), two.stride(), strict=True)
    return all(size == 1 or same(left, right) for size, left, right in steps)


class RunTypeChecker:
    """What the nodes of one program state, held against the values of one run: symbols have the sizes of its inputs."""

    def __init__(self, types: TypeFormatter) -> None:
        self.types = types
        self.mismatches: dict[str, str] = {}
        """By the name of a node: what it states and is."""
        self._free_layouts: set[fx.Node] = set()
        self._symbol_values: dict[Any, int] = {}
        self._numbers: dict[Any, int] = {}
        """Expressions of symbols, as numbers: computing one is slow."""

    def check(self, node: fx.Node, value: Any) -> None:
        """An input, whose sizes say what the symbols are, or the value that a call gave."""
        stated = node.meta.get("val")
        self._bind_symbols(stated, value)
        left, right = type_mismatch(stated, value, self.types, self._same)
        if left != right and self._layout_is_free(node, left):
            self._free_layouts.add(node)
        elif left != right and node.op != "placeholder":
            self.mismatches[node.name] = f"{node} ({target_text(node.target)}) states {left} and is {right}"

    def _layout_is_free(self, node: fx.Node, stated: str) -> bool:
        """Whether only strides differ, and torch chose them when it ran: in this call, or in one that it reads."""
        return " strides " in stated and (
            target_text(node.target) in _RUNTIME_LAYOUT_OPS or not self._free_layouts.isdisjoint(operands(node))
        )

    def _bind_symbols(self, stated: Any, value: Any) -> None:
        """Symbols that no input has, such as the number of elements that are not zero, are learned where they arise."""
        for each, real in zip(tree_leaves(stated), tree_leaves(value), strict=False):
            if isinstance(each, torch.Tensor) and isinstance(real, torch.Tensor):
                self._bind_symbols(list(each.shape), list(real.shape))
            elif isinstance(each, torch.SymInt) and type(real) is int and each.node.expr.is_symbol:
                self._symbol_values.setdefault(each.node.expr, real)

    def _same(self, stated: Any, real: Any) -> bool:
        if not isinstance(stated, torch.SymInt):
            return bool(stated == real)
        expr = stated.node.expr
        if expr not in self._numbers:
            number = expr.subs(self._symbol_values)
            if number.free_symbols:  # it has a size that nothing was seen of so far
                return True
            self._numbers[expr] = int(number)
        return bool(self._numbers[expr] == real)


def check_types(program: Program, before: Program) -> None:
    """Every call that is new, or reads something else than in `before`, states what its fake kernel says; every output
    is what the bindings say."""
    known = {name: {node.name: node for node in graph.nodes} for name, graph in all_graphs(before.graph)}
    checking = _FakeTypeChecker(program)
    for name, graph in all_graphs(program.graph):
        checking.check_graph(graph, known.get(name, {}))
    values, earlier = (tree_leaves(each.graph.output_node().args[0]) for each in (program, before))
    if len(values) - len(program.bindings.outs) != len(earlier) - len(before.bindings.outs):
        raise TransformError(
            f"The graph returns {len(values)} values, and its bindings name another number of outputs."
        )
    for row, value in zip(program.bindings.outs, values, strict=False):
        held = value.meta.get("val") if isinstance(value, fx.Node) else value
        if not row.is_tensor or not isinstance(held, torch.Tensor):
            continue
        dtype, shape = str(held.dtype).removeprefix("torch."), program.types.shape(held)
        if (dtype, shape) != (row.dtype, row.shape):
            raise TransformError(f"The output {row.name} is {program.types.text(held)}, and must be {row.type_text}.")


class CallTypes:
    """The values of calls, computed with fake kernels; calls that are alike are computed once.

    A call is alike another one where operator, constants and the types of all operands are the same. A value that lies
    in the storage of an operand is computed each time: which storage it is, its type does not say. So is one whose size
    its data decides.
    """

    def __init__(self, program: Program) -> None:
        self.fakes, self.types = FakeValues.from_graph(program.graph), program.types
        self._computed: dict[Any, tuple[Any, bool]] = {}
        """A value, and whether it stands for all calls that are alike."""

    def compute_type(self, node: fx.Node) -> Any:
        """A value of the type that a call gives; the storage is that of some call that is alike."""
        return self._compute(node)[0]

    def compute_value(self, node: fx.Node) -> Any:
        """What a call gives, in storage that is shared with no call but those it is a view of."""
        value, is_new, is_shared = self._compute(node)
        if is_new:
            return value
        if not is_shared:
            return self.fakes.compute_value(node)
        with self.fakes.mode:
            return tree_map_only(torch.Tensor, _new_storage, value)

    def _compute(self, node: fx.Node) -> tuple[Any, bool, bool]:
        """A value, whether it was computed for this call, and whether it stands for all that are alike."""
        held = [leaf for each in operands(node) for leaf in tree_leaves(each.meta.get("val"))]
        if not all(isinstance(each, (torch.Tensor, torch.SymInt)) for each in held):
            return self.fakes.compute_value(node), True, False
        places = [(each.device, each.storage_offset()) for each in held if isinstance(each, torch.Tensor)]
        label = (*call_label(node, self.types), repr(places))
        is_new = label not in self._computed
        if is_new:
            value = self.fakes.compute_value(node)
            leaves = tree_leaves(value)
            is_view = not _storages(leaves).isdisjoint(_storages(held))
            self._computed[label] = value, not is_view and not any(map(is_data_dependent, leaves))
        value, is_shared = self._computed[label]
        return value, is_new, is_shared


def call_label(node: fx.Node, types: TypeFormatter) -> tuple[Any, str]:
    """A call, with the types of what it reads instead of names."""
    named = fx.map_arg((node.args, dict(node.kwargs)), lambda each: types.layout(each.meta.get("val")))
    return node.target, repr(named)


def _new_storage(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _storages(values: Sequence[Any]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


class _FakeTypeChecker:
    """Holds what a program states against its fake kernels."""

    def __init__(self, program: Program) -> None:
        self.program, self.types = program, program.types
        self.calls = CallTypes(program)

    def check_graph(self, graph: fx.Graph, known: Mapping[str, fx.Node]) -> None:
        """Check what is not as it was."""
        changed: set[fx.Node] = set()
        """Values that are new, or of another type than the one of that name."""
        for node in graph.nodes:
            was = known.get(node.name)
            if was is None or self._differs(node, was):
                changed.add(node)
            if (
                was is not None
                and node not in changed
                and changed.isdisjoint(operands(node))
                and _is_same_call(node, was)
            ):
                continue
            if node.op == "output" and was is not None and graph is not self.program.graph:
                self._same_results(node, was)
            elif node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator):
                label = call_label(node, self.types)
                if was is None or node in changed or call_label(was, self.types) != label:
                    self._check(node)

    def _same_results(self, output: fx.Node, was: fx.Node) -> None:
        """A nested graph returns what it did: not every call of one can be computed from its operands."""
        now, before = (fx.map_arg(each.args[0], lambda value: value.meta.get("val")) for each in (output, was))
        stated, found = type_mismatch(before, now, self.types)
        if stated != found:
            raise TransformError(f"A nested graph returns {found}, and returned {stated}.")

    def _differs(self, node: fx.Node, was: fx.Node) -> bool:
        one, two = node.meta.get("val"), was.meta.get("val")
        return one is not two and type_mismatch(one, two, self.types) != ("", "")

    def _check(self, node: fx.Node) -> None:
        stated, found = type_mismatch(node.meta["val"], self.calls.compute_type(node), self.types)
        if stated != found:
            raise TransformError(
                f"{node.name} ({target_text(node.target)}) states {stated}, and computing it gives {found}.",
                "A value may be replaced by one of the same dtype, shape and strides; else compute types again.",
            )


def _is_same_call(node: fx.Node, was: fx.Node) -> bool:
    one, two = ((each.op, each.target, repr((each.args, dict(each.kwargs)))) for each in (node, was))
    return one == two
