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

    from inlay.rewrite.reasons import Reason
    from inlay.rewrite.replacement import ReplacementCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Patterns are traced in these: a model in half precision casts where one in full precision does not."""


class Refused(Exception):  # noqa: N818 - a result, not an error
    """A condition of a match does not hold: it is left alone, and the driver makes a `Refusal` of it."""

    def __init__(self, kind: Reason, text: str, node: fx.Node | None = None) -> None:
        super().__init__(kind.sentence(text))
        self.kind, self.text, self.node = kind, text, node


@dataclass(frozen=True, eq=False)
class Match:
    """A place that a transform may rewrite."""

    nodes: tuple[fx.Node, ...]
    """All matched nodes, in program order."""
    outputs: tuple[fx.Node, ...]
    """Those that are read elsewhere; the first is what the match is told by."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What was found: argument of a pattern → node or number."""
    alternative: Alternative | None = None
    """The pattern that matched, where the transform has patterns."""
    replacements: ReplacementCache | None = None
    """What the rule puts in its place."""

    @classmethod
    def at(cls, root: fx.Node, *others: fx.Node, **values: Any) -> Match:
        """A match that is told by `root`, of this and the other nodes."""
        return cls(tuple(sorted((root, *others))), (root,), values)

    @property
    def root(self) -> fx.Node:
        """The node that the match is told by."""
        return self.outputs[0]

    @property
    def graph(self) -> fx.Graph:
        """The graph it stands in: the program's own, or a nested one."""
        return self.root.graph

    def value(self, name: str) -> Any:
        """The fake tensor (or number) that an argument of the pattern stands for."""
        held = self.values[name]
        return held.meta.get("val") if isinstance(held, fx.Node) else held

    def node(self, name: str) -> fx.Node | None:
        """The node that an argument of the pattern stands for, if it is one: what a reason about it should name."""
        held = self.values.get(name)
        return held if isinstance(held, fx.Node) else None

    def require(self, condition: bool, kind: Reason, text: str, node: fx.Node | None = None) -> None:
        """State a condition; where it does not hold, the match is left alone and the reason is kept."""
        if not condition:
            raise Refused(kind, text, node or self.root)

    def refusal(self, refused: Refused) -> Refusal:
        """This match, which was refused."""
        size = len(self.nodes)
        return Refusal(self.root, refused.node or self.root, refused.kind, refused.text, size, size)


@dataclass(frozen=True, eq=False)
class Refusal:
    """A place that starts like a match and is left alone: how much of it matched, and what differs first."""

    root: fx.Node
    node: fx.Node
    """The node to look at."""
    kind: Reason
    text: str
    matched: int = 1
    pattern_nodes: int = 1
    is_mismatch: bool = False
    """Whether the pattern did not match; otherwise it did, and a condition refused it."""

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
    """One way of writing what a rule looks for, example arguments to trace it with, and what it fixes."""

    function: Callable[..., Any]
    example: Mapping[str, Any]
    replacement_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the replacement that follow from which alternative matched."""


class Rule:
    """What a rewrite consists of. `pattern` and every `pattern_…` method is one alternative.

    `examples` gives arguments to trace a pattern with; numbers in it must be values that occur nowhere else in the
    pattern, because that is how they are recognised. Sizes are odd primes, one for each size that is free, and
    products of them: the fuzzer puts other sizes in their places.
    """

    name = ""
    ignored_args: frozenset[str] = frozenset()
    """Arguments that are not compared, such as the `size` of views; `check` must then make sure of them."""

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        """Arguments to trace the patterns with, by name; a pattern takes those it names."""
        raise NotImplementedError

    def replacement_args(self, pattern: str) -> Mapping[str, Any]:
        """Arguments of the replacement that follow from which pattern matched."""
        return {}

    def check(self, match: Match) -> None:
        """Refuse a match with `match.require(condition, Reason.SHAPE, text)`."""

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
                    yield Alternative(function, example, self.replacement_args(name))
