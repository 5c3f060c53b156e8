"""Post-grad graphs written by hand, for fix_functionalization: writes that stay, and why."""

from __future__ import annotations

import torch
from tools.fuzz_writes import operators  # noqa: F401 - registers torch.ops.inlay_fuzz
from torch import fx

from inlay.analysis.auto_functionalized import V1, V2
from inlay.analysis.liveness import CopyReason
from tests.in_place_graphs import Build, Case

aten, fuzz = torch.ops.aten, torch.ops.inlay_fuzz


def the_clone_is_gone(g: Build) -> fx.GraphModule:
    """pytorch#198031 after the compiler took the clone away: the tensor is written and read by one call."""
    a = g(aten.mul.Tensor, g.input("x", 2, 4), 2)
    return g.module(g.put(a, a))


def overlapping_arguments(g: Build) -> fx.GraphModule:
    x = g.input("x", 4, 4)
    g.back(x, g.put(x, g(aten.slice.Tensor, x, 0, 1, 3), slice_dim=0, slice_start=0, slice_end=2))
    return g.module()


def two_bases_of_one_storage(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 4), g.input("y", 4)
    a = g(aten.mul.Tensor, x, 2)
    call = g(V1, fuzz.two.default, x=a, z=g(aten.alias.default, a), y=y)
    return g.module(g.item(call, 1), g.item(call, 2))


def read_after(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.put(x, y)
    read = g(aten.mul.Tensor, x, 2)
    g.back(x, new)
    return g.module(read)


def a_view_from_before_is_read_after(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    row = g(aten.select.int, x, 0, 1)
    new = g.put(x, y)
    read = g(aten.mul.Tensor, row, 2)
    g.back(x, new)
    return g.module(read)


def an_overlapping_row_is_read_later(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 4, 4), g.input("y", 4)
    rows = g(aten.slice.Tensor, x, 0, 1, 4)
    new = g.put(x, y, slice_dim=0, slice_start=0, slice_end=2)
    read = g(aten.mul.Tensor, rows, 2)
    g.back(x, new)
    return g.module(read)


def the_new_value_is_returned_too(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.put(x, y)
    g.back(x, new)
    return g.module(new)


def a_view_of_the_new_value_is_returned(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.put(x, y)
    g.back(x, new)
    return g.module(g(aten.select.int, new, 0, 1))


def the_old_value_is_returned(g: Build) -> fx.GraphModule:
    a, y = g(aten.mul.Tensor, g.input("x", 2, 4), 2), g.input("y", 4)
    new = g.put(a, y)
    return g.module(g(aten.view.default, a, [8]), new)


def an_input_that_is_not_changed(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    return g.module(g.put(x, y))


def a_view_of_an_input_that_is_not_changed(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    return g.module(g.item(g(V1, fuzz.put.default, x=g(aten.select.int, x, 0, 1), y=y), 1))


def a_constant(g: Build) -> fx.GraphModule:
    y = g.input("y", 4)
    return g.module(g(aten.add.Tensor, g.put(g.buffer(), y), 1))


def copied_back_turned(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 4, 4), g.input("y", 4)
    g.back(x, g(aten.transpose.int, g.put(x, y), 0, 1))
    return g.module()


def read_after_something_else_was_copied_over(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.put(x, y)
    g.back(x, g(aten.add.Tensor, new, 1))
    return g.module(g(aten.mul.Tensor, new, 2))


def written_in_place_as_well(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    a = g(aten.mul.Tensor, x, 2)
    new = g.put(a, y)
    g(aten.add_.Tensor, a, 1)
    return g.module(g(aten.add.Tensor, new, 1))


def written_after_it_was_copied_back(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    new = g.put(x, y)
    g.back(x, new)
    return g.module(g(aten.mul.Tensor, g(aten.add_.Tensor, new, 1), 2))


def a_copy_that_looks_like_a_view(g: Build) -> fx.GraphModule:
    """reshape of what is not contiguous copies, when it runs; what it copied is read after the end."""
    wide, y = g.input("wide", 4, 4), g.input("y", 4)
    turned = g(aten.transpose.int, wide, 0, 1)
    new = g.put(wide, y)
    flat = g(aten.reshape.default, turned, [16])
    g.back(wide, new)
    return g.module(g(aten.mul.Tensor, flat, 2))


def the_new_value_is_written_where_the_old_is_read(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 4, 4), g.input("y", 4)
    a = g(aten.mul.Tensor, x, 2)
    row = g(aten.select.int, a, 0, 3)
    new = g.put(a, y, slice_dim=0, slice_start=0, slice_end=2)
    g(aten.add_.Tensor, g(aten.select.int, new, 0, 3), 1)
    return g.module(g(aten.mul.Tensor, row, 2), g(aten.add.Tensor, new, 1))


def mystery(value: torch.Tensor) -> torch.Tensor:
    """A call without a schema."""
    return value


def something_unknown_is_between(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    seen = g(mystery, g(aten.mul.Tensor, x, 2))
    a = g.graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0]
    new = g.put(a, y)
    return g.module(g(aten.add.Tensor, seen, 1), new)


def the_wrapper_itself_is_read(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 2, 4), g.input("y", 4)
    call = g(V2, fuzz.two.default, y=y, _x_base_index=0, _z_base_index=1, _all_bases=[x, g(aten.clone.default, x)])
    return g.module(g(aten.cat.default, g(_all_but_first, call)))


def _all_but_first(values: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return list(values[1:])


def views_told_from_another_offset(g: Build) -> fx.GraphModule:
    x, y = g.input("x", 4, 4), g.input("y", 4)
    rows = g(aten.slice.Tensor, g(aten.mul.Tensor, x, 2), 0, 2, 4)
    return g.module(g(aten.add.Tensor, g.put(rows, y, size=(4,), stride=(1,), storage_offset=8), 1))


def another_row_is_returned(g: Build) -> fx.GraphModule:
    """The write does not reach it, and two results would be one storage."""
    x, y = g.input("x", 4, 4), g.input("y", 4)
    own = g(aten.mul.Tensor, x, 2)
    first = g(aten.slice.Tensor, own, 0, 0, 1)
    return g.module(first, g.put(own, y, slice_dim=0, slice_start=1, slice_end=3))


def another_row_is_copied_over(g: Build) -> fx.GraphModule:
    """What is left of the old value is read after it."""
    x, y = g.input("x", 4, 4), g.input("y", 4)
    own = g(aten.mul.Tensor, x, 2)
    new = g.put(own, y, slice_dim=0, slice_start=1, slice_end=3)
    read = g(aten.add.Tensor, new, 1)
    g.back(g(aten.select.int, own, 0, 0), y)
    return g.module(read, g(aten.add.Tensor, own, 1))


_ONCE = {
    another_row_is_returned: CopyReason.READ_AFTER_WRITE,
    another_row_is_copied_over: CopyReason.OVERWRITTEN,
    the_clone_is_gone: CopyReason.SHARED_STORAGE,
    overlapping_arguments: CopyReason.SHARED_STORAGE,
    read_after: CopyReason.READ_AFTER_WRITE,
    a_view_from_before_is_read_after: CopyReason.READ_AFTER_WRITE,
    an_overlapping_row_is_read_later: CopyReason.READ_AFTER_WRITE,
    the_new_value_is_returned_too: CopyReason.RETURNED,
    a_view_of_the_new_value_is_returned: CopyReason.RETURNED,
    the_old_value_is_returned: CopyReason.READ_AFTER_WRITE,
    an_input_that_is_not_changed: CopyReason.NOT_COPIED_BACK,
    a_view_of_an_input_that_is_not_changed: CopyReason.NOT_COPIED_BACK,
    a_constant: CopyReason.NOT_COPIED_BACK,
    copied_back_turned: CopyReason.OVERWRITTEN,
    read_after_something_else_was_copied_over: CopyReason.OVERWRITTEN,
    written_in_place_as_well: CopyReason.READ_AFTER_WRITE,
    written_after_it_was_copied_back: CopyReason.OVERWRITTEN,
    a_copy_that_looks_like_a_view: CopyReason.READ_AFTER_WRITE,
    the_new_value_is_written_where_the_old_is_read: CopyReason.READ_AFTER_WRITE,
    something_unknown_is_between: CopyReason.READ_AFTER_WRITE,
    the_wrapper_itself_is_read: CopyReason.OPAQUE,
    views_told_from_another_offset: CopyReason.OFFSET_MISMATCH,
}
_COPIED_BACK = {
    another_row_is_copied_over,
    overlapping_arguments,
    read_after,
    a_view_from_before_is_read_after,
    an_overlapping_row_is_read_later,
    the_new_value_is_returned_too,
    a_view_of_the_new_value_is_returned,
    copied_back_turned,
    read_after_something_else_was_copied_over,
    written_after_it_was_copied_back,
    a_copy_that_looks_like_a_view,
}
STAYS = {build: Case(build, 0, (reason,), int(build in _COPIED_BACK)) for build, reason in _ONCE.items()}
STAYS[two_bases_of_one_storage] = Case(
    two_bases_of_one_storage, 0, (CopyReason.SHARED_STORAGE, CopyReason.SHARED_STORAGE)
)
