"""Running a program's calls in an order of their own, one at a time: what lanes do, without threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping

    from inlay.program import Program
    from inlay.streams import Schedule, WorkGraph


def any_order(rng: random.Random, made: Schedule) -> list[str]:
    """The tasks of a schedule in an order in which its lanes may run them."""
    heads, done = [0] * len(made.lanes), list[str]()
    while len(done) < len(made.lane_of):
        ready = [
            lane
            for lane, head in enumerate(heads)
            if head < len(made.lanes[lane]) and set(made.waits.get(made.lanes[lane][head], ())) <= set(done)
        ]
        lane = rng.choice(ready)
        done.append(made.lanes[lane][heads[lane]])
        heads[lane] += 1
    return done


def calls_of(work: WorkGraph, order: Iterable[str]) -> list[str]:
    return [call for name in order for call in work[name].calls]


@torch.no_grad()
def run_calls(program: Program, given: Mapping[str, Any], calls: Iterable[str]) -> list[Any]:
    """What the program returns when its calls are made in this order; a value that is not there yet is a KeyError."""
    nodes = {node.name: node for node in program.graph.nodes}
    values: dict[fx.Node, Any] = {node: given[node.name] for node in program.graph.nodes if node.op == "placeholder"}
    for name in calls:
        node = nodes[name]
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
    returned: Any = program.graph.output_node().args[0]
    return [values[each] for each in returned]
