"""Work of a program, operator by operator, and of a plan, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from inlay.errors import UsageError
from inlay.program.bindings import Role
from inlay.program.pause import collector_paused
from inlay.streams.touched import GENERATOR, Touched, is_collective, is_part
from inlay.streams.work import Life, Storage, Task, Work

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import fx

    from inlay.compile.plan import Piece, Plan
    from inlay.program.program import Program


@collector_paused()
def work_of_program(program: Program, seconds: Mapping[str, float] | None = None) -> Work:
    """One task for each operator of a program, called like it; several results of an operator belong to its task.

    `seconds` are by operator (`inlay.streams.measured_calls`). Without them the work can be checked, not scheduled.

    >>> import torch
    >>> from inlay.testing import program_of
    >>> print(work_of_program(program_of(lambda x: x.t().relu(), [torch.ones(2, 2)]), {"t": 1e-6, "relu": 2e-6}))
    t (1.0 µs): nothing -> t
    relu (2.0 µs): values_0, t -> relu
    """
    touched = Touched(program)
    parts: dict[str, list[str]] = {}
    owner: dict[fx.Node, str] = {}
    tasks = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        owner[node] = owner[node.args[0]] if is_part(node) else node.name
        parts.setdefault(owner[node], []).append(node.name)
    for node, reads in touched.reads.items():
        time = _time(node.name, seconds)
        calls = tuple(parts[node.name])
        tasks.append(Task(node.name, reads, touched.writes[node], time, is_collective(node), calls))
    return Work(tuple(tasks), tuple(touched.storages.values()))


def _time(name: str, seconds: Mapping[str, float] | None) -> float | None:
    if seconds is None:
        return None
    if name not in seconds:
        raise UsageError(f"Nobody has measured {name}.", "Measure it, or say that it takes 0 seconds.")
    return seconds[name]


def work_of_plan(plan: Plan, seconds: Sequence[float] | None = None) -> Work:
    """One task for each step of a plan, called by its place and its piece. `seconds` are by place.

    A step reads its weights and all it takes, and writes what it makes and the states that its piece writes. What it
    makes may lie in the memory of what it took: it is then in both storages.
    """
    if seconds is not None and len(seconds) != len(plan.steps):
        raise UsageError(f"{len(seconds)} times were given for {len(plan.steps)} steps.")
    looks = {piece.name: _look(piece) for piece in plan.pieces}
    drawn = (GENERATOR,) if any(look.draws for look in looks.values()) else ()
    states = {row.name for row in plan.program.bindings.state}
    held: dict[str, tuple[str, ...]] = {}
    storages = {name: Storage(name, Life.STATE, (), 0) for name in drawn}
    for row in plan.program.bindings.ins:
        life = Life.STATE if row.name in states else Life.GIVEN
        size = row.nbytes if all(isinstance(each, int) for each in row.shape) else None
        storages[row.name], held[row.name] = Storage(row.name, life, (row.name,), size), (row.name,)
    tasks = []
    for place, step in enumerate(plan.steps):
        look = looks[step.piece]
        operands = (*step.constants, *step.ins)
        reads = dict.fromkeys(each for value in operands for each in held[value])
        writes = {each: None for index in look.written for each in held[operands[index]]}
        if look.draws:
            reads[GENERATOR] = writes[GENERATOR] = None
        known = (*operands, *step.outs)
        for value, sources in zip(step.outs, look.shared, strict=True):
            storages[value] = Storage(value, Life.INTERMEDIATE)
            held[value] = tuple(dict.fromkeys((value, *(each for index in sources for each in held[known[index]]))))
            writes[value] = None
        time = None if seconds is None else seconds[place]
        tasks.append(Task(f"{place}:{step.piece}", tuple(reads), tuple(writes), time, look.collective, (), (place,)))
    return Work(tuple(tasks), tuple(_lived(storages, held, plan.results)))


def _lived(
    storages: Mapping[str, Storage], held: Mapping[str, tuple[str, ...]], results: Sequence[str]
) -> Iterator[Storage]:
    """The storages with the values that lie in them, or may; what is handed to the caller outlives the run."""
    values: dict[str, list[str]] = {}
    for value, names in held.items():
        for name in names:
            values.setdefault(name, []).append(value)
    kept = {name for value in results for name in held[value]}
    loose = {name for value, names in held.items() for name in names if name != value}
    for name, each in storages.items():
        life = Life.RESULT if each.life is Life.INTERMEDIATE and name in kept else each.life
        yield replace(each, life=life, values=tuple(values.get(name, ())), loose=name in loose)


class _Look(NamedTuple):
    """What is seen of a piece. Its operands are its weights, then its inputs; after them come its results, by place."""

    written: list[int]
    """Operands that it writes to."""
    shared: list[list[int]]
    """For each result the operands and the results before it whose memory it may lie in."""
    draws: bool
    collective: bool


def _look(piece: Piece) -> _Look:
    touched = Touched(piece.program)
    nodes = {node.name: node for node in piece.program.graph.nodes}
    rows = [*piece.program.bindings.of(Role.PARAMETER), *piece.program.bindings.of(Role.INPUT)]
    written = {name for each in touched.writes.values() for name in each}
    values: Any = piece.program.graph.output_node().args[0]
    made = [value for row, value in zip(piece.program.bindings.outs, values, strict=True) if row.alias is None]
    names = [touched.name(nodes[row.name]) for row in rows]
    memory = [{each for each in touched.held(value) if touched.storages[each].bytes != 0} for value in made]
    shared = [
        [index for index, name in enumerate(names) if name in touched.held(value)]
        + [len(rows) + index for index in range(place) if memory[index] & memory[place]]
        for place, value in enumerate(made)
    ]
    return _Look(
        [index for index, name in enumerate(names) if name in written],
        shared,
        GENERATOR in touched.storages,
        any(is_collective(node) for node in piece.program.graph.nodes),
    )
