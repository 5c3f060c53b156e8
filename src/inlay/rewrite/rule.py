"""Rules: a pattern, a check that gives reasons, a replacement."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from inlay.errors import UsageError, suggest
from inlay.program.graphs import SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from inlay.rewrite.reasons import Reason
    from inlay.rewrite.replacement import ReplacementCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Patterns are traced in these dtypes: a model in half precision has casts that one in full precision lacks."""


class Refused(Exception):  # noqa: N818 - a result, not an error
    """Raised when a condition of a match does not hold. The match is left alone and reported as a `Refusal`."""

    def __init__(self, kind: Reason, text: str, node: fx.Node | None = None) -> None:
        super().__init__(kind.sentence(text))
        self.kind, self.text, self.node = kind, text, node


@dataclass(frozen=True, eq=False)
class Match:
    """A site that a transform may rewrite."""

    nodes: tuple[fx.Node, ...]
    """All matched nodes, in program order."""
    outputs: tuple[fx.Node, ...]
    """The nodes that are read outside the match; the first one identifies it."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Argument of the pattern → the node or number that it matched."""
    alternative: Alternative | None = None
    """The pattern that matched, if the transform has patterns."""
    replacements: ReplacementCache | None = None
    """The traced replacements of the rule."""

    @classmethod
    def at(cls, root: fx.Node, *others: fx.Node, **values: Any) -> Match:
        """Create a match of `root`, which identifies it, and the other nodes."""
        return cls(tuple(sorted((root, *others))), (root,), values)

    @property
    def root(self) -> fx.Node:
        """The node that identifies the match."""
        return self.outputs[0]

    @property
    def graph(self) -> fx.Graph:
        """The graph of the match: the program's main graph, or a nested one."""
        return self.root.graph

    def value(self, name: str) -> Any:
        """Return the fake tensor (or number) that an argument of the pattern matched."""
        if name not in self.values:
            raise UsageError(f"The pattern has no argument {name}.", suggest(name, self.values))
        held = self.values[name]
        return held.meta.get("val") if isinstance(held, fx.Node) else held

    def node(self, name: str) -> fx.Node | None:
        """Return the node that an argument of the pattern matched, or None: the node to name in a reason about it."""
        held = self.values.get(name)
        return held if isinstance(held, fx.Node) else None

    def require(self, condition: bool, kind: Reason, text: str, node: fx.Node | None = None) -> None:
        """Require a condition; if it does not hold, the match is refused with this reason."""
        if not condition:
            raise Refused(kind, text, node or self.root)

    def refusal(self, refused: Refused) -> Refusal:
        """Return the refusal of this match."""
        size = len(self.nodes)
        return Refusal(self.root, refused.node or self.root, refused.kind, refused.text, size, size)


@dataclass(frozen=True, eq=False)
class Refusal:
    """A site that starts like a match and is left alone: how much of it matched, and the first difference."""

    root: fx.Node
    node: fx.Node
    """The node to look at."""
    kind: Reason
    text: str
    matched: int = 1
    pattern_nodes: int = 1
    is_mismatch: bool = False
    """True if the pattern did not match; False if it matched and a condition refused it."""

    @property
    def reason(self) -> str:
        """The kind and the text as one sentence."""
        return self.kind.sentence(self.text)

    @property
    def source(self) -> str:
        """The model's source line."""
        return str(self.node.meta.get(SOURCE, "") or self.root.meta.get(SOURCE, ""))


@dataclass(frozen=True, eq=False)
class Alternative:
    """One pattern of a rule, example arguments to trace it with, and the replacement arguments that it implies."""

    function: Callable[..., Any]
    example: Mapping[str, Any]
    replacement_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the replacement that depend on which alternative matched."""


class Rule:
    """A rewrite: patterns, a check, a replacement. `pattern` and every `pattern_…` method is one alternative.

    `examples` returns arguments to trace a pattern with. Each number in it must be a value that occurs nowhere else in
    the pattern, because its value identifies it. Sizes are odd primes, one for each free size, and products of them:
    the fuzzer replaces them by other sizes.
    """

    name: ClassVar[str] = ""
    ignored_args: frozenset[str] = frozenset()
    """Arguments that are not compared, such as the `size` of views; `check` must verify them."""

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        """Return arguments to trace the patterns with, by name; a pattern gets those in its signature."""
        raise NotImplementedError

    def replacement_args(self, pattern: str) -> Mapping[str, Any]:
        """Return the arguments of the replacement that depend on which pattern matched."""
        return {}

    def check(self, match: Match) -> None:
        """Refuse a match with `match.require(condition, Reason.SHAPE, text)`."""

    def replacement(self, **values: Any) -> Any:
        """Compute what the pattern computes, with plain torch or inlay operators."""
        raise NotImplementedError

    def trace_key(self) -> str:
        """Return what the patterns depend on, apart from the class: rules with equal keys share traced patterns."""
        return repr(sorted(vars(self).items()))

    def alternatives(self, dtypes: set[torch.dtype]) -> Iterator[Alternative]:
        """Yield every pattern in every dtype that the program uses."""
        for name in sorted(each for each in dir(self) if each == "pattern" or each.startswith("pattern_")):
            function = getattr(self, name)
            wanted = inspect.signature(function).parameters
            for dtype in DTYPES:
                if dtype in dtypes:
                    example = {key: value for key, value in self.examples(dtype).items() if key in wanted}
                    tensors = [(key, value) for key, value in example.items() if isinstance(value, torch.Tensor)]
                    for (one, first), (two, second) in itertools.combinations(tensors, 2):
                        if first is second:  # they would be one variable of the pattern
                            problem = f"{self.name}: {one} and {two} of its examples are the same tensor."
                            raise UsageError(problem, "Create a tensor for each argument.")
                    yield Alternative(function, example, self.replacement_args(name))
