"""Run a graph before and after the pass, and compare every byte of outputs, inputs, their storages, and constants."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.auto_functionalized import is_auto_functionalized
from inlay.lowering.state.defunctionalization import expand_auto_functionalized, fix_functionalization

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass
class WriteFuzzCounts:
    """Counts of the changes of the pass."""

    graphs: int = 0
    """Graphs with at least one wrapped call that were compared completely."""
    without_writes: int = 0
    """Graphs without a wrapped call, which do not test the pass."""
    in_place: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    copies_removed: int = 0
    remaining_wrappers: int = 0
    """Wrappers that could not be expanded to copies and a call."""


@dataclass(frozen=True, eq=False)
class GraphResult:
    """The results and effects of a graph."""

    values: list[torch.Tensor]
    """Outputs, then the whole storage of each input, then constants."""
    aliases: set[tuple[int, int]]
    """Which outputs and inputs share storage, by position."""
    type_error: str
    """The first node whose value does not have the declared type, as text."""


def run(module: fx.GraphModule, inputs: Mapping[str, torch.Tensor]) -> GraphResult:
    """Run a graph on copies of inputs."""
    held: dict[str, torch.Tensor] = {}
    whole: list[torch.Tensor] = []
    for name, value in inputs.items():
        count = value.untyped_storage().nbytes() // value.element_size()
        whole.append(torch.as_strided(value, (count,), (1,), 0).clone())
        held[name] = torch.as_strided(whole[-1], value.shape, value.stride(), value.storage_offset())
    constants = [each.clone() for each in module.buffers()]
    values: dict[fx.Node, Any] = {}
    wrong, result = "", []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = held[node.name]
        elif node.op == "get_attr":
            values[node] = constants[0]
        elif node.op == "output":
            result = list(fx.map_arg(node.args[0], values.__getitem__))
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            wrong = wrong or _find_type_error(node, values[node])
    every = [*result, *held.values(), *constants]
    places = [each.untyped_storage().data_ptr() for each in every]
    shared = {(one, two) for two in range(len(every)) for one in range(two) if places[one] == places[two] != 0}
    return GraphResult([each.clone() for each in (*result, *whole, *constants)], shared, wrong)


def _find_type_error(node: fx.Node, value: Any) -> str:
    stated = node.meta.get("val")
    if isinstance(value, torch.Tensor) != isinstance(stated, torch.Tensor):
        return f"{node} declares {stated} but is {value}"
    if not isinstance(value, torch.Tensor) or not isinstance(stated, torch.Tensor):
        return ""
    layouts = [(tuple(each.shape), each.stride(), each.storage_offset(), each.dtype) for each in (stated, value)]
    return f"{node} declares {layouts[0]} but is {layouts[1]}" if layouts[0] != layouts[1] else ""


def check(module: fx.GraphModule, inputs: Mapping[str, torch.Tensor], tally: WriteFuzzCounts | None = None) -> str:
    """Return what differs after the pass, or after the remaining wrappers are expanded; empty if nothing differs."""
    before = run(module, inputs)
    if before.type_error:
        return f"invalid graph: {before.type_error}"
    changed = _copy(module)
    fixed = fix_functionalization(changed.graph)
    if tally is not None:
        tally.in_place += len(fixed.in_place)
        tally.refusals.update(str(each.copy_required.reason) for each in fixed.copied if each.copy_required is not None)
        tally.copies_removed += fixed.copies_removed
    problem = _compare(before, changed, inputs)
    if not problem:
        expand_auto_functionalized(changed.graph)
        problem = _compare(before, changed, inputs)
        if tally is not None:
            tally.remaining_wrappers += sum(map(is_auto_functionalized, changed.graph.nodes))
            writes = bool(fixed.in_place or fixed.copied)
            tally.graphs, tally.without_writes = tally.graphs + writes, tally.without_writes + (not writes)
    return problem


def _compare(before: GraphResult, changed: fx.GraphModule, inputs: Mapping[str, torch.Tensor]) -> str:
    try:
        changed.graph.lint()
        after = run(changed, inputs)
    except (RuntimeError, IndexError) as error:
        return f"the changed graph fails: {error}"
    if after.type_error:
        return after.type_error
    for index, (one, two) in enumerate(zip(before.values, after.values, strict=True)):
        if not torch.equal(one, two):
            return f"value {index} is now {two.tolist()} and was {one.tolist()}"
    new = sorted(after.aliases - before.aliases)
    return f"values {new[0]} now share storage" if new else ""


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def reduce_graph(module: fx.GraphModule, inputs: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """Return a smaller graph that still fails, found by removing outputs and calls one at a time."""
    while True:
        smaller = next((each for each in _smaller_variants(module) if _fails(each, inputs)), None)
        if smaller is None:
            return module
        module = smaller


def _fails(module: fx.GraphModule, inputs: Mapping[str, torch.Tensor]) -> bool:
    try:
        return bool(check(module, inputs))
    except (RuntimeError, IndexError):
        return False


def _smaller_variants(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    output = next(iter(reversed(module.graph.nodes)))
    for index in range(len(output.args[0])):
        copy = _copy(module)
        last = next(iter(reversed(copy.graph.nodes)))
        last.args = (tuple(each for place, each in enumerate(last.args[0]) if place != index),)
        yield copy
    for name in [node.name for node in module.graph.nodes if node.op == "call_function" and not node.users]:
        copy = _copy(module)
        copy.graph.erase_node(next(node for node in copy.graph.nodes if node.name == name))
        yield copy
