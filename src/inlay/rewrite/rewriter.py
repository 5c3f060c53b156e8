"""The rewriter, the only way in which transforms change the graph of a program."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import ProgramError
from inlay.program.graphs import provenance
from inlay.program.symbols import symbolic_sizes
from inlay.program.type_checks import CallTypes, type_mismatch
from inlay.rewrite.reasons import Reason
from inlay.rewrite.rule import Refused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from inlay.program.graphs import TypeFormatter
    from inlay.program.program import Program
    from inlay.program.symbols import FakeValues


class RewriteListener(Protocol):
    """An observer of every change. It is called before a node is erased, and after a node is inserted."""

    def inserted(self, node: fx.Node) -> None:
        """A call or an input was added."""

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """The users of `old` now read `new`."""

    def changed(self, node: fx.Node) -> None:
        """A node has another operand or another type."""

    def erased(self, node: fx.Node) -> None:
        """A node is about to be removed."""


@dataclass
class _Changes:
    """The changes since the last commit."""

    program: Program
    inserted: list[fx.Node] = field(default_factory=list)
    types: list[tuple[fx.Node, Any]] = field(default_factory=list)
    is_final: bool = False
    """Whether a value was replaced, which cannot be undone."""


class Rewriter:
    """Changes one program. Each new call has a type and a provenance, and a replacement has the type of its original.

    A replacement may have another memory layout than its original. `finish` then recomputes the types of all values
    that depend on it, and inserts copies where a view or the caller needs the original layout.
    """

    def __init__(self, program: Program, listeners: Sequence[RewriteListener] = ()) -> None:
        self.program, self.types = program, program.types
        self._listeners = tuple(listeners)
        self._replacements: dict[fx.Node, fx.Node] = {}
        self._erased: set[fx.Node] = set()
        self._relaid: dict[fx.Graph, dict[fx.Node, Any]] = {}
        """Values whose memory layout differs from that of the value they replaced → the replaced value."""
        self._changes = _Changes(program)
        self._origin: fx.Node | None = None
        self._graph = program.graph

    @cached_property
    def _call_types(self) -> CallTypes:
        return CallTypes(self.program)

    @property
    def fakes(self) -> FakeValues:
        """Creates the values of new inputs."""
        return self._call_types.fakes

    def current(self, node: fx.Node) -> fx.Node:
        """Return the current replacement of a node: an earlier match may refer to a node that was replaced since."""
        while node in self._replacements:
            node = self._replacements[node]
        return node

    @contextmanager
    def inserting_before(self, place: fx.Node, origin: fx.Node | None = None) -> Iterator[None]:
        """Insert new calls before `place`, with the provenance of `origin`."""
        if place in self._erased:
            raise ProgramError(f"{place} was erased; nothing can be inserted before it.")
        before = self._graph, self._origin
        self._graph, self._origin = place.graph, origin
        try:
            with place.graph.inserting_before(place):
                yield
        finally:
            self._graph, self._origin = before

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        origin: fx.Node | None = None,
    ) -> fx.Node:
        """Insert a call. Its type follows from its operands; replaced operands are resolved to their replacements."""
        now = fx.map_arg((args, dict(kwargs or {})), self.current)
        node = self._graph.call_function(target, *now)
        try:
            node.meta = {"val": self._call_types.compute_value(node)}
        except ProgramError:
            self._graph.erase_node(node)
            raise
        return self._register(node, origin)

    def copy(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> fx.Node:
        """Copy a call of another graph, with its type, onto these operands."""
        made = self._graph.node_copy(node, operands.__getitem__)
        made.meta = {"val": node.meta.get("val")}
        return self._register(made, None)

    def placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        """Insert an input."""
        node = self._graph.placeholder(name)
        node.meta = {"val": value}
        return self._register(node, None)

    def _register(self, node: fx.Node, origin: fx.Node | None) -> fx.Node:
        origin = origin or self._origin
        node.meta |= provenance(origin) if origin is not None else {}
        self._changes.inserted.append(node)
        for each in self._listeners:
            each.inserted(node)
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace `old` by `new` in all its users; `new` must have the same dtype and shape."""
        self.replace_all({old: new})

    def replace_all(self, pairs: Mapping[fx.Node, fx.Node], keep: Collection[fx.Node] = ()) -> None:
        """Replace several values, or none if a dtype or shape differs; users in `keep` keep reading the old value."""
        for old, new in pairs.items():
            value, was = new.meta["val"], old.meta["val"]
            gives, wanted = type_mismatch(value, was, self.types)
            if gives != wanted and not has_same_shape(value, was):
                raise Refused(Reason.REPLACEMENT, f"the replacement is {gives}, but {old} is {wanted}", old)
        for old, new in pairs.items():
            if type_mismatch(new.meta["val"], old.meta["val"], self.types) != ("", ""):
                self._relaid.setdefault(new.graph, {})[new] = old.meta["val"]
            self.replace_retyped(old, new, keep)

    def replace_retyped(self, old: fx.Node, new: fx.Node, keep: Collection[fx.Node] = ()) -> None:
        """Replace `old` by `new` of another type; the caller must `retype` the values that depend on it."""
        old.replace_all_uses_with(new, lambda user: user is not new and user not in keep, propagate_meta=False)
        self._replacements[old] = new
        self._changes.is_final = True
        for each in self._listeners:
            each.replaced(old, new)

    def replace_operand(self, user: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """Make one user of `old` read `new` instead."""
        user.replace_input_with(old, new)
        self._tell_changed(user)

    def set_outputs(self, graph: fx.Graph, values: Sequence[Any]) -> None:
        """Set the values that a graph returns."""
        graph.output_node().args = (tuple(values),)
        self._tell_changed(graph.output_node())

    def current_outputs(self) -> list[Any]:
        """Return the program's outputs, with replacements that did not apply to the output node."""
        values: Any = self.program.graph.output_node().args[0]
        return [self.current(value) if isinstance(value, fx.Node) else value for value in values]

    def _tell_changed(self, node: fx.Node) -> None:
        self._changes.is_final = self._changes.is_final or node.op == "output"
        for each in self._listeners:
            each.changed(node)

    def retype(self, node: fx.Node, value: Any = None) -> bool:
        """Set a node's type from its operands, or from `value`; return whether it changed."""
        before, now = node.meta["val"], self._call_types.compute_value(node) if value is None else value
        self._changes.types.append((node, before))
        node.meta["val"] = now
        self._tell_changed(node)
        return layout_text(now) != layout_text(before)

    def erase(self, *nodes: fx.Node) -> None:
        """Remove nodes that have no users."""
        for node in nodes:
            if node.users:
                raise ProgramError(f"{node} is still read by {next(iter(node.users))}.")
            for each in self._listeners:
                each.erased(node)
            node.graph.erase_node(node)
            self._erased.add(node)

    def is_erased(self, node: fx.Node) -> bool:
        """Whether a node was removed from its graph."""
        return node in self._erased

    def erase_unused(self, *nodes: fx.Node) -> None:
        """Remove those of these calls that have no users and no side effects; list users before operands."""
        for node in nodes:
            is_unused = node.op in ("call_function", "get_attr") and not node.users and not node.is_impure()
            if is_unused and node not in self._erased:
                self.erase(node)

    def update(self, **changes: Any) -> None:
        """Change fields of the program other than the graph: bindings, tensors, symbols."""
        assert "graph" not in changes, "the graph is changed in place, not replaced"
        self.program = replace(self.program, **changes)

    def commit(self) -> None:
        """Make all changes so far permanent."""
        self._changes = _Changes(self.program)

    def rollback(self) -> None:
        """Undo insertions, types and updates since the last `commit`. Replacements cannot be undone, so they must come
        last."""
        if self._changes.is_final:
            raise ProgramError("A match was refused after one of its values had been replaced.")
        for node in reversed(self._changes.inserted):
            if node not in self._erased:
                self.erase(node)
        for node, value in reversed(self._changes.types):
            node.meta["val"] = value
        self.program = self._changes.program
        self.commit()

    def insert_contiguous_copy(self, node: fx.Node, origin: fx.Node) -> fx.Node:
        """Insert a contiguous copy after a node, for users that depend on the memory layout."""
        with self.inserting_before(node.next, origin):
            return self.call(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})

    def finish(self) -> Program:
        """Return the program, with types updated for values whose memory layout has changed."""
        for graph, relaid in self._relaid.items():
            returned = {node: node.meta["val"] for node in graph.output_node().all_input_nodes} | {
                node: value for node, value in relaid.items() if graph.output_node() in node.users
            }
            self._propagate_layouts(graph, dict(relaid))
            for node, value in returned.items():
                now = node.meta["val"]
                mismatch = type_mismatch(now, value, self.types)
                if mismatch != ("", "") and is_same_when_contiguous(self.types, now, value):
                    self.replace_operand(graph.output_node(), node, self.insert_contiguous_copy(node, node))
        self._relaid = {}
        return self.program

    def _propagate_layouts(self, graph: fx.Graph, before: dict[fx.Node, Any]) -> None:
        """Recompute the types of users of values whose layout was as in `before`.

        A view that the new layout does not allow reads a contiguous copy. So does an operator that is not torch's or
        Inlay's, if the copy has the original layout: such an operator may depend on the layout.
        """
        for node in graph.nodes:
            moved = [each for each in node.all_input_nodes if each in before]
            if not moved or node.op != "call_function":
                continue
            if getattr(node.target, "namespace", "aten") not in ("aten", "prims", "inlay"):
                for each in moved:
                    value, was = each.meta["val"], before[each]
                    if isinstance(was, torch.Tensor) and is_same_when_contiguous(self.types, value, was):
                        self._read_copy(node, each)
            earlier = node.meta["val"]
            try:
                is_changed = self.retype(node)
            except ProgramError:
                for each in moved:
                    self._read_copy(node, each)
                is_changed = self.retype(node)
            if is_changed:
                before[node] = earlier

    def _read_copy(self, node: fx.Node, operand: fx.Node) -> None:
        """Make a node read a contiguous copy of an operand, inserted directly before the node.

        The operand may be a part of a state. A copy directly after the operand could run before that part is written.
        """
        with self.inserting_before(node, operand):
            copy = self.call(torch.ops.aten.clone.default, (operand,), {"memory_format": torch.contiguous_format})
        self.replace_operand(node, operand, copy)


def has_same_shape(one: Any, two: Any) -> bool:
    """Whether two values have the same dtypes and shapes; strides may differ."""
    left, right = tree_leaves(one), tree_leaves(two)
    tensors = all(isinstance(each, torch.Tensor) for each in (*left, *right))
    return tensors and [type_text(each) for each in left] == [type_text(each) for each in right]


def type_text(value: torch.Tensor) -> str:
    """Return dtype and sizes as text. Comparing texts adds no guards on symbols."""
    return f"{value.dtype}{[str(size) for size in value.shape]}"


def layout_text(value: Any) -> list[str]:
    """Return dtype, sizes and strides of each tensor in a value as text; other values with `str`."""
    return [
        f"{type_text(each)} {list(map(str, each.stride()))}" if isinstance(each, torch.Tensor) else str(each)
        for each in tree_leaves(value)
    ]


def is_same_when_contiguous(types: TypeFormatter, value: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether a contiguous copy of a value has the memory layout of `old`."""
    with symbolic_sizes():
        copy = torch.ops.aten.clone.default(value, memory_format=torch.contiguous_format)
        return type_mismatch(copy, old, types) == ("", "")
