"""The calls of an exported program grouped by kind, and the decomposition of each kind.

A kind is an operator with its constants and the types of its operands.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from inlay.errors import one_line
from inlay.program.functionalization import functionalize_to_exported
from inlay.program.graphs import reachable
from inlay.program.symbols import FakeValues

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from torch.export import ExportedProgram

SYM_SIZE = torch.ops.aten.sym_size.int
SYM_ARITHMETIC = frozenset((operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod))
WRAP_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
PROVENANCE_KEYS = ("stack_trace", "nn_module_stack")
"""Metadata that torch copies from a call to every node of its decomposition."""
_ASSERT_METADATA = torch.ops.aten._assert_tensor_metadata.default


class NotDeduplicable(Exception):  # noqa: N818 - not an error
    """The calls of the program cannot be decomposed one by one."""


class _CallKind(NamedTuple):
    """One call of a kind (an operator, its constants and the types of its operands), and its operands."""

    call: fx.Node
    operands: tuple[fx.Node, ...]


class Decomposition(NamedTuple):
    """The decomposition of a kind of call: operands, nodes in order, and results; a result may be an operand."""

    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


class _CallOperands(NamedTuple):
    key: Hashable
    operands: tuple[fx.Node, ...]


class CallKinds:
    """The calls of an exported program, by kind."""

    def __init__(self, exported: ExportedProgram) -> None:
        self.fakes = FakeValues.from_graph(exported.graph)
        self.symbols: dict[Any, torch.SymInt] = {}
        self.kinds: dict[Hashable, _CallKind] = {}
        self.by_node: dict[fx.Node, _CallOperands] = {}
        self.size_provenance: dict[str, Any] = {}
        self._types: dict[fx.Node, Hashable] = {}
        self._collect(exported.graph_module)

    def _collect(self, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            _refuse_unbacked_sizes(node)
            if node.op == "get_attr":
                held = getattr(module, node.target)
                if not isinstance(held, fx.GraphModule) or any(
                    each.target is not WRAP_GRAD_MODE for each in node.users
                ):
                    raise NotDeduplicable(f"{node.name} is a nested graph or a constant attribute")
                self._collect(held)
            if node.op == "call_function" and not _is_structure(node):
                self._add_call(node)

    def _add_call(self, node: fx.Node) -> None:
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise NotDeduplicable(f"{node.name} calls {target}, which is not an operator overload")
        if target._schema.is_mutable:
            raise NotDeduplicable(f"{node.name} writes in place")
        if not all(isinstance(value, torch.Tensor) for value in result_values(node)):
            raise NotDeduplicable(f"{node.name} returns values that are not tensors")
        operands: dict[fx.Node, int] = {}

        def placed(value: Any) -> Hashable:
            if isinstance(value, (tuple, list)):
                return tuple(placed(each) for each in value)
            if not isinstance(value, fx.Node):
                return type(value), str(value) if isinstance(value, float) else value
            if is_symint(value):
                self._add_size_symbols(value)
                return "size", value.meta["val"].node.expr
            return operands.setdefault(value, len(operands)), self._type_of(value)

        try:
            key = target, placed(node.args), tuple((name, placed(value)) for name, value in node.kwargs.items())
            self.kinds.setdefault(key, _CallKind(node, tuple(operands)))
        except TypeError as error:
            raise NotDeduplicable(f"{node.name} has an unhashable constant") from error
        self.by_node[node] = _CallOperands(key, tuple(operands))

    def _add_size_symbols(self, node: fx.Node) -> None:
        size = node.meta["val"]
        if size.node.expr.is_Symbol:
            self.symbols.setdefault(size.node.expr, size)
        elif node.target not in SYM_ARITHMETIC:
            raise NotDeduplicable(f"{node.name} is a size that is neither a symbol nor supported arithmetic of symbols")
        else:
            for part in node.all_input_nodes:
                self._add_size_symbols(part)

    def _type_of(self, node: fx.Node) -> Hashable:
        if node not in self._types:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                raise NotDeduplicable(f"{node.name} is not a dense strided tensor")
            self._types[node] = _tensor_type(value)
            for _, size in symbolic_axes(value):
                if size.node.expr.is_Symbol:
                    self.symbols.setdefault(size.node.expr, size)
        return self._types[node]

    def decompose(self) -> tuple[dict[Hashable, Decomposition], dict[Any, Any]]:
        """Let torch decompose a graph with one call of each kind, each with separate operands."""
        graph = fx.Graph()
        axes = dict(zip(self.symbols, range(len(self.symbols)), strict=True))
        first = graph.placeholder("sizes")
        with self.fakes.mode:
            first.meta["val"] = torch.empty(tuple(self.symbols.values()), dtype=torch.uint8)
        own: list[dict[fx.Node, fx.Node]] = []
        for index, kind in enumerate(self.kinds.values()):
            own.append({node: graph.placeholder(f"x{index}_{place}") for place, node in enumerate(kind.operands)})
            for node, made in own[-1].items():
                made.meta["val"] = self._empty_like(node.meta["val"])

        def size(node: fx.Node) -> fx.Node:
            value = node.meta["val"]
            place = axes.get(value.node.expr)
            made = (
                graph.call_function(SYM_SIZE, (first, place))
                if place is not None
                else graph.call_function(node.target, fx.map_arg(node.args, size))  # type: ignore[arg-type]
            )
            made.meta["val"] = value
            return made

        results: list[fx.Node] = []
        for kind, operands in zip(self.kinds.values(), own, strict=True):
            operands |= {node: size(node) for node in kind.call.all_input_nodes if is_symint(node)}
            made = graph.node_copy(kind.call, operands.__getitem__)
            results += _add_getitems(graph, made) if has_multiple_results(kind.call) else [made]
        graph.output(tuple(results))
        try:
            functional = functionalize_to_exported(fx.GraphModule({}, graph), self.fakes)
        except Exception as error:
            # If the program itself is at fault, decomposing the whole program raises the error again.
            raise NotDeduplicable(f"torch cannot decompose its calls one by one: {one_line(error)}") from error
        sized = [node.meta for node in functional.graph.nodes if node.target is SYM_SIZE]
        self.size_provenance = {key: meta[key] for meta in sized[:1] for key in PROVENANCE_KEYS if key in meta}
        return self._split(functional.graph), functional.range_constraints

    def _empty_like(self, value: torch.Tensor) -> torch.Tensor:
        with self.fakes.mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            return torch.as_strided(made, value.shape, value.stride(), value.storage_offset())

    def _split(self, graph: fx.Graph) -> dict[Hashable, Decomposition]:
        """Split the decomposed graph into the decomposition of each kind."""
        placeholders = iter([node for node in graph.nodes if node.op == "placeholder"][1:])
        order = {node: place for place, node in enumerate(graph.nodes)}
        output: Any = next(iter(reversed(graph.nodes)))
        given = iter(output.args[0])
        became: dict[Hashable, Decomposition] = {}
        for key, kind in self.kinds.items():
            operands = tuple(next(placeholders) for _ in kind.operands)
            values = result_values(kind.call)
            results = tuple(next(given) for _ in values)
            for value, result in zip(values, results, strict=True):
                if _tensor_type(value) != _tensor_type(result.meta["val"]):
                    raise NotDeduplicable(f"{kind.call.name} changes its type when it is decomposed")
            inner = _ancestors(results)
            if any(node.op == "placeholder" and node not in operands for node in inner):
                raise NotDeduplicable(f"{kind.call.name} reads an input that is not its operand")
            nodes = sorted((node for node in inner if node.op != "placeholder"), key=order.__getitem__)
            became[key] = Decomposition(operands, tuple(nodes), results)
        return became


def _refuse_unbacked_sizes(node: fx.Node) -> None:
    for value in pytree.tree_leaves(node.meta.get("val")):
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, (torch.SymFloat, torch.SymBool)) or (
                isinstance(size, torch.SymInt) and not all(str(each)[0] == "s" for each in size.node.expr.free_symbols)
            ):
                raise NotDeduplicable(f"the size of {node.name} depends on data")


def is_symint(node: fx.Node) -> bool:
    """Whether a node is a symbolic integer: a number that depends on input sizes."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def _is_structure(node: fx.Node) -> bool:
    """Whether a call is not decomposed: sizes, `getitem` of results, assertions and grad-mode wrappers."""
    if node.target in (_ASSERT_METADATA, operator.getitem, WRAP_GRAD_MODE):
        return True
    return is_symint(node) and (node.target is SYM_SIZE or node.target in SYM_ARITHMETIC)


def has_multiple_results(node: fx.Node) -> bool:
    """Whether a call returns several results, which `getitem` selects from."""
    return isinstance(node.meta["val"], (tuple, list))


def result_values(node: fx.Node) -> tuple[Any, ...]:
    """The values of a call's results."""
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _add_getitems(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    made = []
    for place, value in enumerate(node.meta["val"]):
        part = graph.call_function(operator.getitem, (node, place))
        part.meta["val"] = value
        made.append(part)
    return made


def _ancestors(results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return all nodes that the results are computed from. Inputs of a size that is a symbol are not followed."""

    def inputs(node: fx.Node) -> list[fx.Node]:
        return [] if is_symint(node) and node.meta["val"].node.expr.is_Symbol else node.all_input_nodes

    return reachable(results, inputs)


def symbolic_axes(value: torch.Tensor) -> list[tuple[int, Any]]:
    """Return the axes of a tensor whose sizes are symbolic, with their sizes."""
    sizes: tuple[Any, ...] = tuple(value.shape)
    return [(axis, size) for axis, size in enumerate(sizes) if isinstance(size, torch.SymInt)]


def _tensor_type(value: torch.Tensor) -> tuple[Hashable, ...]:
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    sizes = (each.node.expr if isinstance(each, torch.SymInt) else each for each in numbers)
    return value.dtype, value.device, *sizes
