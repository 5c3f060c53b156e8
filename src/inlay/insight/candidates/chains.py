"""Chains: calls that work on the same rows and stand next to each other, as large as they get."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.insight.candidates.region import Region, Sizes
from inlay.insight.candidates.work import FUSIBLE, Work, short, work_of
from inlay.program.graphs import operands

if TYPE_CHECKING:
    from collections.abc import Iterator


_MOST_NAMES = 4


@dataclass(eq=False)
class _Chain:
    nodes: set[fx.Node] = field(default_factory=set)
    rows: int = 0
    """Numbers that its largest call goes over."""
    reduces: bool = False


def chains(graph: fx.Graph, sizes: Sizes, stands_for: dict[str, frozenset[str]]) -> Iterator[Region]:
    """Chains of at least two kernels, and copies that stand alone."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    chain_of: dict[fx.Node, _Chain] = {}
    for node in graph.nodes:
        work = work_of(node)
        if work is not Work.VIEW and work not in FUSIBLE:
            continue
        own = _Chain({node}, _rows(node, sizes) if work in FUSIBLE else 0, work is Work.REDUCTION)
        for operand in dict.fromkeys(operands(node)):
            other = chain_of.get(operand)
            if other is None or other is own or not _same_rows(other, own, operand, node, sizes):
                continue
            if _is_whole(other.nodes | own.nodes, order):
                own = _Chain(own.nodes | other.nodes, max(own.rows, other.rows), own.reduces or other.reduces)
        for each in own.nodes:
            chain_of[each] = own
    for chain in dict.fromkeys(chain_of.values()):
        nodes = tuple(sorted(_trimmed(chain.nodes), key=order.__getitem__))
        region = _region(nodes, sizes, stands_for)
        if region is not None:
            yield region


def _rows(node: fx.Node, sizes: Sizes) -> int:
    """How many numbers a call goes over; a convolution may put a margin around what it reads."""
    if work_of(node) is Work.STENCIL:
        return sizes.numel(operands(node)[0].meta["val"])
    values = [node.meta.get("val"), *(each.meta.get("val") for each in operands(node))]
    flat = [each for value in values for each in (value if isinstance(value, (list, tuple)) else [value])]
    return max((sizes.numel(value) for value in flat if isinstance(value, torch.Tensor)), default=0)


def _same_rows(chain: _Chain, own: _Chain, operand: fx.Node, node: fx.Node, sizes: Sizes) -> bool:
    """Whether a call goes over what the chain goes over; or over the result of a reduction in it.

    A convolution reads a number several times: what others read too is better stored once than computed again.
    """
    if work_of(node) is Work.STENCIL and _is_read_elsewhere(operand):
        return False
    if not chain.rows or not own.rows or chain.rows == own.rows:
        return True
    value: Any = operand.meta.get("val")
    return chain.reduces and isinstance(value, torch.Tensor) and sizes.numel(value) == own.rows


def _is_read_elsewhere(value: fx.Node) -> bool:
    """Whether a value, or what it is a view of, has several readers."""
    while len(value.users) == 1 and work_of(value) is Work.VIEW:
        value = operands(value)[0]
    return len(value.users) > 1


def _is_whole(nodes: set[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether no way leads out of the calls and back in: else they cannot be one kernel."""
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


def _trimmed(nodes: set[fx.Node]) -> set[fx.Node]:
    """Without views that lead out of a chain, nor those at its start that others read too."""
    kept = set(nodes)
    while True:
        views = {node for node in kept if work_of(node) is Work.VIEW}
        ends = {node for node in views if not any(user in kept for user in node.users)}
        starts = {
            node
            for node in views
            if not any(each in kept for each in operands(node)) and any(user not in kept for user in node.users)
        }
        if not ends | starts:
            return kept
        kept -= ends | starts


def _region(nodes: tuple[fx.Node, ...], sizes: Sizes, stands_for: dict[str, frozenset[str]]) -> Region | None:
    kernels = [node for node in nodes if work_of(node) in FUSIBLE]
    works = {work_of(node) for node in kernels}
    if not kernels or (len(kernels) < 2 and works != {Work.COPY}):
        return None
    names = [name for name, _ in groupby(short(node) for node in kernels)]
    calls = frozenset[str]().union(*(stands_for.get(node.name, frozenset({node.name})) for node in nodes))
    family, general = _sort(kernels, sizes)
    return Region(family, _name(names), ("+".join(names), general), nodes, calls)


def _name(names: list[str]) -> str:
    """
    >>> _name(["mul", "conv1d", "mul"]), _name(["pow", "mul", "add", "mul", "tanh", "add"])
    ('mul_conv1d_mul', 'pow_mul_add_6')
    """
    return "_".join(names) if len(names) <= _MOST_NAMES else "_".join([*names[:3], str(len(names))])


def _sort(kernels: list[fx.Node], sizes: Sizes) -> tuple[str, str]:
    """What a chain is, for people and for the catalog."""
    works = {work_of(node) for node in kernels}
    if works == {Work.COPY}:
        return "layout shuffle", "layout"
    if Work.STENCIL in works:
        return "elementwise chain", "stencil"
    if Work.REDUCTION in works:
        over = {_rows(node, sizes) for node in kernels if work_of(node) is Work.REDUCTION}
        return "norm chain", "reduction" if len(over) == 1 else "mixed reductions"
    return "elementwise chain", "pointwise"
