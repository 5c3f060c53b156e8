"""Alias analysis: which nodes of a graph may share storage, and which bytes of it each node addresses.

Two nodes may share when an operator's schema declares it (views, in-place calls), when their fake tensors share, or
when the call between them has no schema. The analysis is conservative: in doubt, two nodes share.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from inlay.program.graphs import operands, written_operands

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

SIZE_OPS = frozenset(
    (
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
    )
)
"""Operators that read a tensor's sizes, never its values."""
_UNDECLARED_ALIASES = frozenset((torch.ops.aten._unsafe_view.default,))
_POSSIBLE_IDENTITIES = frozenset((torch.ops.prims.convert_element_type.default, torch.ops.prims.device_put.default))
"""Inductor returns the operand itself when dtype and device do not change."""


class ByteRange(NamedTuple):
    """Bytes from `start` up to `end` of a storage."""

    storage: int
    start: int
    end: int


def may_be_tensor(node: fx.Node) -> bool:
    """Whether a node holds tensors, or may: True for a node without a recorded value."""
    if "val" not in node.meta:
        return True
    value = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(each, (torch.Tensor, list, tuple)) for each in values)


def storage_id(value: Any) -> int | None:
    """Return an identity of the storage of a value, or None if it has no storage."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None  # a tensor without storage, such as a wrapper subclass


def byte_range(value: Any) -> ByteRange | None:
    """Return the bytes that a tensor spans, or None when sizes or strides are symbolic.

    >>> byte_range(torch.empty(4, 4)[1:3])[1:]
    (16, 48)
    """
    storage = storage_id(value)
    if storage is None:
        return None
    return strided_byte_range(storage, value.shape, value.stride(), value.storage_offset(), value.element_size())


def strided_byte_range(storage: int, size: Any, stride: Any, offset: Any, itemsize: int) -> ByteRange | None:
    """Return the bytes that a size, a stride and an offset span, or None when one of them is symbolic."""
    if not all(type(each) is int for each in (*size, *stride, offset)):
        return None
    count = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return ByteRange(storage, offset * itemsize, (offset + (0 if 0 in size else count)) * itemsize)


def may_overlap(one: ByteRange | None, two: ByteRange | None) -> bool:
    """Whether two regions may have a byte in common; an unknown region (None) overlaps with every other.

    >>> may_overlap(ByteRange(1, 0, 8), ByteRange(1, 8, 16)), may_overlap(ByteRange(1, 0, 8), None)
    (False, True)
    """
    if one is None or two is None or one.storage != two.storage:
        return True
    return max(one.start, two.start) < min(one.end, two.end)


def is_dense(value: Any) -> bool:
    """Whether a tensor fills the bytes that it spans exactly once, in any order of its axes.

    >>> is_dense(torch.empty(4, 6).t()), is_dense(torch.empty(4, 6)[:, :3])
    (True, False)
    """
    left = [(size, step) for size, step in zip(value.shape, value.stride(), strict=True) if not is_same_size(size, 1)]
    expected: Any = 1
    while left:
        found = next((axis for axis in left if is_same_size(axis[1], expected)), None)
        if found is None:
            return False
        left.remove(found)
        expected = expected * found[0]
    return True


def is_non_overlapping(value: Any) -> bool:
    """Whether no two elements of a tensor share a byte; False when sizes or strides are symbolic.

    >>> is_non_overlapping(torch.empty(4, 6)[:, ::2]), is_non_overlapping(torch.empty(4).expand(3, 4))
    (True, False)
    """
    axes = [(step, size) for size, step in zip(value.shape, value.stride(), strict=True) if not is_same_size(size, 1)]
    if not all(type(number) is int for axis in axes for number in axis):
        return False
    reach = 0
    for step, size in sorted(axes):
        if step <= reach:
            return False
        reach += step * (size - 1)
    return True


def is_same_size(one: Any, two: Any) -> bool:
    """Whether two sizes are the same number or the same expression. The comparison adds no guard."""
    if type(one) is int and type(two) is int:
        return one == two
    node, other = getattr(one, "node", None), getattr(two, "node", None)
    return bool(node is not None and other is not None and node.expr == other.expr)


def bind_arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield each schema argument that a call passes, with the value that it passes."""
    for index, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def nodes_in(value: Any) -> list[fx.Node]:
    """Return the nodes in an argument."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def is_only_indexed(node: fx.Node) -> bool:
    """Whether every user of a list takes one element of it, by a constant index."""
    return all(user.target is operator.getitem and type(user.args[1]) is int for user in node.users)


def possible_writes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a call may write to; all of its tensors when the call has no schema."""
    if getattr(node.target, "_schema", None) is None:
        return [] if node.target is operator.getitem else [each for each in operands(node) if may_be_tensor(each)]
    return written_operands(node)


class Aliases:
    """The nodes of a graph, grouped into sets that may share storage."""

    def __init__(self, graph: fx.Graph, wrappers: dict[fx.Node, tuple[int, ...] | None]) -> None:
        """Group the nodes of `graph`.

        `wrappers` maps calls whose results are new storages to the indices of results that are lists. The results are
        then separate storages. With None instead of indices, the results are new but may share with each other.
        """
        self._parent: dict[Hashable, Hashable] = {}
        self._members: dict[Hashable, list[fx.Node]] = {}
        self._keys: dict[fx.Node, Hashable] = {}
        self._separate_results: set[Hashable] = set()
        storages: dict[int, fx.Node] = {}
        for node in graph.nodes:
            self._keys[node] = self._key(node)
            self._members.setdefault(self._root(node), []).append(node)
            if node in wrappers:
                places = wrappers[node]
                self._separate_results |= set() if places is None else {node, *((node, index) for index in places)}
            elif node.op not in ("placeholder", "get_attr", "output"):
                self._read(node)
            storage = storage_id(node.meta.get("val"))
            if storage is not None:
                self.merge(node, storages.setdefault(storage, node))

    def may_share(self, one: fx.Node, two: fx.Node) -> bool:
        """Whether two nodes may share storage."""
        return self._root(one) == self._root(two)

    def members(self, node: fx.Node) -> list[fx.Node]:
        """Every node that may share storage with `node`, itself included."""
        return self._members[self._root(node)]

    def merge(self, one: fx.Node, two: fx.Node) -> None:
        """Record that these two nodes may share storage, and so may all nodes that share with them."""
        self._union(self._keys[one], self._keys[two])

    def add(self, node: fx.Node, like: fx.Node | None = None) -> None:
        """Add a new node, which shares with `like` or with no node."""
        self._keys[node] = node
        self._members[node] = [node]
        if like is not None:
            self.merge(node, like)

    def _key(self, node: fx.Node) -> Hashable:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            owner = self._keys[node.args[0]]
            return (owner, node.args[1]) if owner in self._separate_results else owner
        return node

    def _read(self, node: fx.Node) -> None:
        """Merge the result of a call with the operands that it may alias."""
        if node.target is operator.getitem or not may_be_tensor(node):
            return
        schema = getattr(node.target, "_schema", None)
        if schema is None or node.target in _UNDECLARED_ALIASES or _may_be_identity(node):
            for each in operands(node):
                if may_be_tensor(each):
                    self.merge(node, each)
            return
        many = len(schema.returns) > 1
        lists = isinstance(schema.returns[0].type, torch.ListType) if schema.returns else False
        if (many or (lists and schema.returns[0].alias_info is None)) and is_only_indexed(node):
            self._separate_results.add(node)
        handed_on = [
            each for argument, value in bind_arguments(node) if argument.alias_info for each in nodes_in(value)
        ]
        for index, result in enumerate(schema.returns):
            if result.alias_info is not None:
                for each in handed_on:
                    self._union((node, index) if node in self._separate_results else node, self._keys[each])

    def _root(self, node: fx.Node) -> Hashable:
        return self._find(self._keys[node])

    def _find(self, key: Hashable) -> Hashable:
        path = []
        while (parent := self._parent.get(key, key)) != key:
            path.append(key)
            key = parent
        for each in path:
            self._parent[each] = key
        return key

    def _union(self, one: Hashable, two: Hashable) -> None:
        one, two = self._find(one), self._find(two)
        if one == two:
            return
        few, many = sorted((one, two), key=lambda root: len(self._members.get(root, ())))
        self._parent[few] = many
        self._members.setdefault(many, []).extend(self._members.pop(few, ()))


def _may_be_identity(node: fx.Node) -> bool:
    """Whether a conversion leaves dtype and device unchanged, or may."""
    if node.target not in _POSSIBLE_IDENTITIES:
        return False
    before, after = (each.meta.get("val") for each in (*operands(node)[:1], node))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return True
    return before.dtype == after.dtype and before.device == after.device
