"""Make a failing program small: fewer outputs, fewer calls, then a script that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inlay.program.bindings import Role
from inlay.program.graphs import is_mutation
from inlay.program.text.printer import dump
from inlay.testing.fuzz.checker import Failure, InvalidProgramError, check, values_of
from inlay.testing.fuzz.program_builder import build_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.program.program import Program
    from inlay.testing.fuzz.checker import Inputs


def reduce_failure(found: Failure) -> Failure:
    """The same failure in the smallest program that removing outputs, calls and inputs one at a time gives."""
    while True:
        for program, runs in _smaller_variants(found):
            again = _check_one(program, runs, found.transform)
            if again is not None:
                found = again
                break
        else:
            return found


def _check_one(program: Program, runs: Sequence[Inputs], transform: str) -> Failure | None:
    try:
        return check(program, runs, [transform])
    except InvalidProgramError:
        return None


def _smaller_variants(found: Failure) -> Iterator[tuple[Program, Sequence[Inputs]]]:
    for index in range(len(found.runs) if len(found.runs) > 1 else 0):
        yield found.program, [found.runs[index]]
    outputs = len(found.program.bindings.outs)
    for index in range(outputs if outputs > 1 else 0):
        copy = found.program.copy()
        output = copy.graph.output_node()
        kept = list(output.args[0])  # type: ignore[arg-type]
        del kept[index]
        output.args = (tuple(kept),)
        yield _remove_dead_code(copy, found.runs)
    values = [values_of(found.program, inputs) for inputs in found.runs]
    for name in [node.name for node in found.program.graph.nodes if node.op == "call_function"]:
        copy = found.program.copy()
        node = next(each for each in copy.graph.nodes if each.name == name)
        if is_mutation(node) and not node.users:
            copy.graph.erase_node(node)
            yield _remove_dead_code(copy, found.runs)
        elif node.users and isinstance(node.meta["val"], torch.Tensor):
            first = next(iter(copy.graph.nodes))
            with copy.graph.inserting_before(first):
                given = copy.graph.placeholder(f"given_{name}")
            given.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(given)
            if not is_mutation(node):
                copy.graph.erase_node(node)
            computed = [each[name].clone() for each in values]
            yield _remove_dead_code(
                copy, [{**old, given.name: new} for old, new in zip(found.runs, computed, strict=True)]
            )


def _remove_dead_code(program: Program, runs: Sequence[Inputs]) -> tuple[Program, Sequence[Inputs]]:
    graph = program.graph
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
    names = {node.name for node in graph.nodes if node.op == "placeholder"}
    parameters = {
        row.name: runs[0][row.name] for row in program.bindings.with_role(Role.PARAMETER) if row.name in names
    }
    kept = [{name: value for name, value in inputs.items() if name in names} for inputs in runs]
    return build_program(graph, parameters, program.symbols), kept


def render_script(found: Failure, origin: str) -> str:
    """A script that shows the failure, or says that it is gone."""
    drawn = [{name: _random_like(value) for name, value in inputs.items()} for inputs in found.runs]
    simple = _check_one(found.program, drawn, found.transform) is not None
    runs = "\n".join(_run(inputs, simple) for inputs in found.runs)
    return f'''"""{found.transform}: {found.problem}

Made by {origin}.
"""

from math import inf, nan

import torch

from inlay.program.text.parser import parse
from inlay.program.weights import InMemoryTensor
from inlay.testing.fuzz.checker import check

PROGRAM = """{dump(found.program)}"""
RUNS = [
{runs}
]

tensors = {{name: InMemoryTensor(value) for name, value in RUNS[0].items()}}
found = check(parse(PROGRAM, tensors), RUNS, ["{found.transform}"])
print(found.problem if found else "the numbers agree")
raise SystemExit(found is not None)
'''


def _run(inputs: Inputs, simple: bool) -> str:
    lines = [f'        "{name}": {_literal(value, simple)},' for name, value in inputs.items()]
    return "\n".join(["    {", *lines, "    },"])


def _random_like(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)


def _literal(value: torch.Tensor, simple: bool) -> str:
    if simple and value.is_floating_point():
        return f"torch.randn({list(value.shape)}, generator=torch.Generator().manual_seed(0)).to({value.dtype})"
    wide = value.double() if value.is_floating_point() else value
    return f"torch.tensor({wide.tolist()}, dtype=torch.float64).to({value.dtype}).reshape({list(value.shape)})"
