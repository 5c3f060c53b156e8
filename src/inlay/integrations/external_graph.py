"""Checks and normalization of graphs from external passes: operators, types, boundary."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import TransformError, one_line
from inlay.program.graphs import (
    MODULE,
    ORIGIN,
    SOURCE,
    TypeFormatter,
    all_graphs,
    operands,
    provenance,
    subgraphs,
    target_text,
    view_base,
    written_operands,
)
from inlay.program.size_specialization import size_oblivious
from inlay.program.symbols import FakeValues
from inlay.program.tracer import trace_function

if TYPE_CHECKING:
    from inlay.program.program import Program

_META_KEYS = ("val", SOURCE, MODULE, ORIGIN)


def normalize_graph(graph: fx.Graph, before: Program) -> None:
    """Convert the graph that a pass returned to a program's form: ATen operators, known types, named placeholders."""
    _match_placeholders(graph, before)
    output = next(iter(reversed(graph.nodes)))
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    known = {node.name: node for node in before.graph.nodes}
    fakes, changed = FakeValues.from_graph(before.graph), set[fx.Node]()
    nested = {name for name, _ in subgraphs(graph)}
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.target not in nested:
            raise TransformError(f"{node.name} is a tensor that the pass added.", "Use only inputs of the program.")
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        if not changed.isdisjoint(operands(node)) or _needs_type(node, known.get(node.name)):
            if not _is_operator(node):
                changed.add(_lower_call(node, fakes))
                continue
            held, node.meta["val"] = node.meta.get("val"), fakes.compute_value(node)
            if before.types.text(held) != before.types.text(node.meta["val"]):
                changed.add(node)
    for _, each in all_graphs(graph):
        for node in each.nodes:
            node.meta = {key: node.meta[key] for key in _META_KEYS if key in node.meta}


def _match_placeholders(graph: fx.Graph, before: Program) -> None:
    """Match placeholders by position, because a pass that retraced the graph renamed them."""
    wanted = [node for node in before.graph.nodes if node.op == "placeholder"]
    found = [node for node in graph.nodes if node.op == "placeholder"]
    names, were = [node.name for node in found], [node.name for node in wanted]
    if len(names) != len(were):
        lost = [name for name in were if name not in names] if len(names) < len(were) else []
        more = [name for name in names if name not in were] if len(names) > len(were) else []
        what = f"missing {', '.join(lost)}" if lost else f"new {', '.join(more)}"
        raise TransformError(
            f"The graph has {len(names)} placeholders, expected {len(were)}: {what}.", "Keep the inputs of the program."
        )
    if names != were and sorted(names) == sorted(were):
        first = next(index for index, name in enumerate(names) if name != were[index])
        raise TransformError(f"Placeholder {first} is {names[first]}, expected {were[first]}: the order changed.")
    for node, was in zip(found, wanted, strict=True):
        text, old = before.types.text(node.meta.get("val", was.meta.get("val"))), before.types.text(was.meta.get("val"))
        if text != old:
            raise TransformError(f"The placeholder {was.name} is {text}, expected {old}.")
    taken = {node.name for node in graph.nodes} - set(names)
    for node, was in zip(found, wanted, strict=True):
        if was.name in taken:
            raise TransformError(f"Another node has the name of the input {was.name}.", "Keep the names of inputs.")
        node.meta = dict(was.meta)
        node.name = node.target = was.name


def _is_operator(node: fx.Node) -> bool:
    known = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    if isinstance(node.target, known) or node.target is operator.getitem:
        return True
    # Arithmetic on sizes uses Python operators and torch.sym_… on numbers.
    values = [each.meta.get("val") for each in operands(node)]
    return node.op == "call_function" and not any(isinstance(value, torch.Tensor) for value in values) and bool(values)


def _needs_type(node: fx.Node, was: fx.Node | None) -> bool:
    """Return whether a node's type must be computed, because it has none or the call changed."""
    if "val" not in node.meta or was is None or not _is_operator(node) or was.target is not node.target:
        return True
    return _args_text(node) != _args_text(was)


def _args_text(node: fx.Node) -> str:
    return repr(fx.map_arg((node.args, dict(node.kwargs)), lambda each: each))


def _lower_call(node: fx.Node, fakes: FakeValues) -> fx.Node:
    """Replace a call of a torch function or method by its ATen operators."""
    if node.op == "call_module":
        raise TransformError(f"{node.name} calls the module {node.target}.", "Add operators instead of modules.")
    inputs = list(dict.fromkeys(operands(node)))

    def call(*values: Any) -> Any:
        held = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), held.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        return target(*args, **kwargs)

    name = target_text(node.target)
    try:
        with size_oblivious(), fakes.activate():
            trace = trace_function(call, [each.meta["val"] for each in inputs]).graph
    except Exception as error:
        raise TransformError(f"{node.name} ({name}) cannot be traced to operators: {one_line(error)}.") from error
    return _inline(node, trace, inputs)


def _inline(node: fx.Node, trace: fx.Graph, inputs: list[fx.Node]) -> fx.Node:
    mapping: dict[fx.Node, fx.Node] = {}
    given = iter(inputs)
    with node.graph.inserting_before(node):
        for each in trace.nodes:
            if each.op == "placeholder":
                mapping[each] = next(given)
            elif each.op == "call_function":
                mapping[each] = node.graph.node_copy(each, mapping.__getitem__)
                mapping[each].meta |= provenance(node)
            elif each.op == "get_attr":
                raise TransformError(f"{node.name} ({target_text(node.target)}) uses a tensor that is not an input.")
    made = next(iter(reversed(trace.nodes))).args[0]
    if not isinstance(made, fx.Node):
        raise TransformError(f"{node.name} ({target_text(node.target)}) does not return one tensor.")
    node.replace_all_uses_with(mapping[made])
    node.graph.erase_node(node)
    return mapping[made]


def check_boundary(graph: fx.Graph, before: Program) -> None:
    """Check that number and types of outputs are unchanged, and that only state is written to."""
    found, wanted = (tree_leaves(next(iter(reversed(each.nodes))).args[0]) for each in (graph, before.graph))
    if len(found) != len(wanted):
        raise TransformError(
            f"The graph has {len(found)} outputs, expected {len(wanted)}.", "Keep the outputs of the program."
        )
    for row, now, was in zip(before.bindings.outs, found, wanted, strict=True):
        texts = [_type(each, before.types) for each in (now, was)]
        if texts[0] != texts[1]:
            raise TransformError(f"The output {row.name} is {texts[0]}, expected {texts[1]}.")
    state = {row.name for row in before.bindings.state}
    for node in graph.nodes:
        for held in map(view_base, written_operands(node)):
            if held.op == "placeholder" and held.name not in state:
                raise TransformError(
                    f"{node.name} ({target_text(node.target)}) writes to {held.name}, which the program only reads."
                )


def _type(value: Any, types: TypeFormatter) -> str:
    return types.text(value.meta.get("val")) if isinstance(value, fx.Node) else repr(value)
