"""Regions around GEMMs and attention: linear layers with a shared input, GEMM epilogues, attention prologues."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.insight.candidates.op_kinds import OpKind, op_kind, op_name
from inlay.insight.candidates.region import EPILOGUE, FusionRegion
from inlay.program.graphs import operands

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


_LINEAR = torch.ops.aten.linear.default
_PASS_THROUGH = (OpKind.VIEW, OpKind.COPY, OpKind.POINTWISE, OpKind.ROTATION, OpKind.REDUCTION)
_ATTENTION_PROLOGUE = (OpKind.POINTWISE, OpKind.ROTATION, OpKind.REDUCTION)


def find_shared_inputs(graph: fx.Graph) -> Iterator[FusionRegion]:
    """Yield linear layers with the same input; one GEMM with concatenated weights can replace them."""
    readers: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is _LINEAR and all(_is_weight(each) for each in operands(node)[1:]):
            readers[operands(node)[0], len(operands(node)), operands(node)[1].meta["val"].dtype].append(node)
    for nodes in readers.values():
        if len(nodes) > 1:
            calls = frozenset(node.name for node in nodes)
            yield FusionRegion("shared input", _shared_name(nodes), ("shared_input_gemms",), tuple(nodes), calls)


def _is_weight(node: fx.Node) -> bool:
    return node.op == "placeholder"


def _shared_name(nodes: list[fx.Node]) -> str:
    """Return a name after the consumer of the results: attention, a shared pointwise call, or only the count."""
    into = [_downstream_nodes(node) for node in nodes]
    if all(any(op_kind(each) is OpKind.ATTENTION for each in found) for found in into):
        return "qkv_gemm" if len(nodes) == 3 else f"attention_gemms_{len(nodes)}"
    common = set.intersection(*into)
    if len(nodes) == 2 and any(op_kind(each) is OpKind.POINTWISE for each in common):
        return "gate_up_gemm"
    return f"shared_input_gemms_{len(nodes)}"


def _downstream_nodes(node: fx.Node) -> set[fx.Node]:
    """Return the calls downstream of a value, up to the next GEMM or attention."""
    found, todo = set[fx.Node](), list(node.users)
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            if op_kind(each) in _PASS_THROUGH:
                todo.extend(each.users)
    return found


def find_epilogues(
    graph: fx.Graph, taken: Collection[fx.Node], stands_for: dict[str, frozenset[str]]
) -> Iterator[FusionRegion]:
    """Yield pointwise calls that are the only consumer of GEMMs; calls in `taken` are already part of chains."""
    for node in graph.nodes:
        if op_kind(node) is not OpKind.POINTWISE or node in taken:
            continue
        ways = [_producer_chain(operand, node, (OpKind.GEMM,)) for operand in dict.fromkeys(operands(node))]
        found = [way for way in ways if way]
        if found:
            nodes = [*(each for way in found for each in way), node]
            calls = frozenset[str]().union(*(stands_for.get(each.name, frozenset({each.name})) for each in nodes))
            name = op_name(node)
            computes = (f"gemm+{name}", "gemm_epilogue")
            yield FusionRegion(EPILOGUE, f"gemm_{name}", computes, tuple(sorted(nodes)), calls)


def find_attention_prologues(graph: fx.Graph, stands_for: dict[str, frozenset[str]]) -> Iterator[FusionRegion]:
    """Yield calls whose only consumer is attention; the attention kernel could compute them while loading."""
    for node in graph.nodes:
        if op_kind(node) is not OpKind.ATTENTION:
            continue
        ways = [_producer_chain(operand, node, _ATTENTION_PROLOGUE) for operand in operands(node)[:3]]
        before = dict.fromkeys(each for way in ways for each in way)
        names = dict.fromkeys(op_name(each) for each in before if op_kind(each) is not OpKind.VIEW)
        if names:
            nodes = tuple(sorted({*before, node}))
            calls = frozenset[str]().union(*(stands_for.get(each.name, frozenset({each.name})) for each in nodes))
            whole = "+".join([*names, "attention"])
            yield FusionRegion(
                "attention neighbours", whole.replace("+", "_"), (whole, "around_attention"), nodes, calls
            )


def _producer_chain(value: fx.Node, reader: fx.Node, wanted: tuple[OpKind, ...]) -> list[fx.Node]:
    """Return the nearest producer of a wanted kind and the views after it; empty if another consumer reads them."""
    way: list[fx.Node] = []
    while set(value.users) == {reader}:
        way.append(value)
        work = op_kind(value)
        if work in wanted:
            return way[::-1]
        if work is not OpKind.VIEW:
            break
        value, reader = operands(value)[0], value
    return []
