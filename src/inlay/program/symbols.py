"""Adapter: symbolic sizes and fake values for programs that do not come from torch.export.

The only file that imports torch's symbolic-shape machinery. Used by the reader of dumps and by whoever builds
graphs directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from inlay.errors import ProgramError, one_line
from inlay.program.program import Symbol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FIRST_EXAMPLE = 101


class FakeValues:
    """Makes fake tensors whose sizes are named symbols, and computes the values of a graph's nodes from them."""

    def __init__(self, ranges: Mapping[str, tuple[int, int | None]]) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=True), allow_non_fake_inputs=True)
        # Equal example sizes become one symbol, so each name gets a size of its own.
        self._example = {name: _FIRST_EXAMPLE + 2 * index for index, name in enumerate(ranges)}
        self._ranges = ranges
        self.symbols: dict[str, Symbol] = {}
        """Raw symbol → name and range, for the sizes that were used."""

    def tensor(self, dtype: torch.dtype, shape: Sequence[int | str]) -> torch.Tensor:
        """A fake tensor with this dtype and shape."""
        for size in shape:
            if isinstance(size, str) and size not in self._example:
                raise ProgramError(f"The size {size} of an input is not one of the symbols of the program.")
        sizes = [self._example[size] if isinstance(size, str) else size for size in shape]
        dynamic = [DimDynamic.DUCK if isinstance(size, str) else DimDynamic.STATIC for size in shape]
        if all(kind is DimDynamic.STATIC for kind in dynamic):
            with self.mode:
                return torch.empty(sizes, dtype=dtype)
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        fake = self.mode.from_tensor(torch.empty(sizes, dtype=dtype), symbolic_context=context)
        sizes_now: list[Any] = list(fake.shape)
        for size, name in zip(sizes_now, shape, strict=True):
            if isinstance(name, str):
                self.symbols[str(size.node.expr)] = Symbol(name, *self._ranges[name])
        return fake

    def propagate(self, graph: fx.Graph, inputs: Sequence[Any]) -> Any:
        """Set `meta["val"]` on every node of `graph`, nested graphs included; returns the outputs' values."""
        given = iter(inputs)
        result: Any = None

        def value_of(node: fx.Node) -> Any:
            if node.op == "get_attr":
                owner = graph.owning_module
                assert owner is not None
                return owner.get_submodule(str(node.target))
            return node.meta.get("val")

        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = next(given)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value_of)
                self._propagate_nested(args)
                try:
                    with enable_python_dispatcher(), self.mode:
                        node.meta["val"] = node.target(*args, **kwargs)
                except Exception as error:
                    raise ProgramError(f"{node.name} cannot be computed: {one_line(error)}.") from error
            elif node.op == "output":
                result = fx.map_arg(node.args[0], value_of)
        return result

    def _propagate_nested(self, args: Sequence[Any]) -> None:
        modules = [arg for arg in args if isinstance(arg, fx.GraphModule)]
        operands = [item for arg in args if isinstance(arg, (tuple, list)) for item in arg]
        for module in modules:
            count = sum(node.op == "placeholder" for node in module.graph.nodes)
            if count <= len(operands):
                self.propagate(module.graph, operands[:count])
