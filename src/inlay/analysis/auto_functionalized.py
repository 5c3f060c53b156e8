"""Parse the wrappers that functionalization puts around mutating operators.

`auto_functionalized(op, **arguments)` copies each argument that `op` writes, calls `op` on the copies, and returns the
results of `op` followed by the copies. `auto_functionalized_v2` copies the *bases* that those arguments are views of.
An argument is then given by `_{name}_base_index` and how to recreate the view, and the copied bases are returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.aliasing import ByteRange, byte_range, is_only_indexed, nodes_in, storage_id, strided_byte_range

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

V1 = torch.ops.higher_order.auto_functionalized
V2 = torch.ops.higher_order.auto_functionalized_v2
aten = torch.ops.aten


@dataclass(frozen=True)
class BaseView:
    """An argument as a view of a base: the base itself, a slice of it, or sizes, strides and an offset."""

    base: int
    slice: tuple[Any, Any, Any] | None = None
    strided: tuple[Any, Any, Any] | None = None

    def apply(self, base: Any, call: Callable[..., Any]) -> Any:
        """Create the argument from its base."""
        if self.slice is not None:
            return call(aten.slice.Tensor, base, *self.slice)
        if self.strided is not None:
            size, stride, offset = self.strided
            return call(aten.as_strided.default, base, list(size), list(stride), offset)
        return base

    def byte_range(self, base: torch.Tensor) -> ByteRange | None:
        """Return the bytes of the base that the argument spans, or None when they are unknown."""
        storage = storage_id(base)
        if storage is None:
            return None
        if self.strided is not None:
            return strided_byte_range(storage, *self.strided, base.element_size())
        if self.slice is None:
            return byte_range(base)
        axis, start, end = self.slice
        if not all(type(each) is int for each in (*self.slice, base.shape[axis], base.storage_offset())):
            return None
        start, end, _ = slice(start, end).indices(base.shape[axis])
        size = [*base.shape[:axis], max(end - start, 0), *base.shape[axis + 1 :]]
        offset = base.storage_offset() + start * base.stride(axis)
        return strided_byte_range(storage, size, base.stride(), offset, base.element_size())


@dataclass(frozen=True, eq=False)
class AutoFunctionalized:
    """A parsed wrapper: its operator, the bases that it copies, and the arguments."""

    node: fx.Node
    operator: Any
    bases: tuple[fx.Node, ...]
    """The tensors that are copied before the call, one entry per copy."""
    result_indices: tuple[tuple[int, ...], ...]
    """Where in the wrapper's result the new value of each base is: an index, or an index and a position in a list."""
    arguments: Mapping[str, Any]
    """By name. A written argument is a `BaseView`, a list of them, or None."""

    def base_offset(self, index: int) -> Any:
        """Return the storage offset that a base had when its views were recorded.

        Inductor replaces a clone by its source, even where the source starts at another offset of a larger storage, and
        does not update the recorded views. The eager inputs of the call still have the original offset.
        """
        eager = self.node.meta.get("eager_input_vals")
        if self.node.target is V2 and eager is not None:
            return eager[1]["_all_bases"][index].storage_offset()
        return self.bases[index].meta["val"].storage_offset()

    def has_strided_view(self, index: int) -> bool:
        """Whether a view of a base is given by strides and an offset."""
        return any(view.base == index and view.strided is not None for view in self.views)

    @property
    def return_count(self) -> int:
        """How many results of the wrapper are the operator's; an operator without results counts as one (None)."""
        return max(1, len(self.operator._schema.returns))

    @property
    def views(self) -> list[BaseView]:
        """The views of all arguments that are written."""
        found: list[BaseView] = []
        for value in self.arguments.values():
            found += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, BaseView)]
        return found

    @property
    def read_only_arguments(self) -> dict[str, Any]:
        """The arguments that are only read, by name."""
        return {name: value for name, value in self.arguments.items() if not _is_mutated(value)}

    @property
    def read_only_nodes(self) -> list[fx.Node]:
        """The nodes among the arguments that are only read."""
        return nodes_in(list(self.read_only_arguments.values()))

    def find_bases(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Return the bases among the arguments of a wrapper of the same form."""
        if self.node.target is V2:
            return list(arguments["_all_bases"])
        found: list[Any] = []
        for name in _mutated_names(self.operator):
            value = arguments[name]
            found += [each for each in (value if isinstance(value, (list, tuple)) else [value]) if each is not None]
        return found

    @property
    def lists(self) -> tuple[int, ...]:
        """The indices of results that are lists of new values."""
        return tuple(dict.fromkeys(place[0] for place in self.result_indices if len(place) > 1))

    @property
    def aliased_results(self) -> list[fx.Node]:
        """The results of the operator that alias what it wrote, or may."""
        hands_on = any(each.alias_info is not None for each in self.operator._schema.returns)
        return [each for index in range(self.return_count) for each in self.result_nodes((index,))] if hands_on else []

    def result_nodes(self, place: tuple[int, ...]) -> list[fx.Node]:
        """Return the nodes that take the result at a place."""
        owners = [self.node]
        for index in place:
            owners = [user for owner in owners for user in owner.users if user.args[1] == index]
        return owners

    def build_arguments(self, bases: Sequence[Any], others: Mapping[str, Any], call: Callable[..., Any]) -> Any:
        """Return the positional and keyword arguments of the operator; `call` creates the views of `bases`."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for argument in self.operator._schema.arguments:
            value: Any = self.arguments.get(argument.name)
            if isinstance(value, BaseView):
                made: Any = value.apply(bases[value.base], call)
            elif _is_mutated(value):
                made = [each.apply(bases[each.base], call) if isinstance(each, BaseView) else each for each in value]
            else:
                made = others.get(argument.name, argument.default_value)
            if argument.kwarg_only:
                named[argument.name] = made
            else:
                positional.append(made)
        return tuple(positional), named


def _is_mutated(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(isinstance(each, BaseView) for each in items)


def is_auto_functionalized(node: Any) -> bool:
    """Whether a node is a wrapper of a mutating call."""
    return isinstance(node, fx.Node) and node.op == "call_function" and (node.target is V1 or node.target is V2)


def mutated_base(result: fx.Node) -> fx.Node | None:
    """Return the base that a result of a wrapper is the new value of; None if it is not the new value of one tensor."""
    wrapped = parse_auto_functionalized(result.args[0])  # type: ignore[arg-type]
    places = wrapped.result_indices if wrapped is not None else ()
    index = next((index for index, place in enumerate(places) if place == (result.args[1],)), None)
    return wrapped.bases[index] if wrapped is not None and index is not None else None


def parse_auto_functionalized(node: fx.Node) -> AutoFunctionalized | None:
    """Parse a wrapper; None if its form is unknown, or if it is used other than by indexing its results."""
    target = node.args[0]
    if not isinstance(target, torch._ops.OpOverload) or not is_only_indexed(node):
        return None
    wrapped = _read_v1(node, target) if node.target is V1 else _read_v2(node, target)
    if wrapped is None:
        return None
    if not all(is_only_indexed(each) for index in wrapped.lists for each in wrapped.result_nodes((index,))):
        return None
    if not target._schema.returns and any(each.users for each in wrapped.result_nodes((0,))):
        return None  # the None of an operator without results has a user
    return wrapped if all(_is_strided(base) for base in wrapped.bases) else None


def _is_strided(base: fx.Node) -> bool:
    value = base.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _mutated_names(target: Any) -> list[str]:
    return [each.name for each in target._schema.arguments if each.alias_info is not None and each.alias_info.is_write]


def _read_v1(node: fx.Node, target: Any) -> AutoFunctionalized | None:
    bases: list[fx.Node] = []
    places: list[tuple[int, ...]] = []
    arguments: dict[str, Any] = dict(node.kwargs)
    first = max(1, len(target._schema.returns))
    for index, name in enumerate(_mutated_names(target), first):
        value = node.kwargs.get(name)
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(each is None or isinstance(each, fx.Node) for each in items):
            return None
        views: list[BaseView | None] = []
        for place, item in enumerate(items):
            views.append(None if item is None else BaseView(len(bases)))
            if isinstance(item, fx.Node):
                bases.append(item)
                places.append((index, place) if isinstance(value, (list, tuple)) else (index,))
        arguments[name] = views if isinstance(value, (list, tuple)) else views[0]
    return AutoFunctionalized(node, target, tuple(bases), tuple(places), arguments)


def _read_v2(node: fx.Node, target: Any) -> AutoFunctionalized | None:
    given = node.kwargs.get("_all_bases")
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, fx.Node) for each in given) or not given:
        return None
    first = max(1, len(target._schema.returns))
    names = _mutated_names(target)
    plain = {each.name for each in target._schema.arguments} - set(names)
    arguments: dict[str, Any] = {name: value for name, value in node.kwargs.items() if name in plain}
    read_keys = plain | {"_all_bases"}
    for name in names:
        length = node.kwargs.get(f"_{name}_length")
        prefixes = [f"_{name}"] if length is None else [f"_{name}_{place}" for place in range(int(str(length)))]
        read_keys |= {f"_{name}_length"}
        views = []
        for prefix in prefixes:
            views.append(_view(node.kwargs, prefix))
            read_keys |= {f"{prefix}_{each}" for each in _VIEW_KEYS}
        arguments[name] = views if length is not None else views[0]
    if not set(node.kwargs) <= read_keys:
        return None
    places = tuple((first + index,) for index in range(len(given)))
    return AutoFunctionalized(node, target, tuple(given), places, arguments)


_VIEW_KEYS = ("base_index", "alias", "size", "stride", "storage_offset", "slice_dim", "slice_start", "slice_end")


def _view(kwargs: Mapping[str, Any], prefix: str) -> BaseView | None:
    base = kwargs.get(f"{prefix}_base_index")
    if base is None:
        return None
    if f"{prefix}_alias" in kwargs:
        return BaseView(base)
    if f"{prefix}_storage_offset" in kwargs:
        return BaseView(
            base, strided=tuple(kwargs[f"{prefix}_{each}"] for each in ("size", "stride", "storage_offset"))
        )
    if f"{prefix}_slice_dim" in kwargs:
        return BaseView(base, slice=tuple(kwargs[f"{prefix}_slice_{each}"] for each in ("dim", "start", "end")))
    return BaseView(base)
