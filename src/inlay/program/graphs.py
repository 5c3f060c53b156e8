"""Queries on fx graphs: nested graphs, node types as text, source lines, labels."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.bindings import Binding, Role, tensor_text
from inlay.program.gc_pause import pause_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

AS_STRIDED_OPS = (
    *(torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default, torch.ops.aten.as_strided_scatter.default),
)
"""Operators that address memory directly, independent of the strides of their operand."""
SOURCE = "source"
"""Key of `node.meta`: the source line in the model, as `file.py:line`."""
MODULE = "module"
"""Key of `node.meta`: the qualified name of the module that made the call."""
ORIGIN = "origin"
"""Key of `node.meta`: the name of the captured node that a transform replaced by this one."""


def origin(node: fx.Node) -> str:
    """Return the name of the captured node behind a node; rewrites of other sites do not change it."""
    return str(node.meta.get(ORIGIN, node.name))


def provenance(node: fx.Node) -> dict[str, Any]:
    """Return the provenance of a node, for the metadata of its replacement."""
    return {key: node.meta[key] for key in (SOURCE, MODULE) if key in node.meta} | {ORIGIN: origin(node)}


def subgraphs(graph: fx.Graph) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield the graphs that `graph` calls by name (branches of `cond`, loop bodies), in order of first use.

    >>> list(subgraphs(fx.Graph()))
    []
    """
    seen: set[str] = set()
    for node in graph.nodes:
        if node.op != "get_attr" or node.target in seen:
            continue
        seen.add(node.target)
        value: Any = graph.owning_module
        for part in node.target.split("."):
            value = getattr(value, part, None)
        if isinstance(value, fx.GraphModule):
            yield node.target, value


def all_graphs(graph: fx.Graph, name: str = "forward") -> Iterator[tuple[str, fx.Graph]]:
    """Yield `graph` and all nested graphs, outermost first, with names unique in the program."""
    yield name, graph
    for target, module in subgraphs(graph):
        yield from all_graphs(module.graph, nested_name(name, target))


def nested_name(name: str, target: str) -> str:
    """Return the name, unique in the program, of the graph that the graph `name` calls as `target`."""
    return (target if name == "forward" else f"{name}__{target}").replace(".", "_")


def all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield every node of `graph` and its nested graphs."""
    for _, each in all_graphs(graph):
        yield from each.nodes


def target_text(target: Any) -> str:
    """Return the Python name of an operator or function, without `torch.ops.`.

    >>> target_text(torch.ops.aten.mul.Tensor), target_text(torch.sym_max)
    ('aten.mul.Tensor', 'torch.sym_max')
    """
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"  # type: ignore[no-untyped-call]
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", "") or ""
    name = str(getattr(target, "__qualname__", repr(target))).removeprefix("_VariableFunctionsClass.")
    return f"{'operator' if module == '_operator' else module}.{name}"


def is_mutation(node: fx.Node) -> bool:
    """Whether a call writes to one of its operands.

    >>> is_mutation(fx.Graph().call_function(torch.ops.aten.add_.Tensor, (1, 2)))
    True
    """
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def sizes(value: torch.Tensor) -> list[str]:
    """Return the sizes of a tensor as text. Comparing text adds no guards on symbols.

    >>> sizes(torch.ones(2, 3))
    ['2', '3']
    """
    return [str(size) for size in value.shape]


def find_write_between(first: fx.Node, last: fx.Node) -> fx.Node | None:
    """Return the first call between `first` and `last` that writes in place, to any storage."""
    at = first
    while at is not last and at.op != "root":
        if at is not first and is_mutation(at):
            return at
        at = at.next
    return None


def is_copy_observable(node: fx.Node) -> bool:
    """Whether a copy differs from its source for a caller: it or a view of it is returned, or a write follows."""
    return is_returned(node) or find_write_between(node, node.graph.output_node()) is not None


def has_same_type(one: fx.Node, two: fx.Node) -> bool:
    """Whether two values have the same dtype, sizes and layout: kernels round differently in another layout."""
    first, second = one.meta["val"], two.meta["val"]
    same_layout = [str(step) for step in first.stride()] == [str(step) for step in second.stride()]
    return first.dtype == second.dtype and sizes(first) == sizes(second) and same_layout


def reachable(starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return these nodes and all that repeated steps reach from them."""
    found: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(step(node))
    return found


def ancestors(node: fx.Node) -> list[fx.Node]:
    """Return a node and everything it is computed from, in order.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> ancestors(graph.call_function(torch.ops.aten.relu.default, (x,)))
    [x, relu_default]
    """
    return sorted(reachable([node], lambda each: each.all_input_nodes))


def is_view(node: fx.Node) -> bool:
    """Whether the result of a call shares, or may share, the storage of an operand.

    >>> graph = fx.Graph()
    >>> is_view(graph.call_function(torch.ops.aten.expand.default, (graph.placeholder("x"), [2, 2])))
    True
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_function"
    returned = any(each.alias_info is not None for each in schema.returns)
    return returned or node.target in (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)


def is_returned(node: fx.Node) -> bool:
    """Whether the graph returns a value or a view of it.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> output = graph.output(graph.call_function(torch.ops.aten.view.default, (x, [-1])))
    >>> is_returned(x)
    True
    """
    views = reachable([node], lambda each: [user for user in each.users if is_view(user)])
    return any(user.op == "output" for each in views for user in each.users)


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a call writes to.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> written_operands(graph.call_function(torch.ops.aten.add_.Tensor, (x, 1)))
    [x]
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((each.name for each in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    names = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    found: list[fx.Node] = []
    fx.map_arg([given[name] for name in names if name in given], found.append)
    return found


def has_strided_reader(value: fx.Node) -> bool:
    """Whether `as_strided` reads a value, or a value computed from it that may have the same memory layout."""
    find = value.graph.find_nodes
    last = max((node for target in AS_STRIDED_OPS for node in find(op="call_function", target=target)), default=value)
    computed = reachable([value], lambda each: [user for user in each.users if user <= last])
    return any(node.target in AS_STRIDED_OPS and node is not value for node in computed)


def view_base(node: fx.Node) -> fx.Node:
    """Return the node whose storage a value shares, or may share: the base of a view.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> view_base(graph.call_function(torch.ops.aten.view.default, (x, [-1])))
    x
    """
    while node.op == "call_function" and is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def op_counts(graph: fx.Graph) -> Counter[str]:
    """Return the number of calls of each operator, including nested graphs, most frequent first.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> _ = graph.call_function(torch.ops.aten.relu.default, (x,))
    >>> op_counts(graph)
    Counter({'aten.relu.default': 1})
    """
    counts = Counter(target_text(node.target) for node in all_nodes(graph) if node.op == "call_function")
    return Counter(dict(counts.most_common()))


class TypeFormatter:
    """Formats node types as text, with the display names of symbols.

    Sizes repeat thousands of times in a graph and printing symbolic sizes is slow, so texts are cached.
    """

    def __init__(self, symbols: Mapping[str, str]) -> None:
        self._symbols = symbols
        self._sizes: dict[Any, str] = {}

    def dim(self, size: Any) -> int | str:
        """Return a size as an int, or as an expression such as `batch` or `2*length`."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        text = self._sizes.get(expr)
        if text is None:
            # Rename before printing: names determine the order of factors.
            names = {
                symbol: type(symbol)(self._symbols[str(symbol)], integer=True, positive=True)
                for symbol in getattr(expr, "free_symbols", ())
                if str(symbol) in self._symbols
            }
            text = self._sizes[expr] = str(expr.xreplace(names))
        return int(text) if text.isdigit() else text

    def shape(self, value: torch.Tensor) -> tuple[int | str, ...]:
        """Return the sizes of a tensor."""
        return tuple(self.dim(size) for size in value.shape)

    def binding(self, name: str, role: Role, value: Any) -> Binding:
        """Return the binding of a value; only tensors have a dtype and a shape."""
        if not isinstance(value, torch.Tensor):
            return Binding(name, role, name, "", ())
        return Binding(name, role, name, str(value.dtype).removeprefix("torch."), self.shape(value))

    def layout(self, value: Any) -> str:
        """Return the type and strides of a value: `f32[batch, 8] strides [8, 1]`."""
        if isinstance(value, torch.Tensor):
            return f"{self.text(value)} strides [{', '.join(str(self.dim(step)) for step in value.stride())}]"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(self.layout(item) for item in value)})"
        return self.text(value)

    def text(self, value: Any) -> str:
        """Return the type of a value: `f32[batch, 8]`, `batch`, `(f32[2], f32[2])`; empty if unknown."""
        if isinstance(value, torch.Tensor):
            return tensor_text(value.dtype, self.shape(value))
        if isinstance(value, (list, tuple)):
            return f"({', '.join(self.text(item) for item in value)})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(self.dim(value))
        if value is None:
            return ""
        return repr(value)


def labels(graph: fx.Graph, types: TypeFormatter) -> list[tuple[Any, ...]]:
    """Return a label for each node: operator, constants and types, but not which nodes it reads.

    Corresponding nodes of two equal layers have equal labels. Nested graphs are compared by content, not by name.
    """
    modules = dict(subgraphs(graph))

    def label_arg(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return ("@", types.text(arg.meta.get("val")))
        if isinstance(arg, (list, tuple)):
            return ("[", *map(label_arg, arg))
        if isinstance(arg, dict):
            return ("{", *((key, label_arg(item)) for key, item in arg.items()))
        return _constant(arg)

    result = []
    for node in graph.nodes:
        target: Any = target_text(node.target) if node.op == "call_function" else node.op
        if node.op == "get_attr" and node.target in modules:
            inner = modules[node.target].graph
            target = ("graph", *labels(inner, types), *_wiring(inner))
        elif node.op in ("get_attr", "call_module", "call_method"):
            target = (node.op, node.target)
        args = tuple(map(label_arg, node.args))
        kwargs = tuple((key, label_arg(node.kwargs[key])) for key in sorted(node.kwargs))
        result.append((target, args, kwargs, types.text(node.meta.get("val"))))
    return result


def _wiring(graph: fx.Graph) -> list[tuple[int, ...]]:
    """Return the positions of the nodes that each node reads."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    return [tuple(place[each] for each in operands(node)) for node in graph.nodes]


def _constant(arg: Any) -> Any:
    # 1, 1.0 and True are equal and have equal hashes, but are different constants; -0.0 and nan are special too.
    return (type(arg).__name__, repr(arg))


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that `node` reads, one entry for each use in its arguments, in order."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), found.append)
    return found


@pause_gc()
def is_sorted(graph: fx.Graph) -> bool:
    """Whether every call comes after its operands.

    >>> is_sorted(fx.Graph())
    True
    """
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return False
        seen.add(node)
    return True


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy `graph` and its nested graphs with their names; node values and weights are shared.

    >>> graph = fx.Graph()
    >>> graph.output(graph.placeholder("x"))
    output
    >>> [node.name for node in copy_graph(graph).nodes]
    ['x', 'output']
    """
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = new.graph_copy(graph, mapping)
    new.output(result)
    for node, copied in mapping.items():
        if copied.name != node.name:
            copied.name = node.name  # fx renames nodes that shadow a builtin, such as `input`
    attach_subgraphs(new, {target: _copy_module(module) for target, module in subgraphs(graph)})
    return new


def _copy_module(module: fx.GraphModule) -> fx.GraphModule:
    graph = copy_graph(module.graph)
    owner = graph.owning_module
    copied = fx.GraphModule(owner if owner is not None else torch.nn.Module(), graph)
    copied.meta = dict(module.meta)
    return copied


def attach_subgraphs(graph: fx.Graph, children: Mapping[str, fx.GraphModule]) -> None:
    """Make `children` the nested graphs of `graph`.

    The owner is a plain module, because a GraphModule would generate the code of the whole graph each time.
    """
    owner = torch.nn.Module()
    for name, child in children.items():
        owner.add_module(name, child)
    graph.owning_module = owner  # type: ignore[assignment]
