"""Rules: a pattern, a check that states reasons, a replacement."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.graphs import SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from inlay.program.program import Program

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Patterns are traced in these: a model in half precision casts where one in full precision does not."""


class Refusal(Exception):  # noqa: N818 - a refusal is a result, not an error
    """A check said no."""

    def __init__(self, reason: str, node: fx.Node | None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


@dataclass(frozen=True, eq=False)
class Site:
    """A place where a pattern matched."""

    program: Program
    graph: fx.Graph
    values: Mapping[str, Any]
    """Argument of the pattern → node or number."""
    nodes: tuple[fx.Node, ...]
    """All matched nodes, in program order."""
    outputs: tuple[fx.Node, ...]

    def value(self, name: str) -> Any:
        """The fake tensor (or number) that an argument of the pattern stands for."""
        held = self.values[name]
        return held.meta.get("val") if isinstance(held, fx.Node) else held

    def node(self, name: str) -> fx.Node | None:
        """The node that an argument of the pattern stands for, if it is one: what a reason about it should name."""
        held = self.values.get(name)
        return held if isinstance(held, fx.Node) else None

    def require(self, condition: bool, reason: str, node: fx.Node | None = None) -> None:
        """State a condition; where it does not hold, the site is left alone and the reason is kept."""
        if not condition:
            raise Refusal(reason, node or self.outputs[0])


@dataclass(frozen=True, eq=False)
class Miss:
    """A place that starts like a pattern and fails: how much matched and what differs first."""

    root: fx.Node
    node: fx.Node
    reason: str
    matched: int
    of: int
    refused: bool = False

    @property
    def source(self) -> str:
        """The model's source line."""
        return str(self.node.meta.get(SOURCE, "") or self.root.meta.get(SOURCE, ""))


@dataclass(frozen=True, eq=False)
class Alternative:
    """One way of writing what a rule looks for, example arguments to trace it with, and what it fixes."""

    function: Callable[..., Any]
    example: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the replacement that follow from which alternative matched."""


class Rule:
    """What a rewrite consists of. `pattern` and every `pattern_…` method is one alternative.

    `examples` gives arguments to trace a pattern with; numbers in it must be values that occur nowhere else in the
    pattern, because that is how they are recognised. Sizes are odd primes, one for each size that is free, and
    products of them: the fuzzer puts other sizes in their places.
    """

    name = ""
    loose: frozenset[str] = frozenset()
    """Arguments that are not compared, such as the `size` of views; `check` must then make sure of them."""

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        """Arguments to trace the patterns with, by name; a pattern takes those it names."""
        raise NotImplementedError

    def fixed(self, pattern: str) -> Mapping[str, Any]:
        """Arguments of the replacement that follow from which pattern matched."""
        return {}

    def takes(self, output: fx.Node) -> bool:
        """Whether to rewrite the site that was just found, told by its first output."""
        return True

    def check(self, site: Site) -> None:
        """Refuse a site with `site.require(condition, reason)`."""

    def replacement(self, **values: Any) -> Any:
        """What to put in place of the pattern: plain torch or inlay operators."""
        raise NotImplementedError

    def alternatives(self, dtypes: set[torch.dtype]) -> Iterator[Alternative]:
        """Every pattern in every dtype that the program uses."""
        for name in sorted(each for each in dir(self) if each == "pattern" or each.startswith("pattern_")):
            function = getattr(self, name)
            wanted = inspect.signature(function).parameters
            for dtype in DTYPES:
                if dtype in dtypes:
                    example = {key: value for key, value in self.examples(dtype).items() if key in wanted}
                    yield Alternative(function, example, self.fixed(name))
