"""Backends: each turns a program into code that is bound to weights and state, then called.

Weights and state that a program owns are bound by name, once. Inputs are passed at every call, in the order of the
binding table. The code itself writes state, so calls return all outputs except states.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import UsageError, suggest
from inlay.lowering.inner_backend import compile_with
from inlay.lowering.state.in_place_writes import write_in_place
from inlay.lowering.state.index_put import canonicalize_updates
from inlay.ops import native
from inlay.program.bindings import Role
from inlay.program.graphs import copy_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.lowering.state.in_place_writes import InPlaceProgram
    from inlay.program.program import Program

    Run = Callable[[list[Any]], Sequence[Any]]
    BindableCode = Callable[[Mapping[str, torch.Tensor]], Run]
    Backend = Callable[[Program], BindableCode]


def eager(program: Program) -> BindableCode:
    """Run the calls of the graph one by one; they write state in place."""
    return _code(program, flat_module(write_in_place(program)))


def inductor(program: Program) -> BindableCode:
    """Compile the graph with Inductor, in this process."""
    module = flat_module(write_in_place(canonicalize_updates(program)[0]))
    examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():  # with gradients, a backward pass would be compiled for trainable weights
        return _code(program, compile_with("inductor", module, examples))


def aot(program: Program) -> BindableCode:
    """Compile a library with AOTInductor and load it; weights and state stay the caller's tensors."""
    from inlay.lowering.aoti import build_library
    from inlay.lowering.aoti_runtime import Library

    built = build_library(program)
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name, "program.so")
    native.install(Path(folder.name, native.LIBRARY_NAME))
    native.load(Path(folder.name, native.LIBRARY_NAME))
    file.write_bytes(built.library)
    file.with_suffix(".json").write_text(json.dumps({"nodes": built.fallback_calls}))
    rows = [row for row in program.bindings.ins if row.role is not Role.INPUT]
    tensors = [row.is_tensor for row in program.bindings.with_role(Role.INPUT)]

    def bind(held: Mapping[str, torch.Tensor]) -> Run:
        assert folder is not None  # keeps the folder as long as the loaded library
        run = Library(file).bind({name: held[row.name] for name, row in zip(built.constants, rows, strict=True)})

        def call(values: list[Any]) -> Sequence[Any]:
            results: Sequence[Any] = run([value for value, is_tensor in zip(values, tensors, strict=True) if is_tensor])
            return results

        return call

    return bind


BACKENDS: dict[str, Backend] = {"eager": eager, "inductor": inductor, "aot": aot}


def find_backend(name: str) -> Backend:
    """Return the backend of this name."""
    if name not in BACKENDS:
        raise UsageError(f"There is no backend {name}.", suggest(name, BACKENDS) or f"Known: {', '.join(BACKENDS)}.")
    return BACKENDS[name]


def _code(program: Program, function: Callable[..., Any]) -> BindableCode:
    """Wrap a function of all inputs, in table order, so that weights and state can be bound first."""
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


def flat_module(in_place_program: InPlaceProgram) -> fx.GraphModule:
    """Return the program as a module from all inputs to all outputs except states, which it writes itself."""
    graph = copy_graph(in_place_program.program.graph)
    output = graph.output_node()
    states = {state.output_index for state in in_place_program.states}
    values: Any = output.args[0]
    output.args = (tuple(value for index, value in enumerate(values) if index not in states),)
    return fx.GraphModule(graph.owning_module or torch.nn.Module(), graph, class_name="Inlay")
