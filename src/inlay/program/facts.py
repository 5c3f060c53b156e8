"""Model facts: the key sizes of a model, each with its origin."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Fact:
    """A number and its origin: `config`, `graph`, or `config, graph` if both agree."""

    value: int
    origin: str


@dataclass(frozen=True)
class Facts:
    """The known facts of a model. A module that is not a decoder has fewer of them."""

    architecture: str = ""
    layers: Fact | None = None
    heads: Fact | None = None
    kv_heads: Fact | None = None
    head_size: Fact | None = None
    hidden_size: Fact | None = None
    vocabulary: Fact | None = None
    max_length: Fact | None = None
    left_out: tuple[str, ...] = ()
    """Modules of which the program computes nothing, such as the vision part of a multimodal model."""

    def items(self) -> Iterator[tuple[str, Fact]]:
        """Yield the known facts by name.

        >>> list(Facts(layers=Fact(30, "config")).items())
        [('layers', Fact(value=30, origin='config'))]
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Fact):
                yield each.name, value


def reconcile(config: int | None, graph: int | None) -> Fact | None:
    """Merge one fact from two sources. If they differ, the graph wins and both are reported.

    >>> reconcile(30, 30), reconcile(None, 4), reconcile(8, 6)
    (Fact(value=30, origin='config, graph'), Fact(value=4, origin='graph'), Fact(value=6, origin='graph (config: 8)'))
    """
    if config is None:
        return None if graph is None else Fact(graph, "graph")
    if graph is None:
        return Fact(config, "config")
    return Fact(graph, "config, graph" if config == graph else f"graph (config: {config})")
