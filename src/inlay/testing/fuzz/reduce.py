"""Make a failing program small: fewer outputs, fewer calls, then a script that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inlay.program.bindings import Role
from inlay.program.graphs import mutates
from inlay.program.text import dump
from inlay.testing.fuzz.check import Break, check
from inlay.testing.fuzz.grow import as_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from inlay.program.program import Program


def reduced(found: Break) -> Break:
    """The same failure in the smallest program that removing outputs, calls and inputs one at a time gives."""
    while True:
        for program, inputs in _smaller(found):
            again = check(program, inputs, [found.transform])
            if again is not None:
                found = again
                break
        else:
            return found


def _smaller(found: Break) -> Iterator[tuple[Program, Mapping[str, torch.Tensor]]]:
    outputs = len(found.program.bindings.outs)
    for index in range(outputs if outputs > 1 else 0):
        copy = found.program.copy()
        output = next(iter(reversed(copy.graph.nodes)))
        kept = list(output.args[0])
        del kept[index]
        output.args = (tuple(kept),)
        yield _cleaned(copy, found.inputs)
    for name in [node.name for node in found.program.graph.nodes if node.op == "call_function"]:
        copy = found.program.copy()
        node = next(each for each in copy.graph.nodes if each.name == name)
        if mutates(node) and not node.users:
            copy.graph.erase_node(node)
            yield _cleaned(copy, found.inputs)
        elif node.users and isinstance(node.meta["val"], torch.Tensor):
            first = next(iter(copy.graph.nodes))
            with copy.graph.inserting_before(first):
                given = copy.graph.placeholder(f"given_{name}")
            given.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(given)
            if not mutates(node):
                copy.graph.erase_node(node)
            value = node.meta["val"]
            drawn = torch.randn(tuple(map(int, value.shape)), generator=torch.Generator().manual_seed(len(name)))
            yield _cleaned(copy, {**found.inputs, given.name: drawn.to(value.dtype)})


def _cleaned(program: Program, inputs: Mapping[str, torch.Tensor]) -> tuple[Program, Mapping[str, torch.Tensor]]:
    graph = program.graph
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
    names = {node.name for node in graph.nodes if node.op == "placeholder"}
    parameters = {row.name: inputs[row.name] for row in program.bindings.of(Role.PARAMETER) if row.name in names}
    return as_program(graph, parameters), {name: value for name, value in inputs.items() if name in names}


def script(found: Break, origin: str) -> str:
    """A script that shows the failure, or says that it is gone."""
    drawn = {name: _drawn(value) for name, value in found.inputs.items()}
    simple = check(found.program, drawn, [found.transform]) is not None
    lines = [f'    "{name}": {_literal(value, simple)},' for name, value in found.inputs.items()]
    inputs = "\n".join(lines)
    return f'''"""{found.transform}: {found.problem}

Made by {origin}.
"""

import torch

from inlay.program.parse import parse
from inlay.program.weights import InMemory
from inlay.testing.fuzz.check import check

PROGRAM = """{dump(found.program)}"""
INPUTS = {{
{inputs}
}}

tensors = {{name: InMemory(value) for name, value in INPUTS.items()}}
found = check(parse(PROGRAM, tensors), INPUTS, ["{found.transform}"])
print(found.problem if found else "the numbers agree")
raise SystemExit(found is not None)
'''


def _drawn(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)


def _literal(value: torch.Tensor, simple: bool) -> str:
    if simple and value.is_floating_point():
        return f"torch.randn({list(value.shape)}, generator=torch.Generator().manual_seed(0)).to({value.dtype})"
    return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
