"""Checks of the types in node metadata (dtype, shape, strides) against fake kernels or a run.

Memory plans, views and later transforms rely on node metadata. A wrong fake kernel, or a replacement of another type,
would make them silently wrong.
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
"""Operators for which torch selects a kernel at run time; their results have different strides (torch 2.13)."""


def type_mismatch(
    one: Any, two: Any, types: TypeFormatter, is_same: Callable[[Any, Any], bool] = is_same_size
) -> tuple[str, str]:
    """Return two values as text if dtype, shape or strides differ, else two empty strings.

    Strides of an axis of size 1 or of an empty tensor are ignored.

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
    sizes = [int(size) if isinstance(size, int) else None for size in two.shape]  # of `two`, which may be a real tensor
    if 0 in sizes:
        return True
    steps = zip(sizes, one.stride(), two.stride(), strict=True)
    return all(size == 1 or same(left, right) for size, left, right in steps)


class RunTypeChecker:
    """Compares the node types of a program with the values of one run; symbols get the sizes of its inputs."""

    def __init__(self, types: TypeFormatter) -> None:
        self.types = types
        self.mismatches: dict[str, str] = {}
        """Node name → its metadata type and its actual type, as text."""
        self._free_layouts: set[fx.Node] = set()
        self._symbol_values: dict[Any, int] = {}
        self._numbers: dict[Any, int] = {}
        """Expression of symbols → its number; evaluation is slow."""

    def check(self, node: fx.Node, value: Any) -> None:
        """Check an input, whose sizes bind the symbols, or the result of a call."""
        stated = node.meta.get("val")
        self._bind_symbols(stated, value)
        left, right = type_mismatch(stated, value, self.types, self._same)
        if left != right and self._layout_is_free(node, left):
            self._free_layouts.add(node)
        elif left != right and node.op != "placeholder":
            self.mismatches[node.name] = f"{node} ({target_text(node.target)}) has type {left}, but returns {right}"

    def _layout_is_free(self, node: fx.Node, stated: str) -> bool:
        """Whether only strides differ and torch chose them at run time, in this call or in an operand."""
        return " strides " in stated and (
            target_text(node.target) in _RUNTIME_LAYOUT_OPS or not self._free_layouts.isdisjoint(operands(node))
        )

    def _bind_symbols(self, stated: Any, value: Any) -> None:
        """Bind symbols to sizes; data-dependent ones, such as the number of nonzero elements, at first use."""
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
            if number.free_symbols:  # contains a symbol that is not bound yet
                return True
            self._numbers[expr] = int(number)
        return bool(self._numbers[expr] == real)


def check_types(program: Program, before: Program) -> None:
    """Check each call that is new or reads other values than in `before` against its fake kernel, and each output
    against its binding."""
    known = {name: {node.name: node for node in graph.nodes} for name, graph in all_graphs(before.graph)}
    checking = _FakeTypeChecker(program)
    for name, graph in all_graphs(program.graph):
        checking.check_graph(graph, known.get(name, {}))
    values, earlier = (tree_leaves(each.graph.output_node().args[0]) for each in (program, before))
    if len(values) - len(program.bindings.outs) != len(earlier) - len(before.bindings.outs):
        raise TransformError(
            f"The graph returns {len(values)} values, but the binding table has a different number of outputs."
        )
    for row, value in zip(program.bindings.outs, values, strict=False):
        held = value.meta.get("val") if isinstance(value, fx.Node) else value
        if not row.is_tensor or not isinstance(held, torch.Tensor):
            continue
        dtype, shape = str(held.dtype).removeprefix("torch."), program.types.shape(held)
        if (dtype, shape) != (row.dtype, row.shape):
            raise TransformError(f"The output {row.name} is {program.types.text(held)}, but must be {row.type_text}.")


class CallTypes:
    """The fake values of calls; equivalent calls are computed once.

    Calls are equivalent if operator, constants and operand types are equal. A result that shares the storage of an
    operand is computed each time, because its type does not identify the storage. So is a result with a data-dependent
    size.
    """

    def __init__(self, program: Program) -> None:
        self.fakes, self.types = FakeValues.from_graph(program.graph), program.types
        self._computed: dict[Any, tuple[Any, bool]] = {}
        """Label → value, and whether it is valid for all equivalent calls."""

    def compute_type(self, node: fx.Node) -> Any:
        """Return a value of the type of a call; it may share the storage of an equivalent call."""
        return self._compute(node)[0]

    def compute_value(self, node: fx.Node) -> Any:
        """Return the value of a call; it shares storage only with values that it is a view of."""
        value, is_new, is_shared = self._compute(node)
        if is_new:
            return value
        if not is_shared:
            return self.fakes.compute_value(node)
        with self.fakes.mode:
            return tree_map_only(torch.Tensor, _new_storage, value)

    def _compute(self, node: fx.Node) -> tuple[Any, bool, bool]:
        """Return a value, whether it was computed for this call, and whether it is valid for all equivalent calls."""
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
    """Return a label of a call with operand types instead of names."""
    named = fx.map_arg((node.args, dict(node.kwargs)), lambda each: types.layout(each.meta.get("val")))
    return node.target, repr(named)


def _new_storage(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _storages(values: Sequence[Any]) -> set[int]:
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


class _FakeTypeChecker:
    """Compares node types with fake kernels."""

    def __init__(self, program: Program) -> None:
        self.program, self.types = program, program.types
        self.calls = CallTypes(program)

    def check_graph(self, graph: fx.Graph, known: Mapping[str, fx.Node]) -> None:
        """Check nodes that are new or changed."""
        changed: set[fx.Node] = set()
        """Nodes that are new, or have another type than the node of the same name."""
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
        """Check that a nested graph returns the same types; not all of its calls can be computed from operands."""
        now, before = (fx.map_arg(each.args[0], lambda value: value.meta.get("val")) for each in (output, was))
        stated, found = type_mismatch(before, now, self.types)
        if stated != found:
            raise TransformError(f"A nested graph returns {found}, but returned {stated} before.")

    def _differs(self, node: fx.Node, was: fx.Node) -> bool:
        one, two = node.meta.get("val"), was.meta.get("val")
        return one is not two and type_mismatch(one, two, self.types) != ("", "")

    def _check(self, node: fx.Node) -> None:
        stated, found = type_mismatch(node.meta["val"], self.calls.compute_type(node), self.types)
        if stated != found:
            raise TransformError(
                f"{node.name} ({target_text(node.target)}) has type {stated}, but computing it gives {found}.",
                "Replace a value by one of the same dtype, shape and strides, or recompute types.",
            )


def _is_same_call(node: fx.Node, was: fx.Node) -> bool:
    one, two = ((each.op, each.target, repr((each.args, dict(each.kwargs)))) for each in (node, was))
    return one == two
