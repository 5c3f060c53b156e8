"""Rewrite every write to a state as an `index_put` into the whole state, which compilers update in place.

Inductor keeps some forms of partial writes in place, and copies the whole state for others (a scatter, two slices, a
transposed view). It never copies for an `index_put` with an index for every axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.analysis.auto_functionalized import is_auto_functionalized
from inlay.errors import ProgramError
from inlay.lowering.state.returned_parts import copy_returned_parts, insert_views
from inlay.program.graphs import sizes
from inlay.program.symbols import is_data_dependent, is_statically_true, symbolic_sizes
from inlay.rewrite.rewriter import Rewriter
from inlay.rewrite.rule import Refused

if TYPE_CHECKING:
    from inlay.analysis.state_updates import StateUpdate, StateWrite
    from inlay.analysis.storage_slices import StorageSlice
    from inlay.program.program import Program


aten = torch.ops.aten
_SCATTERS = (aten.scatter_.src, aten.scatter_.value, aten.scatter_add_.default)


@dataclass(frozen=True)
class SliceAxis:
    """An axis of a part in the whole: `size` elements along `axis`, from `start` with a step."""

    axis: int | None
    """None for an axis of one element that does not exist in the whole."""
    start: Any
    size: Any
    step: int = 1


@dataclass(frozen=True)
class SliceGeometry:
    """A part of a whole: its axes, and its index along each axis of the whole that the part lacks."""

    axes: tuple[SliceAxis, ...]
    fixed_indices: dict[int, Any]


def slice_geometry(place: StorageSlice, whole: torch.Tensor) -> SliceGeometry | None:
    """Return the geometry of a storage slice; None when its views cannot be expressed as starts and steps."""
    found = SliceGeometry(tuple(SliceAxis(axis, 0, size) for axis, size in enumerate(whole.shape)), {})
    part = whole
    for view in place.views:
        step = _step(found, view.target, view.args)
        if step is None:
            return None
        args = [each.meta["val"] if isinstance(each, fx.Node) else each for each in view.args]
        with symbolic_sizes():
            part = view.target(part, *args)
        axes = tuple(replace(axis, size=size) for axis, size in zip(step.axes, part.shape, strict=True))
        found = replace(step, axes=axes)
    return found


def _step(found: SliceGeometry, target: Any, args: tuple[Any, ...]) -> SliceGeometry | None:
    """Apply one view to a geometry; None if it cannot be expressed."""
    axes = list(found.axes)
    rank = len(axes)
    match target:
        case aten.slice.Tensor:
            given: tuple[Any, ...] = (*args, *(0, 0, None, 1)[len(args) :])
            dim, start, _, step = given
            axis = axes[dim % rank]
            moved = _absolute_start(axis, 0 if start is None else start)
            if moved is None or type(step) is not int:
                return None
            axes[dim % rank] = replace(axis, start=moved, step=axis.step * step)
            return replace(found, axes=tuple(axes))
        case aten.select.int:
            dim, at = args
            axis = axes.pop(dim % rank)
            moved = _absolute_start(axis, at)
            if moved is None or axis.axis is None:
                return None
            return SliceGeometry(tuple(axes), found.fixed_indices | {axis.axis: moved})
        case aten.unsqueeze.default:
            axes.insert(args[0] % (rank + 1), SliceAxis(None, 0, 1))
            return replace(found, axes=tuple(axes))
        case aten.squeeze.dim:
            axis = axes[args[0] % rank]
            if type(axis.size) is not int:
                return None
            if axis.size == 1:
                axes.pop(args[0] % rank)
            fixed = {axis.axis: axis.start} if axis.size == 1 and axis.axis is not None else {}
            return SliceGeometry(tuple(axes), found.fixed_indices | fixed)
        case aten.alias.default:
            return found
        case aten.transpose.int:
            one, two = args[0] % rank, args[1] % rank
            axes[one], axes[two] = axes[two], axes[one]
            return replace(found, axes=tuple(axes))
        case aten.permute.default:
            return replace(found, axes=tuple(axes[dim % rank] for dim in args[0]))
    return None


def _absolute_start(axis: SliceAxis, at: Any) -> Any | None:
    """Return the index in the whole of index `at` of an axis; None if unknown."""
    if isinstance(at, int) and at < 0:
        if type(axis.size) is not int:
            return None
        at = max(at + axis.size, 0)
    held = at.meta["val"] if isinstance(at, fx.Node) else at
    if not is_statically_true(held >= 0) or (axis.step != 1 and not isinstance(at, int)):
        return None
    return _sum(axis.start, at * axis.step if isinstance(at, int) else at)


def _covers_axis(axis: SliceAxis, whole: fx.Node) -> bool:
    """Whether an axis of a part covers an axis of the whole completely."""
    if axis.axis is None or axis.step != 1 or not (isinstance(axis.start, int) and axis.start == 0):
        return False
    return str(axis.size) == str(whole.meta["val"].shape[axis.axis])


def _sum(one: Any, two: Any) -> Any:
    """Return the sum of two starts. A start is a number, a node that computes it, or a tuple of both."""
    if isinstance(two, int) and two == 0:
        return one
    if isinstance(one, int) and (one == 0 or isinstance(two, int)):
        return two if one == 0 else one + two
    return (one, two)


class Indexer:
    """Inserts the nodes of one write into a graph, before a node."""

    def __init__(self, rewriter: Rewriter, place: fx.Node) -> None:
        self.rewriter, self.place = rewriter, place

    def put(self, whole: fx.Node, write: StateWrite) -> fx.Node | None:
        """Return `whole` after the write, as a new value; None if the write cannot be an `index_put`."""
        found = slice_geometry(write.storage_slice, whole.meta["val"])
        if found is None:
            return None
        match write.target._schema.name:
            case "aten::copy_":
                return self._put(whole, found, {}, write.args[0])
            case "aten::index_copy_" | "aten::index_add_":
                dim, index, source = write.args
                if write.kwargs.get("alpha", 1) != 1:
                    source = self.call(aten.mul.Tensor, source, write.kwargs["alpha"])
                adds = write.target is aten.index_add_.default
                return self._put(whole, found, {dim % len(found.axes): index}, source, accumulate=adds)
            case "aten::scatter_" | "aten::scatter_add_" if write.target in _SCATTERS:
                dim, index, source = write.args
                if write.target is aten.scatter_.value:
                    source = self._scalar_tensor(whole, source)
                adds = write.target is aten.scatter_add_.default
                return self._scatter(whole, found, dim % len(found.axes), index, source, accumulate=adds)
            case "aten::index_fill_" if write.target is aten.index_fill_.int_Scalar:
                dim, index, value = write.args
                return self._put(whole, found, {dim % len(found.axes): index}, self._scalar_tensor(whole, value))
            case "aten::index_put_":
                return self._index_put(whole, found, write)
            case _ if write.storage_slice.views:
                return self._put(whole, found, {}, write.node)  # a part is computed from its old value and stored back
        return None

    def _index_put(self, whole: fx.Node, found: SliceGeometry, write: StateWrite) -> fx.Node | None:
        indices, values, *more = write.args
        if not write.storage_slice.views:
            return self.call(aten.index_put.default, whole, list(indices), values, *more)
        given = {dim: index for dim, index in enumerate(indices) if index is not None}
        one = next(iter(given.values()))
        if len(given) != 1 or one.meta["val"].dim() != 1 or one.meta["val"].dtype == torch.bool or any(more):
            return None
        return self._put(whole, found, given, values)

    def _scatter(
        self, whole: fx.Node, found: SliceGeometry, dim: int, index: fx.Node, source: fx.Node, *, accumulate: bool
    ) -> fx.Node | None:
        if source.meta["val"].dim() and sizes(index.meta["val"]) != sizes(source.meta["val"]):
            return None
        axes = tuple(
            axis if position == dim else replace(axis, size=size)
            for position, (axis, size) in enumerate(zip(found.axes, index.meta["val"].shape, strict=True))
        )
        return self._put(whole, replace(found, axes=axes), {dim: index}, source, accumulate=accumulate)

    def _put(
        self,
        whole: fx.Node,
        found: SliceGeometry,
        given: dict[int, fx.Node],
        source: fx.Node,
        *,
        accumulate: bool = False,
    ) -> fx.Node | None:
        """Insert an `index_put` whose indices of all axes broadcast to the shape of the written value."""
        rank = len(found.axes)
        given_sizes = source.meta["val"].shape if source.meta["val"].dim() == rank else [1] * rank
        indices: list[Any] = [None] * whole.meta["val"].dim()
        for position, axis in enumerate(found.axes):
            index = given.get(position)
            if index is not None and not _covers_axis(axis, whole):
                return None  # a negative index counts from the end of the part, and one out of its range is an error
            if axis.axis is None:
                continue
            if index is None:
                # The size of a source that is not broadcast is a simpler expression than end minus start.
                size = axis.size if str(given_sizes[position]) == "1" else given_sizes[position]
                index = self.call(aten.arange.default, self._size(size, whole, axis.axis), device=_device(whole))
            if index.meta["val"].dim() == 1 and rank > 1:
                shape = [-1 if each == position else 1 for each in range(rank)]
                index = self.call(aten.view.default, index, shape)
            if axis.step != 1:
                index = self.call(aten.mul.Tensor, index, axis.step)
            indices[axis.axis] = self._add_start(index, axis.start)
        for place, start in found.fixed_indices.items():
            zero = self.call(aten.zeros.default, [1] * rank, dtype=torch.int64, device=_device(whole))
            indices[place] = self._add_start(zero, start)
        if source.meta["val"].dtype != whole.meta["val"].dtype:  # `copy_` casts, `index_put` does not
            source = self.call(aten._to_copy.default, source, dtype=whole.meta["val"].dtype)
        more = [True] if accumulate else []
        return self.call(aten.index_put.default, whole, indices, source, *more)

    def _scalar_tensor(self, whole: fx.Node, value: Any) -> fx.Node:
        """Return a number as a scalar tensor with the dtype of the state."""
        held = whole.meta["val"]
        return self.call(aten.full.default, [], value, dtype=held.dtype, device=held.device)

    def _add_start(self, index: fx.Node, start: Any) -> fx.Node:
        for part in start if isinstance(start, tuple) else (start,):
            if isinstance(part, tuple):
                index = self._add_start(index, part)
            elif not (isinstance(part, int) and part == 0):
                index = self.call(aten.add.Tensor, index, self._tensor(part))
        return index

    def _tensor(self, start: Any) -> Any:
        """Return a start; one that was read from a tensor is returned as that tensor.

        Inductor orders kernels by the tensors that they read. A kernel that reads only the number may be fused with one
        that runs before the number is read (torch 2.13: "cannot access local variable 'u0'").
        """
        if not isinstance(start, fx.Node) or not is_data_dependent(start.meta["val"]):
            return start
        if start.target not in (aten._local_scalar_dense.default, aten.item.default):
            raise LookupError(f"{start} is computed from a number that was read from a tensor")
        return self.call(aten.view.default, start.args[0], [])

    def _size(self, size: Any, whole: fx.Node, axis: int) -> Any:
        """Return a size as an argument: a number, or a node that computes it."""
        if isinstance(size, int):
            return size
        known = next((node for node in self.place.graph.nodes if _is_size(node, size) and node < self.place), None)
        if known is not None:
            return known
        if str(whole.meta["val"].shape[axis]) == str(size):
            return self.call(aten.sym_size.int, whole, axis)
        raise LookupError(str(size))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.rewriter.call(target, args, kwargs)


def _is_size(node: fx.Node, size: Any) -> bool:
    held = node.meta.get("val")
    return isinstance(held, torch.SymInt) and str(held) == str(size)


def _device(node: fx.Node) -> torch.device:
    device: torch.device = node.meta["val"].device
    return device


def canonicalize_updates(program: Program) -> tuple[Program, list[str]]:
    """Rewrite eligible updates as chains of `index_put` where possible; return the program and the rewritten states."""
    rewriter = Rewriter(program.copy())
    states = [state for state in copy_returned_parts(rewriter) if state.is_eligible and _needs_it(state)]
    last = {state: put for state in states if (put := _rewrite(rewriter, state)) is not None}
    made = rewriter.finish()
    values = rewriter.current_outputs()
    for state, put in last.items():
        values[state.output_index] = put
    rewriter.set_outputs(made.graph, values)
    rewriter.erase_unused(*reversed(list(made.graph.nodes)))
    return made, [state.binding.name for state in last]


def _needs_it(state: StateUpdate) -> bool:
    """Whether a rewrite is needed: not if compilers already keep all writes, rows or the whole state by one kernel."""
    if any(write.storage_slice.views for write in state.writes):
        return True
    names = {write.target._schema.name for write in state.writes}
    return not names <= {"aten::index_put_", "aten::index_copy_"} and names != {"aten::copy_"}


def _rewrite(rewriter: Rewriter, state: StateUpdate) -> fx.Node | None:
    """Replace the updates of one state, except in the output, and return its last value; None if nothing is changed."""
    rewriter.commit()
    try:
        now = _put_writes(rewriter, state)
        keep = {*now, now[0].graph.output_node()}  # a put may read a value that equals the state after it
        rewriter.replace_all(_find_versions(rewriter, state, now), keep)
    except (LookupError, RuntimeError, ProgramError, Refused):  # a size that no node computes, or that depends on data
        rewriter.rollback()
        return None
    return now[-1]


def _put_writes(rewriter: Rewriter, state: StateUpdate) -> list[fx.Node]:
    """Insert all writes; return the state before the first write and after each write."""
    now = [next(node for node in rewriter.program.graph.nodes if node.name == state.binding.name)]
    for write in state.writes:
        if is_auto_functionalized(write.call):
            raise LookupError(f"{write.call} is an operator that writes to the state directly")
        args = fx.map_arg(write.args, rewriter.current)  # it may read values of states that were already rewritten
        place = max(write.node, now[-1], *(each for each in tree_leaves(args) if isinstance(each, fx.Node))).next
        with rewriter.inserting_before(place, write.node):
            put = Indexer(rewriter, place).put(now[-1], replace(write, args=args))
        if put is None:
            raise LookupError(f"{write.form} cannot be an index_put")
        now.append(put)
    return now


def _find_versions(rewriter: Rewriter, state: StateUpdate, now: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the replacements of values that equal a part of the state: views of its version."""
    found = {}
    for node, (place, count) in state.versions.items():
        if node is not now[0] and node.users:
            with rewriter.inserting_before(max(now[count], node).next, node):
                found[node] = insert_views(rewriter, now[count], place)
    return found
