"""Bound work: a work graph with the callable, the inputs and the outputs of each task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import UsageError
from inlay.lowering.executable import BoundStep, PlanExecutor
from inlay.program.bindings import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from inlay.program.program import Program
    from inlay.streams.work_graph import WorkGraph


@dataclass(frozen=True, eq=False)
class BoundWork:
    """Work that can be run. Each task is a call with bound weights, named inputs and named outputs.

    >>> from inlay.streams import Storage, Task, WorkGraph
    >>> work = WorkGraph((Task("double", ("x",), ("y",)),), (Storage("x"), Storage("y")))
    >>> bound = BoundWork(work, {"double": BoundStep(lambda values: [2 * values[0]], ("x",), ("y",))}, ("y",))
    >>> bound({"x": 21})
    [42]
    """

    work: WorkGraph
    steps: Mapping[str, BoundStep]
    """Task → its call."""
    results: tuple[str, ...]
    """The values that the work returns, without states."""

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The values that the caller passes: inputs and states."""
        made = {name for step in self.steps.values() for name in step.outs}
        taken = (name for step in self.steps.values() for name in step.ins)
        return tuple(dict.fromkeys(name for name in (*taken, *self.results) if name not in made))

    @cached_property
    def use_counts(self) -> Mapping[str, int]:
        """Value → how many tasks produce or use it. Inputs and results are not included: they are never dropped."""
        kept = {*self.inputs, *self.results}
        counts: dict[str, int] = {}
        for step in self.steps.values():
            for name in dict.fromkeys((*step.ins, *step.outs)):
                if name not in kept:
                    counts[name] = counts.get(name, 0) + 1
        return counts

    def __call__(self, given: Mapping[str, Any]) -> list[Any]:
        """Run all tasks in program order. Every schedule must give the same result."""
        return self._serial(given)

    @cached_property
    def _serial(self) -> PlanExecutor:
        return PlanExecutor([self.steps[task.name] for task in self.work.tasks], self.results)


def bind_program(program: Program, work: WorkGraph) -> BoundWork:
    """Bind the work of a program to the program's weights. Tasks may be pieces of several operators.

    The program must write its states in place (`inlay.lowering.state.write_in_place`). States that it owns are copied;
    calls update the copies.
    """
    values: Any = program.graph.output_node().args[0]
    for row, value in zip(program.bindings.outs, values, strict=True):
        if row.alias is not None and value.name != row.alias.binding:
            raise UsageError(
                f"The state {row.alias.binding} is returned, but not written in place.",
                "Use inlay.lowering.state.write_in_place(program).program.",
            )
    written = {row.name for row in program.bindings.state}
    held = {
        row.name: value.clone() if row.name in written else value
        for row in program.bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
        if (value := program.tensors[row.name].read()) is not None
    }
    results = [value for row, value in zip(program.bindings.outs, values, strict=True) if row.alias is None]
    if not all(isinstance(value, fx.Node) and value.name not in held for value in results):
        raise UsageError("The program returns a constant or one of its weights.", "Return computed values only.")
    nodes = {node.name: node for node in program.graph.nodes}
    wanted = _task_outputs(((task.name, [nodes[call] for call in task.calls]) for task in work.tasks), results)
    steps = {
        task.name: _build_call(program, [nodes[call] for call in task.calls], held, wanted[task.name])
        for task in work.tasks
    }
    return BoundWork(work, steps, tuple(value.name for value in results))


def _task_outputs(
    tasks: Iterable[tuple[str, Sequence[fx.Node]]], results: Sequence[fx.Node]
) -> dict[str, list[fx.Node]]:
    """Return for each task the nodes that other tasks or the caller use."""
    every = dict(tasks)
    home = {node: name for name, nodes in every.items() for node in nodes}
    returned = set(results)
    return {
        name: [node for node in nodes if node in returned or any(home.get(user, name) != name for user in node.users)]
        for name, nodes in every.items()
    }


def _build_call(
    program: Program, nodes: Sequence[fx.Node], held: Mapping[str, torch.Tensor], outs: Sequence[fx.Node]
) -> BoundStep:
    """Return some nodes of a program as one call."""
    inside = set(nodes)
    outside = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    for node in outside:
        here[node] = graph.node_copy(node) if node.op == "get_attr" else graph.placeholder(node.name)
    for node in nodes:
        here[node] = graph.node_copy(node, here.__getitem__)
    graph.output(tuple(here[node] for node in outs))
    owner = program.graph.owning_module or torch.nn.Module()
    forward: Callable[..., Any] = fx.GraphModule(owner, graph, class_name="Task").forward
    given = [node for node in outside if node.op != "get_attr"]
    every = [held.get(node.name) for node in given]
    free = [place for place, value in enumerate(every) if value is None]

    def run(values: list[Any]) -> Sequence[Any]:
        args: list[Any] = every.copy()
        for place, value in zip(free, values, strict=True):
            args[place] = value
        made: Sequence[Any] = forward(*args)
        return made

    return BoundStep(run, tuple(given[place].name for place in free), tuple(node.name for node in outs))
