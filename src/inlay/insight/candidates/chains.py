"""Chains: maximal groups of connected calls that iterate over the same rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.insight.candidates.op_kinds import FUSIBLE, OpKind, op_kind, op_name
from inlay.insight.candidates.region import ConcreteSizes, FusionRegion
from inlay.program.graphs import operands

if TYPE_CHECKING:
    from collections.abc import Iterator


_MOST_NAMES = 4


@dataclass(eq=False)
class _KernelChain:
    nodes: set[fx.Node] = field(default_factory=set)
    iteration_size: int = 0
    """Number of elements that its largest call iterates over."""
    has_reduction: bool = False


def find_chains(graph: fx.Graph, sizes: ConcreteSizes, stands_for: dict[str, frozenset[str]]) -> Iterator[FusionRegion]:
    """Yield chains of at least two kernels, and single copies."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    chain_of: dict[fx.Node, _KernelChain] = {}
    for node in graph.nodes:
        work = op_kind(node)
        if work is not OpKind.VIEW and work not in FUSIBLE:
            continue
        own = _KernelChain({node}, _iteration_size(node, sizes) if work in FUSIBLE else 0, work is OpKind.REDUCTION)
        for operand in dict.fromkeys(operands(node)):
            other = chain_of.get(operand)
            if other is None or other is own or not _can_join(other, own, operand, node, sizes):
                continue
            if _is_convex(other.nodes | own.nodes, order):
                own = _KernelChain(
                    own.nodes | other.nodes,
                    max(own.iteration_size, other.iteration_size),
                    own.has_reduction or other.has_reduction,
                )
        for each in own.nodes:
            chain_of[each] = own
    for chain in dict.fromkeys(chain_of.values()):
        nodes = tuple(sorted(_trim_views(chain.nodes), key=order.__getitem__))
        region = _region(nodes, sizes, stands_for)
        if region is not None:
            yield region


def _iteration_size(node: fx.Node, sizes: ConcreteSizes) -> int:
    """Return how many elements a call iterates over; for a convolution the input without padding."""
    if op_kind(node) is OpKind.STENCIL:
        return sizes.numel(operands(node)[0].meta["val"])
    values = [node.meta.get("val"), *(each.meta.get("val") for each in operands(node))]
    flat = [each for value in values for each in (value if isinstance(value, (list, tuple)) else [value])]
    return max((sizes.numel(value) for value in flat if isinstance(value, torch.Tensor)), default=0)


def _can_join(chain: _KernelChain, own: _KernelChain, operand: fx.Node, node: fx.Node, sizes: ConcreteSizes) -> bool:
    """Return whether a call iterates over the elements of the chain, or over the result of a reduction in it.

    A convolution reads each element several times. A value with other consumers is stored, not recomputed.
    """
    if op_kind(node) is OpKind.STENCIL and _is_read_elsewhere(operand):
        return False
    if not chain.iteration_size or not own.iteration_size or chain.iteration_size == own.iteration_size:
        return True
    value: Any = operand.meta.get("val")
    return chain.has_reduction and isinstance(value, torch.Tensor) and sizes.numel(value) == own.iteration_size


def _is_read_elsewhere(value: fx.Node) -> bool:
    """Return whether a value, or the base of its views, has several consumers."""
    while len(value.users) == 1 and op_kind(value) is OpKind.VIEW:
        value = operands(value)[0]
    return len(value.users) > 1


def _is_convex(nodes: set[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Return whether no path leaves the calls and returns; otherwise they cannot be one kernel."""
    first = min(order[node] for node in nodes)
    todo = [each for node in nodes for each in operands(node) if each not in nodes]
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or order.get(node, -1) < first:
            continue
        if node in nodes:
            return False
        seen.add(node)
        todo.extend(operands(node))
    return True


def _trim_views(nodes: set[fx.Node]) -> set[fx.Node]:
    """Remove views at the end of a chain, and views at its start that have other consumers."""
    kept = set(nodes)
    while True:
        views = {node for node in kept if op_kind(node) is OpKind.VIEW}
        ends = {node for node in views if not any(user in kept for user in node.users)}
        starts = {
            node
            for node in views
            if not any(each in kept for each in operands(node)) and any(user not in kept for user in node.users)
        }
        if not ends | starts:
            return kept
        kept -= ends | starts


def _region(
    nodes: tuple[fx.Node, ...], sizes: ConcreteSizes, stands_for: dict[str, frozenset[str]]
) -> FusionRegion | None:
    kernels = [node for node in nodes if op_kind(node) in FUSIBLE]
    works = {op_kind(node) for node in kernels}
    if not kernels or (len(kernels) < 2 and works != {OpKind.COPY}):
        return None
    names = [name for name, _ in groupby(op_name(node) for node in kernels)]
    calls = frozenset[str]().union(*(stands_for.get(node.name, frozenset({node.name})) for node in nodes))
    family, general = _classify(kernels, sizes)
    return FusionRegion(family, _name(names), ("+".join(names), general), nodes, calls)


def _name(names: list[str]) -> str:
    """
    >>> _name(["mul", "conv1d", "mul"]), _name(["pow", "mul", "add", "mul", "tanh", "add"])
    ('mul_conv1d_mul', 'pow_mul_add_6')
    """
    return "_".join(names) if len(names) <= _MOST_NAMES else "_".join([*names[:3], str(len(names))])


def _classify(kernels: list[fx.Node], sizes: ConcreteSizes) -> tuple[str, str]:
    """Return the family of a chain and its general key in the catalog."""
    works = {op_kind(node) for node in kernels}
    if works == {OpKind.COPY}:
        return "layout shuffle", "layout"
    if OpKind.STENCIL in works:
        return "elementwise chain", "stencil"
    if OpKind.REDUCTION in works:
        over = {_iteration_size(node, sizes) for node in kernels if op_kind(node) is OpKind.REDUCTION}
        return "norm chain", "reduction" if len(over) == 1 else "mixed reductions"
    return "elementwise chain", "pointwise"
