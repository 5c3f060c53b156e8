"""What a function changed in a graph, and the calls that are left in it."""

from __future__ import annotations

import operator
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch._ops import HigherOrderOperator, OpOverload

from inlay.program.exported_program import select_meta
from inlay.program.graphs import SOURCE, target_text

if TYPE_CHECKING:
    from torch import fx

MOST_LEFT = 8
"""How many calls of one operator are kept."""


def list_calls(subject: fx.Graph | fx.GraphModule) -> dict[str, tuple[str, str]]:
    """Return operator and arguments of the calls in a graph or in that of a module, by name of the node."""
    return {node.name: _call(node) for node in _calls(subject)}


def compare_calls(before: dict[str, tuple[str, str]], after: dict[str, tuple[str, str]]) -> Counter[str]:
    """Return how many calls of each operator were removed, added or changed; their order does not count."""
    changes = Counter(f"removed {before[name][0]}" for name in before if name not in after)
    changes.update(f"added {after[name][0]}" for name in after if name not in before)
    changes.update(f"changed {after[name][0]}" for name in after if before.get(name, after[name]) != after[name])
    return changes


def describe_left(subject: fx.Graph | fx.GraphModule) -> tuple[dict[str, tuple[str, ...]], Counter[str]]:
    """Return operator → its first calls in a graph, with arguments and source line; and operator → number of calls."""
    left: dict[str, tuple[str, ...]] = {}
    counts: Counter[str] = Counter()
    for node in _calls(subject):
        name, arguments = _call(node)
        counts[name] += 1
        if counts[name] <= MOST_LEFT:
            source = select_meta(node).get(SOURCE)
            text = f"{node.name} = {name}({textwrap.shorten(arguments, 160)})"
            left[name] = (*left.get(name, ()), f"{text} ({source})" if source else text)
    return left, counts


def _calls(subject: Any) -> list[fx.Node]:
    """Return the calls of a graph; to take a part of a tuple is none."""
    nodes = getattr(subject, "graph", subject).nodes
    return [node for node in nodes if node.op.startswith("call_") and node.target is not operator.getitem]


def _call(node: fx.Node) -> tuple[str, str]:
    """Return the operator of a call and its arguments. `auto_functionalized` names what it wraps."""
    name, args = target_text(node.target), node.args
    if isinstance(node.target, HigherOrderOperator) and args and isinstance(args[0], OpOverload):
        name, args = f"{name}({target_text(args[0])})", args[1:]
    return name, ", ".join([*map(str, args), *(f"{word}={value}" for word, value in node.kwargs.items())])
