"""The rewriter: transforms change the graph of a program through it and in no other way."""

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
    """An observer of every change. It sees a node before it is erased, and after it is inserted."""

    def inserted(self, node: fx.Node) -> None:
        """A call or an input was added."""

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """What read `old` reads `new`."""

    def changed(self, node: fx.Node) -> None:
        """A node was given another operand or another type."""

    def erased(self, node: fx.Node) -> None:
        """A node is about to be removed."""


@dataclass
class _Changes:
    """What was done since the last commit."""

    program: Program
    inserted: list[fx.Node] = field(default_factory=list)
    types: list[tuple[fx.Node, Any]] = field(default_factory=list)
    is_final: bool = False
    """Something was replaced, which cannot be undone."""


class Rewriter:
    """Changes one program: each new call has a type and a provenance, and what replaces a value is of its type.

    A value may lie in memory in another way than the one it replaces. `finish` then computes the types of what is
    computed from it, and copies where a view or the caller needs the layout that was there.
    """

    def __init__(self, program: Program, listeners: Sequence[RewriteListener] = ()) -> None:
        self.program, self.types = program, program.types
        self._listeners = tuple(listeners)
        self._replacements: dict[fx.Node, fx.Node] = {}
        self._erased: set[fx.Node] = set()
        self._relaid: dict[fx.Graph, dict[fx.Node, Any]] = {}
        """Values that lie in memory in another way than what they replaced, which is kept beside them."""
        self._changes = _Changes(program)
        self._origin: fx.Node | None = None
        self._graph = program.graph

    @cached_property
    def _call_types(self) -> CallTypes:
        return CallTypes(self.program)

    @property
    def fakes(self) -> FakeValues:
        """Makes the values of new inputs."""
        return self._call_types.fakes

    def current(self, node: fx.Node) -> fx.Node:
        """What a node became: a match that was planned earlier may name one that was replaced since."""
        while node in self._replacements:
            node = self._replacements[node]
        return node

    @contextmanager
    def inserting_before(self, place: fx.Node, origin: fx.Node | None = None) -> Iterator[None]:
        """New calls stand before `place`, with the provenance of `origin`."""
        if place in self._erased:
            raise ProgramError(f"{place} was erased: nothing can stand before it.")
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
        """A new call; its type is what its operands give it. Operands that were replaced are what they became."""
        now = fx.map_arg((args, dict(kwargs or {})), self.current)
        node = self._graph.call_function(target, *now)
        try:
            node.meta = {"val": self._call_types.compute_value(node)}
        except ProgramError:
            self._graph.erase_node(node)
            raise
        return self._register(node, origin)

    def copy(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> fx.Node:
        """A call of another graph, with its type, on these operands."""
        made = self._graph.node_copy(node, operands.__getitem__)
        made.meta = {"val": node.meta.get("val")}
        return self._register(made, None)

    def placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        """A new input."""
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
        """`new` is read wherever `old` was; it must have the same dtype and shape."""
        self.replace_all({old: new})

    def replace_all(self, pairs: Mapping[fx.Node, fx.Node], keep: Collection[fx.Node] = ()) -> None:
        """Replace several values, or none if one of them is of another dtype or shape; what is in `keep` reads on."""
        for old, new in pairs.items():
            value, was = new.meta["val"], old.meta["val"]
            gives, wanted = type_mismatch(value, was, self.types)
            if gives != wanted and not has_same_shape(value, was):
                raise Refused(Reason.REPLACEMENT, f"it gives {gives}, and {old} is {wanted}", old)
        for old, new in pairs.items():
            if type_mismatch(new.meta["val"], old.meta["val"], self.types) != ("", ""):
                self._relaid.setdefault(new.graph, {})[new] = old.meta["val"]
            self.replace_retyped(old, new, keep)

    def replace_retyped(self, old: fx.Node, new: fx.Node, keep: Collection[fx.Node] = ()) -> None:
        """`new` is read wherever `old` was, and is of another type: the caller computes with `retype` what follows."""
        old.replace_all_uses_with(new, lambda user: user is not new and user not in keep, propagate_meta=False)
        self._replacements[old] = new
        self._changes.is_final = True
        for each in self._listeners:
            each.replaced(old, new)

    def replace_operand(self, user: fx.Node, old: fx.Node, new: fx.Node) -> None:
        """One reader of `old` reads `new` instead."""
        user.replace_input_with(old, new)
        self._tell_changed(user)

    def set_outputs(self, graph: fx.Graph, values: Sequence[Any]) -> None:
        """What a graph returns."""
        graph.output_node().args = (tuple(values),)
        self._tell_changed(graph.output_node())

    def current_outputs(self) -> list[Any]:
        """What the program returns, where a value was replaced for all but that."""
        values: Any = self.program.graph.output_node().args[0]
        return [self.current(value) if isinstance(value, fx.Node) else value for value in values]

    def _tell_changed(self, node: fx.Node) -> None:
        self._changes.is_final = self._changes.is_final or node.op == "output"
        for each in self._listeners:
            each.changed(node)

    def retype(self, node: fx.Node, value: Any = None) -> bool:
        """Give a node the type that its operands give it, or that of `value`; whether it is another one."""
        before, now = node.meta["val"], self._call_types.compute_value(node) if value is None else value
        self._changes.types.append((node, before))
        node.meta["val"] = now
        self._tell_changed(node)
        return layout_text(now) != layout_text(before)

    def erase(self, *nodes: fx.Node) -> None:
        """Remove nodes that nothing reads any more."""
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
        """Remove those of these calls that nothing reads and that have no effect; name readers before operands."""
        for node in nodes:
            if (
                node.op in ("call_function", "get_attr")
                and not node.users
                and not node.is_impure()
                and node not in self._erased
            ):
                self.erase(node)

    def update(self, **changes: Any) -> None:
        """Change what stands beside the graph: bindings, tensors, symbols."""
        assert "graph" not in changes, "a graph is changed, not exchanged"
        self.program = replace(self.program, **changes)

    def commit(self) -> None:
        """What was done so far stays."""
        self._changes = _Changes(self.program)

    def rollback(self) -> None:
        """Undo what was done since the last `commit`: insertions, types and updates. What was replaced stays, so that
        must come last."""
        if self._changes.is_final:
            raise ProgramError("A match was refused after something of it was replaced.")
        for node in reversed(self._changes.inserted):
            if node not in self._erased:
                self.erase(node)
        for node, value in reversed(self._changes.types):
            node.meta["val"] = value
        self.program = self._changes.program
        self.commit()

    def insert_contiguous_copy(self, node: fx.Node, origin: fx.Node) -> fx.Node:
        """A contiguous copy behind a node, for readers that see how a value lies in memory."""
        with self.inserting_before(node.next, origin):
            return self.call(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})

    def finish(self) -> Program:
        """The program, with types that follow from the values that lie in memory in another way now."""
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
        """Compute the types of what reads values that lay in memory as in `before`.

        A view that a new layout does not allow reads a contiguous copy. So does an operator that is not torch's or
        Inlay's, where the copy lies as the value did: it may look at the memory itself.
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
        """A node reads a contiguous copy of an operand, which is made right before the node.

        An operand may be a part of a state: right behind it, the copy could be made before that part is written.
        """
        with self.inserting_before(node, operand):
            copy = self.call(torch.ops.aten.clone.default, (operand,), {"memory_format": torch.contiguous_format})
        self.replace_operand(node, operand, copy)


def has_same_shape(one: Any, two: Any) -> bool:
    """Whether two values differ in their strides at most."""
    left, right = tree_leaves(one), tree_leaves(two)
    tensors = all(isinstance(each, torch.Tensor) for each in (*left, *right))
    return tensors and [type_text(each) for each in left] == [type_text(each) for each in right]


def type_text(value: torch.Tensor) -> str:
    """Dtype and sizes as text: comparing them asks nothing that would become an assumption about symbols."""
    return f"{value.dtype}{[str(size) for size in value.shape]}"


def layout_text(value: Any) -> list[str]:
    """Dtype, sizes and strides as text, of each tensor in a value; anything else as it is printed."""
    return [
        f"{type_text(each)} {list(map(str, each.stride()))}" if isinstance(each, torch.Tensor) else str(each)
        for each in tree_leaves(value)
    ]


def is_same_when_contiguous(types: TypeFormatter, value: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether a contiguous copy of a value lies in memory as `old` does."""
    with symbolic_sizes():
        copy = torch.ops.aten.clone.default(value, memory_format=torch.contiguous_format)
        return type_mismatch(copy, old, types) == ("", "")
