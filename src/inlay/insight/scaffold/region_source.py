"""The calls of a region as Python source; dynamic sizes are read from the shapes of tensor arguments."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import UsageError
from inlay.insight.candidates.pattern import argument_names
from inlay.insight.candidates.region import ConcreteSizes, FusionRegion
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import target_text
from inlay.program.text.literals import literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from inlay.program.program import Program

_PRIMES = (3, 5, 7, 11, 13)
_OTHERS = (2, 9, 6, 4, 10)


@dataclass
class RegionSource:
    """A region with names for its inputs and values."""

    region: FusionRegion
    names: dict[fx.Node, str] = field(default_factory=dict)
    ignored_args: set[str] = field(default_factory=set)
    """Arguments of calls that contain dynamic sizes."""

    def __post_init__(self) -> None:
        self.names = argument_names(self.region)
        self.inputs = dict(self.names)
        for number, node in enumerate(self.region.nodes):
            self.names[node] = f"v{number}"

    @property
    def kernels(self) -> list[str]:
        """Names of the values that kernels compute."""
        return [self.names[node] for node in self.region.kernels]

    @property
    def outputs(self) -> list[str]:
        """Names of the values that are read outside the region."""
        return [self.names[node] for node in self.region.outputs]

    def statements(self) -> Iterator[str]:
        """Yield one statement per call; the value of the first kernel passes through `between`."""
        known = list(self.inputs)
        first = self.region.kernels[0]
        for node in self.region.nodes:
            text = self._call(node, known)
            if node is first:
                text = f"between({text})"
            yield f"{self.names[node]} = {text}"
            known.append(node)

    def _call(self, node: fx.Node, known: list[fx.Node]) -> str:
        if node.target is operator.getitem:
            return f"{self._value(node.args[0], known)}[{node.args[1]}]"
        for name, value in normalize_args(node):
            if _is_symbolic(value):
                self.ignored_args.add(name)
        args = [self._value(arg, known) for arg in node.args]
        args += [f"{name}={self._value(arg, known)}" for name, arg in node.kwargs.items()]
        return f"ops.{target_text(node.target)}({', '.join(args)})"

    def _value(self, value: Any, known: list[fx.Node]) -> str:
        if isinstance(value, fx.Node):
            held = value.meta.get("val")
            return self._size(held, known) if isinstance(held, torch.SymInt) else self.names[value]
        if isinstance(value, torch.SymInt):
            return self._size(value, known)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._value(each, known) for each in value) + "]"
        return literal(value, lambda node: self.names[node])

    def _size(self, size: torch.SymInt, known: list[fx.Node]) -> str:
        for node in known:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                for axis, each in enumerate(value.shape):
                    if str(each) == str(size):
                        return f"{self.names[node]}.shape[{axis}]"
        raise UsageError(
            f"{self.region.name} uses the size {size}, which none of its inputs has.",
            "Write this transform by hand: docs/adding_a_transform.md.",
        )


def _is_symbolic(value: Any) -> bool:
    """Return whether an argument is or contains a dynamic size."""
    if isinstance(value, (list, tuple)):
        return any(_is_symbolic(each) for each in value)
    held = value.meta.get("val") if isinstance(value, fx.Node) else value
    return isinstance(held, torch.SymInt)


@dataclass(frozen=True)
class ExampleShapes:
    """Example shapes for the inputs of a region; each symbol gets a number that the pattern does not contain."""

    program: Program

    def shape(self, value: torch.Tensor, others: bool = False) -> tuple[int, ...]:
        """Return the shape of one input; `others` selects a second set of sizes."""
        sizes = _FixedSizes(self.program, 1)
        sizes.values = dict(zip(self.program.symbols, _OTHERS if others else _PRIMES, strict=False))
        return sizes.shape(value)

    def axes(self, value: torch.Tensor) -> dict[int, str]:
        """Return the dynamic axes with the names of the program's symbols."""
        names = {raw: symbol.name for raw, symbol in self.program.symbols.items()}
        return {axis: names[str(size)] for axis, size in enumerate(value.shape) if str(size) in names}


@dataclass
class _FixedSizes(ConcreteSizes):
    values: Mapping[str, int] = field(default_factory=dict)

    def _value(self, raw: str) -> int:
        return self.values.get(raw, 3)


def is_float(node: fx.Node) -> bool:
    """Return whether a value is floating point."""
    return bool(node.meta["val"].is_floating_point())
