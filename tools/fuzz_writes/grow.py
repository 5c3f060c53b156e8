"""Generate a graph with writes: wrapped calls on bases, views and copies of them, with readers before and after."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.auto_functionalized import V1, V2
from tools.fuzz_writes.operators import MUTATED_ARGUMENTS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

aten = torch.ops.aten
_SHAPES = ((4,), (2, 4), (4, 4), (2, 2, 2))


class WriteGraphGenerator:
    """A graph under construction that runs at once: `meta["val"]` of a node is the computed tensor."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.graph = fx.Graph()
        self.inputs: dict[str, torch.Tensor] = {}
        """Each input, as a view of a larger storage of the caller."""
        self.constant = _numbers(rng, (2, 4))
        self.values: list[fx.Node] = []
        self.latest: dict[fx.Node, fx.Node] = {}
        """Input → the value that functionalization would copy to it."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
        """Add a call and return its node; None if it cannot be computed."""
        given, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        try:
            value = target(*given, **named)
        except (RuntimeError, IndexError, ValueError):
            return None
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self.values.append(node)
        return node

    def begin(self) -> None:
        """Add inputs, whole or parts of a larger tensor, and sometimes a constant."""
        for index in range(self.rng.randint(1, 3)):
            shape = self.rng.choice(_SHAPES)
            match self.rng.randrange(6):
                case 0:
                    value = _numbers(self.rng, (shape[0] + 2, *shape[1:]))[1:-1]
                case 1:
                    value = _numbers(self.rng, (*shape[:-1], shape[-1] * 2))[..., ::2]
                case _:
                    value = _numbers(self.rng, shape)
            node = self.graph.placeholder(f"in_{index}")
            self.inputs[node.name] = value
            node.meta["val"] = _copy_with_storage(value)
            self.values.append(node)
        if self.rng.random() < 0.3:
            node = self.graph.get_attr("constant")
            node.meta["val"] = self.constant.clone()
            self.values.append(node)

    def pick_value(self) -> fx.Node:
        """Return a random value; recent values are more likely."""
        newest = self.values[-4:] if self.rng.random() < 0.5 else self.values
        return self.rng.choice(newest)

    def step(self) -> None:
        """Add a write, a view, a computation or an in-place call."""
        draw = self.rng.random()
        if draw < 0.4:
            self._write()
        elif draw < 0.65:
            self._view()
        elif draw < 0.93:
            self._compute()
        else:
            self._mutate()

    def _view(self) -> fx.Node | None:
        node, rng = self.pick_value(), self.rng
        value = node.meta["val"]
        axis = rng.randrange(max(value.dim(), 1))
        length = max(1, value.shape[axis] if value.dim() else 1)
        start = rng.randrange(length)
        ways: list[Callable[[], fx.Node | None]] = [
            lambda: self.call(aten.slice.Tensor, node, axis, start, rng.randint(start + 1, length)),
            lambda: self.call(aten.slice.Tensor, node, axis, start, rng.randint(start + 1, length)),
            lambda: self.call(aten.select.int, node, axis, start),
            lambda: self.call(aten.transpose.int, node, 0, axis),
            lambda: self.call(aten.view.default, node, [value.numel()]),
            lambda: self.call(aten.reshape.default, node, [value.numel()]),
            lambda: self.call(aten._unsafe_view.default, node, [value.numel()]),
            lambda: self.call(aten.alias.default, node),
            lambda: self.call(aten.expand.default, node, [2, *value.shape]),
            lambda: self.call(aten.as_strided.default, node, *self._layout(value)),
            lambda: self._part(node, axis),
        ]
        return rng.choice(ways)()

    def _part(self, node: fx.Node, axis: int) -> fx.Node | None:
        parts = self.call(self.rng.choice((aten.unbind.int, aten.split.Tensor)), node, *((1,) if axis else (0,)))
        if parts is None:
            return None
        return self.call(operator.getitem, parts, self.rng.randrange(max(1, len(parts.meta["val"]))))

    def _layout(self, value: torch.Tensor) -> tuple[list[int], list[int], int]:
        """Return sizes, strides and an offset within the elements of the value."""
        first, room = int(value.storage_offset()), _span(value)
        length = self.rng.randint(1, max(1, min(4, room)))
        stride = self.rng.choice((1, 1, 2)) if 2 * length - 1 <= room else 1
        left = room - (length - 1) * stride - 1
        return [length], [stride], first + self.rng.randint(0, max(left, 0))

    def _compute(self) -> fx.Node | None:
        node, other, rng = self.pick_value(), self.pick_value(), self.rng
        value = node.meta["val"]
        ways: list[Callable[[], fx.Node | None]] = [
            lambda: self.call(aten.add.Tensor, node, other),
            lambda: self.call(aten.mul.Tensor, node, rng.choice((2, 3))),
            lambda: self.call(aten.clone.default, node),
            lambda: self.call(aten.clone.default, node),
            lambda: self.call(aten.sum.default, node),
            lambda: self.call(aten.sym_size.int, node, 0),
            lambda: self.call(aten.cat.default, [node, other]),
            lambda: self.call(aten.select_scatter.default, node, other, 0, rng.randrange(max(len(value.shape), 1))),
        ]
        return rng.choice(ways)()

    def _mutate(self) -> fx.Node | None:
        """Add a write that is already in place."""
        node = self.pick_value()
        if self.rng.random() < 0.5:
            return self.call(aten.add_.Tensor, node, 1)
        return self.call(aten.copy_.default, node, self.pick_value())

    def _write(self) -> None:
        """Add a wrapped call and its results."""
        target = self.rng.choice(list(MUTATED_ARGUMENTS))
        wrapped = self._v1(target) if self.rng.random() < 0.4 else self._v2(target)
        if wrapped is None:
            return
        node, bases = wrapped
        first = max(1, len(target._schema.returns))
        for index in range(len(target._schema.returns)):
            if self.rng.random() < 0.7:
                self.call(operator.getitem, node, index)
        for index, base in bases.items():
            if self.rng.random() < 0.05:
                continue
            value = self.call(operator.getitem, node, index + first)
            owner = base[0] if isinstance(base, list) else base
            if isinstance(base, list) and value is not None:
                value = self.call(operator.getitem, value, 0)
            for key, last in list(self.latest.items()):
                if value is not None and (last is owner or key is owner):
                    self.latest[key] = value
            if value is not None and owner.op == "placeholder":
                self.latest[owner] = value
            if self.rng.random() < 0.15:
                self._add_access(owner, value)

    def _add_access(self, base: fx.Node, value: fx.Node | None) -> None:
        """Add a view of a base, or a write to its new value, directly after the write."""
        numel = base.meta["val"].numel()
        match self.rng.randrange(3):
            case 0:
                self.call(aten.reshape.default, base, [numel])
            case 1:
                self.call(aten.slice.Tensor, base, 0, self.rng.randrange(2), 9)
            case 2 if value is not None:
                part = self.call(aten.slice.Tensor, value, 0, self.rng.randrange(3), 9)
                self.call(aten.add_.Tensor, part, 1)

    def _read(self) -> fx.Node:
        """Return a value for a write to read; often one without shared storage."""
        node = self.pick_value()
        if self.rng.random() < 0.7:
            return self.call(aten.mul.Tensor, node, 2) or node
        return node

    def _base(self) -> fx.Node:
        """Return a value to write; often an input or its latest value."""
        inputs = [node for node in self.values if node.op == "placeholder"]
        if self.rng.random() < 0.6 and inputs:
            node = self.rng.choice(inputs)
            return self.latest.get(node, node) if self.rng.random() < 0.85 else node
        return self.pick_value()

    def _v1(self, target: Any) -> tuple[fx.Node, dict[int, Any]] | None:
        given: dict[str, Any] = {"y": self._read()}
        bases: dict[int, Any] = {}
        for index, name in enumerate(MUTATED_ARGUMENTS[target]):
            base: Any = self._base()
            if name == "xs":
                base = [self._base() for _ in range(self.rng.randint(1, 3))]
            elif name == "z" and "both" in str(target) and self.rng.random() < 0.4:
                base = None
            given[name] = base
            if base is not None:
                bases[index] = base
        if "keyed" in str(target):
            given["k"] = self.rng.randint(1, 5)
        node = self.call(V1, target, **given)
        return None if node is None else (node, bases)

    def _v2(self, target: Any) -> tuple[fx.Node, dict[int, Any]] | None:
        given: dict[str, Any] = {"y": self._read()}
        bases: list[fx.Node] = []
        for name in MUTATED_ARGUMENTS[target]:
            if name == "xs":
                given["_xs_length"] = self.rng.randint(1, 3)
                for place in range(given["_xs_length"]):
                    self._view_of(f"_xs_{place}", given, bases)
            elif name == "z" and "both" in str(target) and self.rng.random() < 0.4:
                given["_z_base_index"] = None
            else:
                self._view_of(f"_{name}", given, bases)
        if "keyed" in str(target):
            given["k"] = self.rng.randint(1, 5)
        node = self.call(V2, target, **given, _all_bases=bases)
        return None if node is None else (node, dict(enumerate(bases)))

    def _view_of(self, prefix: str, given: dict[str, Any], bases: list[fx.Node]) -> None:
        """Add an argument as a view of an existing or new base."""
        rng = self.rng
        base = self._base()
        if not bases or (rng.random() < 0.6 and (base not in bases or rng.random() < 0.2)):
            bases.append(base)
        index = rng.randrange(len(bases)) if base not in bases else bases.index(base)
        given[f"{prefix}_base_index"] = index
        value = bases[index].meta["val"]
        match rng.randrange(5):
            case 0 if value.dim() and value.shape[0]:
                start = rng.randrange(value.shape[0])
                given[f"{prefix}_slice_dim"] = 0
                given[f"{prefix}_slice_start"], given[f"{prefix}_slice_end"] = start, rng.randint(start, value.shape[0])
            case 1 if value.numel():
                keys = ("size", "stride", "storage_offset")
                given |= {f"{prefix}_{key}": each for key, each in zip(keys, self._layout(value), strict=True)}
            case 2:
                given[f"{prefix}_alias"] = True

    def _add_views(self, value: fx.Node) -> fx.Node:
        """Return a value, sometimes through views that transpose it or change nothing."""
        rank, size = value.meta["val"].dim(), list(value.meta["val"].shape)
        match self.rng.randrange(12):
            case 0 if rank:
                return self.call(aten.transpose.int, value, 0, rank - 1) or value
            case 1:
                flat = self.call(aten.view.default, value, [-1])
                return (self.call(aten.view.default, flat, size) if flat is not None else None) or value
            case 2:
                return self.call(aten.alias.default, value) or value
        return value

    def end(self) -> None:
        """Add copies to the inputs, and outputs: mostly computed values, sometimes the written values."""
        rng = self.rng
        order = [node for node in self.values if node.op == "placeholder"]
        copies = []
        for node in rng.sample(order, len(order)):
            if node in self.latest and rng.random() < 0.85:
                copies.append(self.call(aten.copy_.default, node, self._add_views(self.latest[node])))
            elif rng.random() < 0.3:
                copies.append(self.call(aten.copy_.default, node, self.pick_value()))
            if rng.random() < 0.3:
                self._compute()
        outputs = [each for each in copies if each is not None and rng.random() < 0.2]
        for node in rng.sample(self.values, min(len(self.values), 4)):
            if rng.random() < 0.25:
                outputs.append(node)
            elif (read := self.call(aten.add.Tensor, node, 1)) is not None and rng.random() < 0.9:
                outputs.append(read)
        self.graph.output(tuple(outputs))


def _numbers(rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(-9, 9, shape, generator=generator)


def _span(value: torch.Tensor) -> int:
    if not value.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))


def _copy_with_storage(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in a copy of its whole storage."""
    flat = torch.as_strided(value, (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0).clone()
    return torch.as_strided(flat, value.shape, value.stride(), value.storage_offset())


def generate_graph(rng: random.Random) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """Return a graph with writes, and its inputs.

    The declared types of nodes are correct; in half of the graphs they do not show shared storage.
    """
    growth = WriteGraphGenerator(rng)
    growth.begin()
    for _ in range(rng.randint(3, 12)):
        growth.step()
    growth.end()
    root = torch.nn.Module()
    root.register_buffer("constant", growth.constant.clone())
    module = fx.GraphModule(root, growth.graph)
    if rng.random() < 0.5:
        for node in module.graph.nodes:
            node.meta["val"] = fx.node.map_aggregate(node.meta.get("val"), _remove_alias)
    return module, growth.inputs


def _remove_alias(value: Any) -> Any:
    return _copy_with_storage(value) if isinstance(value, torch.Tensor) else value
