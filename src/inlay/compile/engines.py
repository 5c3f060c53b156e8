"""Engines: what runs a program. Each turns a program into code, which is bound to what the program holds, then called.

Weights and state that a program holds are bound by name, once; what it takes is given at every call, in the order of
its table. State is written to by the code itself, so calls return everything else.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.compile.below import run_below
from inlay.errors import UsageError, nearest
from inlay.ops import native
from inlay.program.bindings import Role
from inlay.program.graphs import copy_graph
from inlay.state import canonical_updates, in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.program.program import Program
    from inlay.state import InPlace

    Run = Callable[[list[Any]], Sequence[Any]]
    Code = Callable[[Mapping[str, torch.Tensor]], Run]
    Engine = Callable[[Program], Code]


def eager(program: Program) -> Code:
    """The calls of the graph, one by one; state is written in place by them."""
    return _code(program, flat_module(in_place(program)))


def inductor(program: Program) -> Code:
    """Code that Inductor makes of the graph, in this process."""
    module = flat_module(in_place(canonical_updates(program)[0]))
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():  # or a backward pass is compiled as well, wherever a weight could be trained
        return _code(program, run_below("inductor", module, examples))


def aot(program: Program) -> Code:
    """A library that AOTInductor makes, loaded; weights and state stay the caller's tensors."""
    from inlay.compile.aoti import build_library
    from inlay.compile.native import Library

    built = build_library(program)
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name, "program.so")
    native.copy(Path(folder.name, native.NAME))
    native.load(Path(folder.name, native.NAME))
    file.write_bytes(built.library)
    file.with_suffix(".json").write_text(json.dumps({"nodes": built.calls}))
    rows = [row for row in program.bindings.ins if row.role is not Role.INPUT]
    tensors = [row.is_tensor for row in program.bindings.of(Role.INPUT)]

    def bind(held: Mapping[str, torch.Tensor]) -> Run:
        assert folder is not None  # it lives as long as what was loaded from it
        run = Library(file).bind({name: held[row.name] for name, row in zip(built.constants, rows, strict=True)})

        def call(values: list[Any]) -> Sequence[Any]:
            results: Sequence[Any] = run([value for value, is_tensor in zip(values, tensors, strict=True) if is_tensor])
            return results

        return call

    return bind


ENGINES: dict[str, Engine] = {"eager": eager, "inductor": inductor, "aot": aot}


def find_engine(name: str) -> Engine:
    """The engine of this name."""
    if name not in ENGINES:
        raise UsageError(f"There is no engine {name}.", nearest(name, ENGINES) or f"Known: {', '.join(ENGINES)}.")
    return ENGINES[name]


def _code(program: Program, function: Callable[..., Any]) -> Code:
    """A function of all inputs in the order of the table, as code that some of them are bound to."""
    rows = program.bindings.ins

    def bind(held: Mapping[str, torch.Tensor]) -> Run:
        every = [held.get(row.name) if row.role is not Role.INPUT else None for row in rows]
        free = [place for place, row in enumerate(rows) if row.role is Role.INPUT]

        def run(values: list[Any]) -> Sequence[Any]:
            given = list(every)
            for place, value in zip(free, values, strict=True):
                given[place] = value
            with torch.no_grad():
                result: Sequence[Any] = function(*given)
            return result

        return run

    return bind


def flat_module(made: InPlace) -> fx.GraphModule:
    """The program as a module from all inputs to all outputs but state, which it writes to itself."""
    graph = copy_graph(made.program.graph)
    output = graph.output_node()
    states = {state.position for state in made.states}
    values: Any = output.args[0]
    output.args = (tuple(value for index, value in enumerate(values) if index not in states),)
    return fx.GraphModule(graph.owning_module or torch.nn.Module(), graph, class_name="Inlay")
