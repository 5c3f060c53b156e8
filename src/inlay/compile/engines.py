"""Engines: what runs a program. Each makes a function from all inputs to all outputs that are not state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.compile.below import aot_library, run_below
from inlay.errors import UsageError, nearest
from inlay.program.graphs import copy_graph
from inlay.state import canonical_updates, in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inlay.program.program import Program
    from inlay.state import InPlace

    Run = Callable[[list[Any]], Sequence[Any]]
    Engine = Callable[[Program, InPlace], Run]


def eager(program: Program, made: InPlace) -> Run:
    """The calls of the graph, one by one; state is written in place by them."""
    module = flat_module(made)

    def run(values: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            result: Sequence[Any] = module(*values)
        return result

    return run


def inductor(program: Program, made: InPlace) -> Run:
    """Code that Inductor makes of the graph, in this process."""
    module = flat_module(in_place(canonical_updates(program)[0]))
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():  # or a backward pass is compiled as well, wherever a weight could be trained
        compiled = run_below("inductor", module, examples)

    def run(values: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            result: Sequence[Any] = compiled(*values)
        return result

    return run


def aot(program: Program, made: InPlace) -> Run:
    """A library that AOTInductor makes, loaded; weights and state stay the caller's tensors."""
    return aot_library(canonical_updates(program)[0])


ENGINES: dict[str, Engine] = {"eager": eager, "inductor": inductor, "aot": aot}


def find_engine(name: str) -> Engine:
    """The engine of this name."""
    if name not in ENGINES:
        raise UsageError(f"There is no engine {name}.", nearest(name, ENGINES) or f"Known: {', '.join(ENGINES)}.")
    return ENGINES[name]


def flat_module(made: InPlace) -> fx.GraphModule:
    """The program as a module from all inputs to all outputs but state, which it writes to itself."""
    graph = copy_graph(made.program.graph)
    output = graph.output_node()
    states = {state.position for state in made.states}
    values: Any = output.args[0]
    output.args = (tuple(value for index, value in enumerate(values) if index not in states),)
    return fx.GraphModule(graph.owning_module or torch.nn.Module(), graph, class_name="Inlay")
