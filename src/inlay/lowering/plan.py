"""Plan: a program as an ordered list of steps over pieces. A repeated block is one piece.

Nothing is compiled here. A piece is a Program: its weights are constants that each step binds to weights of the whole
program, its inputs and outputs are values that steps exchange, and state is an input that it writes to.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.state_updates import find_state_updates
from inlay.errors import ProgramError
from inlay.lowering.buckets import PlanStep
from inlay.ops.registration import SHIMS
from inlay.program.bindings import Alias, Binding, Bindings, Role
from inlay.program.fold import fold, size_arithmetic
from inlay.program.graphs import subgraphs
from inlay.program.program import CallSpec, Program
from inlay.program.type_propagation import retype
from inlay.program.weights import MissingTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inlay.program.fold import BlockKind

MAX_EAGER_CALLS = 24
"""A piece that is not a block, uses no state and has at most this many calls runs eagerly, unless it calls kernels."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a program that is compiled once; with `is_eager` it runs call by call instead."""

    name: str
    program: Program
    is_eager: bool = False
    states: tuple[str, ...] = ()
    """Inputs that are state of the whole program, whether the piece writes to them or not."""
    is_block: bool = False
    """Whether it is a repeated block, or the only piece."""

    @property
    def constants(self) -> tuple[Binding, ...]:
        """Its weights, in the order in which steps bind them."""
        return self.program.bindings.with_role(Role.PARAMETER)

    @property
    def ins(self) -> tuple[Binding, ...]:
        """Its inputs at every call."""
        return self.program.bindings.with_role(Role.INPUT)


@dataclass(frozen=True, eq=False)
class Plan:
    """How a program runs."""

    program: Program
    pieces: tuple[Piece, ...]
    steps: tuple[PlanStep, ...]
    results: tuple[str, ...]
    """The values that the program returns, without states."""


def make_plan(program: Program, ranges: Mapping[str, tuple[int, int | None]] | None = None) -> Plan:
    """Split a program into pieces, for sizes in these ranges (symbol name → low and high; equal means fixed).

    The pieces are the repeated blocks and the parts between them. A program with state that cannot be written in place,
    with nested graphs, or without repeated blocks becomes a plan of one piece.
    """
    ranges = {raw: (ranges or {}).get(each.name, (each.low, each.high)) for raw, each in program.symbols.items()}
    program = _add_missing_getitems(program)
    if any(not state.is_eligible for state in find_state_updates(program)) or any(subgraphs(program.graph)):
        segments = [_Segment(_calls(program))]
    else:
        segments = list(_segments(program))
    try:
        return _Partitioner(program, segments, ranges).plan()
    except _CannotPartition:
        return _Partitioner(program, [_Segment(_calls(program))], ranges).plan()


@dataclass(eq=False)
class _Segment:
    nodes: list[fx.Node]
    kind: BlockKind | None = None


class _CannotPartition(Exception):  # noqa: N818 - one more piece is a result, not an error
    """A split would need a value that cannot be passed between pieces."""


def _calls(program: Program) -> list[fx.Node]:
    sizes = size_arithmetic(list(program.graph.nodes))
    return [node for node in program.graph.nodes if node not in sizes]


def _add_missing_getitems(program: Program) -> Program:
    """Return a copy with a getitem for every result, used or not, so that the last block equals the others."""
    made = program.copy()
    for node in list(made.graph.nodes):
        value = node.meta.get("val")
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if node.op != "call_function" or not isinstance(value, (tuple, list)) or not items:
            continue
        after = node
        for index, item in enumerate(value):
            if index not in items:
                with made.graph.inserting_after(after):
                    items[index] = made.graph.call_function(operator.getitem, (node, index))
                items[index].meta = {"val": item}
            after.append(items[index])
            after = items[index]
    return made


def _segments(program: Program) -> Iterator[_Segment]:
    """Yield the blocks of the largest kinds in order, and the parts between them."""
    folds = fold(program, maximize_blocks=True)
    nodes = _calls(program)
    largest = max((kind.size for kind in folds.kinds), default=0)
    done = 0
    for kind, _, each in folds.iter_occurrences():
        if kind.size * 3 < largest:
            continue
        if each.start > done:
            yield _Segment(nodes[done : each.start])
        yield _Segment(list(each.nodes), kind)
        done = each.start + len(each.nodes)
    if done < len(nodes):
        yield _Segment(nodes[done:])


@dataclass(frozen=True)
class _Interface:
    """The inputs and outputs of a piece, by the names of values at one of its occurrences."""

    constants: tuple[str, ...]
    ins: tuple[str, ...]
    outs: tuple[str, ...]


class _Partitioner:
    """Creates pieces from segments. A value has the name of its node, a state the name of its binding."""

    def __init__(
        self, program: Program, segments: Sequence[_Segment], ranges: Mapping[str, tuple[int, int | None]]
    ) -> None:
        self.program, self.segments, self.ranges = program, list(segments), ranges
        self.segment_of = {node: index for index, each in enumerate(self.segments) for node in each.nodes}
        self.input_nodes: dict[int, list[fx.Node]] = {}
        self.segments_of_kind: dict[BlockKind, list[int]] = {}
        for index, each in enumerate(self.segments):
            if each.kind is not None:
                self.segments_of_kind.setdefault(each.kind, []).append(index)
        self.rows = {row.name: row for row in program.bindings.ins}
        self.states = {row.name for row in program.bindings.state}
        values: Any = program.graph.output_node().args[0]
        self.state_updates = {
            value: row.alias.binding
            for row, value in zip(program.bindings.outs, values, strict=True)
            if row.alias is not None
        }
        self.results = [value for row, value in zip(program.bindings.outs, values, strict=True) if row.alias is None]

    def plan(self) -> Plan:
        """Return the plan; a piece is created at the first occurrence of its kind."""
        pieces: dict[Any, Piece] = {}
        steps = []
        for index, segment in enumerate(self.segments):
            shape = self._interface(index)
            key = segment.kind if segment.kind is not None and self._has_same_states(segment.kind) else index
            if key not in pieces:
                pieces[key] = self._piece(index, shape, len(pieces))
            steps.append(PlanStep(pieces[key].name, shape.constants, shape.ins, shape.outs))
        results = tuple(self._value(each) if isinstance(each, fx.Node) else "" for each in self.results)
        if not all(results):
            raise ProgramError("The program returns a constant that is not a tensor.", "Return tensors only.")
        return Plan(self.program, tuple(pieces.values()), tuple(steps), results)

    def _value(self, node: fx.Node) -> str:
        """Return the name of a value between steps; an element of a tuple is named by its index."""
        if node in self.state_updates:
            return self.state_updates[node]
        if node.target is operator.getitem and self.segment_of.get(node) != self.segment_of.get(node.args[0]):  # type: ignore[arg-type]
            return f"{node.args[0]}.{node.args[1]}"
        return node.name

    def _input_nodes(self, index: int) -> list[fx.Node]:
        """Return the nodes outside a segment that it reads, in order of first use; tuple elements are separate."""
        if index not in self.input_nodes:
            self.input_nodes[index] = self._find_input_nodes(index)
        return self.input_nodes[index]

    def _find_input_nodes(self, index: int) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for node in self.segments[index].nodes:
            if node.target is operator.getitem and self.segment_of.get(node.args[0]) not in (index, None):  # type: ignore[arg-type]
                found[node] = None
                continue
            for each in node.all_input_nodes:
                if self.segment_of.get(each) != index and isinstance(each.meta.get("val"), torch.Tensor):
                    found[each] = None
                elif self.segment_of.get(each) != index and isinstance(each.meta.get("val"), (tuple, list)):
                    raise _CannotPartition
        return list(found)

    def _interface(self, index: int) -> _Interface:
        outside = self._input_nodes(index)
        constants = [each for each in outside if self._is_weight(each, index, outside.index(each))]
        ins = dict.fromkeys(self._value(each) for each in outside if each not in constants)
        written = [name for node, name in self.state_updates.items() if self.segment_of.get(node) == index]
        return _Interface(
            tuple(each.name for each in constants),
            tuple(dict.fromkeys((*ins, *written))),
            tuple(self._value(each) for each in self._outputs(index)),
        )

    def _is_weight(self, node: fx.Node, index: int, place: int) -> bool:
        """Whether this input is a weight at this and every other occurrence of the block."""

        def weight(each: fx.Node) -> bool:
            return (
                each.op == "placeholder"
                and self.rows[each.name].role is not Role.INPUT
                and each.name not in self.states
            )

        kind = self.segments[index].kind
        if kind is None or not weight(node):
            return weight(node)
        return all(weight(self._input_nodes(other)[place]) for other in self.segments_of_kind[kind])

    def _outputs(self, index: int) -> list[fx.Node]:
        """Return the outputs of a segment: nodes read outside at any occurrence of its kind, without states."""
        segment = self.segments[index]
        if segment.kind is not None and self._has_same_states(segment.kind):
            places = sorted({place for each in segment.kind.occurrences for place in self._find_live_out(each.nodes)})
            nodes = [segment.nodes[place] for place in places]
        else:
            nodes = [segment.nodes[place] for place in self._find_live_out(segment.nodes)]
        return [node for node in nodes if node not in self.state_updates]

    def _find_live_out(self, nodes: Sequence[fx.Node]) -> list[int]:
        home = self.segment_of[nodes[0]]
        found = []
        for place, node in enumerate(nodes):
            if node.target is operator.getitem and self.segment_of.get(node.args[0]) != home:  # type: ignore[arg-type]
                continue
            readers = [self.segment_of.get(user) for user in node.users]
            if any(each != home for each in readers) and not isinstance(node.meta.get("val"), (torch.SymInt, int)):
                found.append(place)
        return found

    def _has_same_states(self, kind: BlockKind) -> bool:
        """Whether all blocks of a kind have state at the same inputs and outputs."""
        looks = {
            (
                tuple(self._value(each) in self.states for each in self._input_nodes(index)),
                tuple(place for place, node in enumerate(self.segments[index].nodes) if node in self.state_updates),
            )
            for index in self.segments_of_kind[kind]
        }
        return len(looks) == 1

    def _piece(self, index: int, shape: _Interface, number: int) -> Piece:
        segment = self.segments[index]
        builder = _Builder(self.program)
        outside = {self._value(each): each for each in self._input_nodes(index)}
        placeholders = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        for place, name in enumerate(shape.constants):
            builder.add_input(outside[name], f"w{place}", Role.PARAMETER)
        for place, name in enumerate(shape.ins):
            node = outside[name] if name in outside else placeholders[name]
            builder.add_input(node, f"x{place}", Role.INPUT, also=self._names(index, name))
        builder.add_calls(segment.nodes)
        states = [
            (node, f"x{shape.ins.index(name)}")
            for node, name in self.state_updates.items()
            if self.segment_of.get(node) == index
        ]
        name = f"block{number}" if segment.kind is not None else f"part{number}"
        program = retype(builder.program(name, states, self._outputs(index)), self.ranges)
        touched = tuple(f"x{place}" for place, value in enumerate(shape.ins) if value in self.states)
        is_part = bool(self.segments_of_kind) and segment.kind is None
        few = is_part and not touched and len(segment.nodes) <= MAX_EAGER_CALLS
        plain = few and not any(node.target in SHIMS for node in segment.nodes)
        return Piece(name, program, plain, touched, segment.kind is not None or len(self.segments) == 1)

    def _names(self, index: int, value: str) -> list[fx.Node]:
        """Return every outside node of a segment with this name: an old and a new state share one storage."""
        return [each for each in self._input_nodes(index) if self._value(each) == value]


@dataclass(eq=False)
class _Builder:
    """Builds the program of a piece."""

    source: Program
    graph: fx.Graph = field(default_factory=fx.Graph)
    node_map: dict[fx.Node, Any] = field(default_factory=dict)
    rows: list[Binding] = field(default_factory=list)

    def add_input(self, node: fx.Node, name: str, role: Role, also: Sequence[fx.Node] = ()) -> None:
        made = self.graph.placeholder(name)
        value = node.meta["val"]
        made.meta = {"val": value}
        for each in (node, *also):
            self.node_map[each] = made
        self.rows.append(self.source.types.binding(name, role, value))

    def add_calls(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            if node not in self.node_map:
                self.node_map[node] = self.graph.node_copy(node, self._operand)

    def _operand(self, node: fx.Node) -> Any:
        """Return the piece's node for a node of the program; sizes are read from the inputs of the piece."""
        if node in self.node_map:
            return self.node_map[node]
        value = node.meta.get("val")
        if node.target is torch.ops.aten.sym_size.int:
            found = self._size(str(value))
        elif (
            isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)) and node.op == "call_function"
        ):
            found = self.graph.node_copy(node, self._operand)
        else:
            raise _CannotPartition
        self.node_map[node] = found
        return found

    def _size(self, wanted: str) -> fx.Node:
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder":
                for axis, size in enumerate(value.shape):
                    if str(size) == wanted:
                        made = self.graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
                        made.meta = {"val": size}
                        return made
        raise _CannotPartition

    def _make_contiguous(self, node: fx.Node) -> fx.Node:
        """Return a contiguous value: compiled code of the next piece expects this layout."""
        if node.meta["val"].is_contiguous():
            return node
        return self.graph.call_function(
            torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )

    def program(self, name: str, states: Sequence[tuple[fx.Node, str]], outputs: Sequence[fx.Node]) -> Program:
        results = [self.node_map[node] for node, _ in states] + [
            self._make_contiguous(self.node_map[node]) for node in outputs
        ]
        self.graph.output(tuple(results))
        self.graph.owning_module = self.source.graph.owning_module  # has the nested graphs
        self.graph.eliminate_dead_code()
        rows = {row.name: row for row in self.rows}
        outs = [
            replace(rows[of], name=f"{of}.out", role=Role.OUTPUT, alias=Alias(of, "kv_cache_update"))
            for _, of in states
        ]
        outs += [
            self.source.types.binding(f"y{place}", Role.OUTPUT, node.meta["val"]) for place, node in enumerate(outputs)
        ]
        calling = CallSpec.flat([row.name for row in self.rows if row.role is Role.INPUT], len(outputs))
        tensors = {row.name: MissingTensor(row.name) for row in self.rows if row.role is Role.PARAMETER}
        return Program(
            name, self.graph, Bindings((*self.rows, *outs)), tensors, self.source.symbols, calling, self.source.facts
        )
