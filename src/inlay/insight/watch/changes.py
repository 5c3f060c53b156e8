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


Call = tuple[str, Any, Any, Any]
"""Name of the node, operator, positional arguments, keyword arguments."""


def list_calls(subject: fx.Graph | fx.GraphModule) -> dict[str, Call]:
    """Return the calls in a graph or in that of a module, by name of the node."""
    return {node.name: (node.name, node.target, node.args, node.kwargs) for node in _calls(subject)}


def compare_calls(before: dict[str, Call], after: dict[str, Call]) -> Counter[str]:
    """Return how many calls of each operator were removed, added or changed; their order does not count."""
    changes = Counter(f"removed {_operator(before[name])[0]}" for name in before if name not in after)
    changes.update(f"added {_operator(after[name])[0]}" for name in after if name not in before)
    changed = (name for name in after if name in before and _is_changed(before[name], after[name]))
    changes.update(f"changed {_operator(after[name])[0]}" for name in changed)
    return changes


def _is_changed(one: Call, two: Call) -> bool:
    # Arguments are immutable, and most are the same objects. Others are compared as text: a symbolic size, as a number,
    # would add a guard.
    if one[1] is two[1] and one[2] is two[2] and one[3] is two[3]:
        return False
    return (_operator(one)[0], _arguments(one)) != (_operator(two)[0], _arguments(two))


def describe_left(subject: fx.Graph | fx.GraphModule) -> tuple[dict[str, tuple[str, ...]], Counter[str]]:
    """Return operator → its first calls in a graph, with arguments and source line; and operator → number of calls."""
    left: dict[str, tuple[str, ...]] = {}
    counts: Counter[str] = Counter()
    for node in _calls(subject):
        call = (node.name, node.target, node.args, node.kwargs)
        name, _ = _operator(call)
        counts[name] += 1
        if counts[name] <= MOST_LEFT:
            source = select_meta(node).get(SOURCE)
            text = f"{node.name} = {name}({textwrap.shorten(_arguments(call), 160)})"
            left[name] = (*left.get(name, ()), f"{text} ({source})" if source else text)
    return left, counts


def _operator(call: Call) -> tuple[str, Any]:
    """Return the operator of a call and its positional arguments. `auto_functionalized` names what it wraps."""
    _, target, args, _ = call
    name = target_text(target)
    if isinstance(target, HigherOrderOperator) and args and isinstance(args[0], OpOverload):
        return f"{name}({target_text(args[0])})", args[1:]
    return name, args


def _arguments(call: Call) -> str:
    return ", ".join([*map(str, _operator(call)[1]), *(f"{word}={value}" for word, value in call[3].items())])


def _calls(subject: Any) -> list[fx.Node]:
    """Return the calls of a graph; to take a part of a tuple is none."""
    nodes = getattr(subject, "graph", subject).nodes
    return [node for node in nodes if node.op.startswith("call_") and node.target is not operator.getitem]
