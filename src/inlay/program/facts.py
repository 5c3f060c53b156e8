"""Model facts: the numbers people ask for first, each with where it was found."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Fact:
    """A number and how it is known: `config`, `graph`, or `config, graph` when both agree."""

    value: int
    origin: str


@dataclass(frozen=True)
class Facts:
    """What is known of a model. A module that is no decoder simply has fewer of them."""

    architecture: str = ""
    layers: Fact | None = None
    heads: Fact | None = None
    kv_heads: Fact | None = None
    head_size: Fact | None = None
    hidden_size: Fact | None = None
    vocabulary: Fact | None = None
    max_length: Fact | None = None

    def items(self) -> Iterator[tuple[str, Fact]]:
        """The facts that are known, by name.

        >>> list(Facts(layers=Fact(30, "config")).items())
        [('layers', Fact(value=30, origin='config'))]
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Fact):
                yield each.name, value


def reconcile(config: int | None, graph: int | None) -> Fact | None:
    """One fact from two sources. Where they differ, the graph is what will run and both are shown.

    >>> reconcile(30, 30), reconcile(None, 4), reconcile(8, 6)
    (Fact(value=30, origin='config, graph'), Fact(value=4, origin='graph'), Fact(value=6, origin='graph (config: 8)'))
    """
    if config is None:
        return None if graph is None else Fact(graph, "graph")
    if graph is None:
        return Fact(config, "config")
    return Fact(graph, "config, graph" if config == graph else f"graph (config: {config})")
