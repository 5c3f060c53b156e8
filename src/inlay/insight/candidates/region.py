"""Regions: calls that could be one kernel, and the estimated savings."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from inlay.insight.candidates.op_kinds import OpKind, is_kernel, op_kind
from inlay.program.graphs import operands

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from inlay.program.program import Program

EPILOGUE = "GEMM epilogue"
PREFILL_ROWS = 512
"""Number of prompt rows for which prefill savings are computed."""


@dataclass(frozen=True, eq=False)
class FusionRegion:
    """Calls of one graph that could be one kernel."""

    family: str
    """`norm chain`, `elementwise chain`, `GEMM epilogue`, …"""
    name: str
    catalog_keys: tuple[str, ...]
    """Keys to look up in the catalog, most specific first."""
    nodes: tuple[fx.Node, ...]
    """In program order."""
    calls: frozenset[str]
    """Their names in the searched program."""
    replacement: fx.Node | None = None
    """The call that a transform replaces them by, if there is one."""
    transform: str = ""

    @cached_property
    def kernels(self) -> tuple[fx.Node, ...]:
        """The calls that launch kernels."""
        return tuple(node for node in self.nodes if is_kernel(node))

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Tensors that are read from outside, in order of first use."""
        inside = set(self.nodes)
        found = [each for node in self.nodes for each in operands(node) if each not in inside]
        return tuple(each for each in dict.fromkeys(found) if isinstance(each.meta.get("val"), torch.Tensor))

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Values that are read outside the region."""
        inside = set(self.nodes)
        return tuple(node for node in self.nodes if any(user not in inside for user in node.users))


@dataclass(frozen=True)
class Savings:
    """Estimated savings of one kernel instead of several."""

    launches: int
    decode: int
    """Bytes, for one row."""
    prefill: int
    """Bytes, for `PREFILL_ROWS` rows."""

    def __add__(self, other: Savings) -> Savings:
        return Savings(self.launches + other.launches, self.decode + other.decode, self.prefill + other.prefill)


@dataclass
class ConcreteSizes:
    """Bytes of values for given sizes of a program's symbols."""

    program: Program
    rows: int
    """The value of every symbol except `batch`, which is 1; limited by the symbol's maximum."""
    _known: dict[Any, int] = field(default_factory=dict)

    def dim(self, size: Any) -> int:
        """Return a size as an integer."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        if expr not in self._known:
            values = {symbol: self._value(str(symbol)) for symbol in expr.free_symbols}
            self._known[expr] = max(1, int(expr.subs(values)))
        return self._known[expr]

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor as integers."""
        return tuple(self.dim(size) for size in value.shape)

    def numel(self, value: torch.Tensor) -> int:
        """Return the number of elements of a tensor."""
        return int(torch.Size(self.shape(value)).numel())

    def bytes(self, value: Any) -> int:
        """Return the bytes that reading a value touches; a broadcast axis is read once."""
        if isinstance(value, (list, tuple)):
            return sum(self.bytes(each) for each in value)
        if not isinstance(value, torch.Tensor):
            return 0
        sizes = [self.dim(size) for size, stride in zip(value.shape, value.stride(), strict=True) if str(stride) != "0"]
        return int(torch.Size(sizes).numel()) * value.element_size()

    def _value(self, raw: str) -> int:
        symbol = self.program.symbols.get(raw)
        if symbol is None or symbol.name == "batch":
            return 1
        return min(self.rows, symbol.high or self.rows)


def traffic(region: FusionRegion, sizes: ConcreteSizes) -> int:
    """Return the bytes moved between the kernels of a region that one kernel would not move."""
    apart = 0
    for node in region.kernels:
        read = {each: sizes.bytes(each.meta.get("val")) for each in operands(node)}
        apart += sum(read.values()) + sizes.bytes(node.meta.get("val"))
    inputs = region.inputs
    if region.family == EPILOGUE:  # each GEMM still reads its inputs; a shared input is a separate candidate
        inputs = tuple(each for node in region.kernels for each in operands(node) if each in set(region.inputs))
    together = sum(sizes.bytes(node.meta["val"]) for node in (*inputs, *region.outputs))
    return max(0, apart - together)


def estimate_savings(region: FusionRegion, sizes: Mapping[str, ConcreteSizes]) -> Savings:
    """Estimate the savings of one kernel for the region. A region of copies may need no kernel at all."""
    works = [op_kind(node) for node in region.kernels]
    left = 0 if set(works) == {OpKind.COPY} else works.count(OpKind.GEMM) if region.family == EPILOGUE else 1
    launches = max(0, len(region.kernels) - left)
    return Savings(launches, traffic(region, sizes["decode"]), traffic(region, sizes["prefill"]))
