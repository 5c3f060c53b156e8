"""Adapter: symbolic sizes and fake values for programs that do not come from torch.export.

The only file that imports torch's symbolic-shape machinery. Used by the reader of dumps and by whoever builds
graphs directly.
"""

from __future__ import annotations

import ast
import logging
import operator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    free_unbacked_symbols,
    statically_known_true,
)

from inlay.errors import ProgramError, one_line
from inlay.program.program import Symbol
from inlay.program.size_specialization import size_oblivious

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_ARITHMETIC: dict[type[Any], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
for _name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
    logging.getLogger(_name).addFilter(lambda _: not _QUIET.get())


@contextmanager
def symbolic_sizes() -> Iterator[None]:
    """Within this context every operator can be computed on fake tensors with symbolic sizes, one of them 1 or not.

    What cannot be computed raises, and torch does not print a traceback of its own besides.
    """
    token = _QUIET.set(True)
    try:
        with size_oblivious(), enable_python_dispatcher():
            yield
    finally:
        _QUIET.reset(token)


def is_statically_true(condition: Any) -> bool:
    """Whether a condition on sizes holds whatever they are; asking adds no assumption."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def is_data_dependent(size: Any) -> bool:
    """Whether a size is computed from numbers that are read from tensors when the program runs."""
    return bool(free_unbacked_symbols(size))


def is_same_size(one: Any, two: Any) -> bool:
    """Whether two sizes are the same whatever the symbols are; one that no input has may be any.

    Asking adds no assumption.
    """
    if isinstance(one, int) and isinstance(two, int):
        return one == two
    if str(one) == str(two) or is_data_dependent((one, two)):
        return True
    return is_statically_true(one == two)


def fixed_symbols(graph: fx.Graph) -> dict[str, str]:
    """Raw symbols of a graph's sizes that something has taken to be a number, or another symbol."""
    values = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    env = next((value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor)), None)
    return {str(symbol): str(value) for symbol, value in env.replacements.items()} if env is not None else {}


class FakeValues:
    """Makes fake tensors whose sizes are named symbols, and computes the values of a graph's nodes from them."""

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        self._sizes: dict[str, Any] = {}
        self.symbols: dict[str, Symbol] = {}
        """Raw symbol → name and range."""
        for symbol in symbols:
            source = ConstantSource(f"__{symbol.name}")
            raw = env.create_symbol(symbol.example, source, DimDynamic.DYNAMIC, None)
            if symbol.high is not None:
                env.constrain_symbol_range(raw, compiler_min=symbol.low, compiler_max=symbol.high)
            self._sizes[symbol.name] = env.create_symintnode(raw, hint=symbol.example, source=source)
            self.symbols[str(raw)] = symbol

    @classmethod
    def from_graph(cls, graph: fx.Graph) -> FakeValues:
        """Computes on with the values a graph's placeholders have: their sizes stay the symbols they are."""
        return cls.from_values(node.meta.get("val") for node in graph.nodes if node.op == "placeholder")

    @classmethod
    def from_values(cls, values: Iterable[Any]) -> FakeValues:
        """Computes on with these values."""
        made = cls([])
        made.mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), made.mode)
        return made

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Within this context torch computes with fake values, and sizes stay symbols."""
        with enable_python_dispatcher(), self.mode:
            yield

    @contextmanager
    def forbid_guards(self) -> Iterator[None]:
        """Within this context a call that would add an assumption about a size raises instead."""
        env = self.mode.shape_env
        assert env is not None
        with symbolic_sizes(), self.mode, env.error_on_new_guards():
            yield

    def tensor(self, dtype: torch.dtype, shape: Sequence[int | str]) -> torch.Tensor:
        """A fake tensor with this dtype and shape; sizes are numbers, symbols or expressions of symbols."""
        sizes = [self.size(size) for size in shape]
        with self.mode:
            return torch.empty(sizes, dtype=dtype)

    def size(self, size: int | str) -> Any:
        """A size as torch computes with it."""
        if isinstance(size, int):
            return size
        try:
            return self._evaluate(ast.parse(size, mode="eval").body)
        except (SyntaxError, KeyError) as error:
            raise ProgramError(f"The size {size} is not an expression of the symbols of the program.") from error

    def _evaluate(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return self._sizes[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self._evaluate(left), self._evaluate(right))
        raise KeyError(ast.unparse(node))

    def propagate(self, graph: fx.Graph, inputs: Sequence[Any]) -> Any:
        """Set `meta["val"]` on every node of `graph`, nested graphs included; returns the outputs' values."""
        given = iter(inputs)
        result: Any = None
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = next(given)
            elif node.op == "call_function":
                node.meta["val"] = self.compute_value(node)
            elif node.op == "output":
                result = fx.map_arg(node.args[0], _node_value)
        return result

    def compute_value(self, node: fx.Node) -> Any:
        """What a call gives, computed from the values its operands have."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _node_value)
        self._propagate_nested(args)
        target: Any = node.target
        try:
            with symbolic_sizes(), self.mode, torch.no_grad():  # a weight that is trained may be written to
                return target(*args, **kwargs)
        except Exception as error:
            raise ProgramError(f"{node.name} cannot be computed: {one_line(error)}.") from error

    def _propagate_nested(self, args: Sequence[Any]) -> None:
        modules = [arg for arg in args if isinstance(arg, fx.GraphModule)]
        operands = [item for arg in args if isinstance(arg, (tuple, list)) for item in arg]
        for module in modules:
            count = sum(node.op == "placeholder" for node in module.graph.nodes)
            if count <= len(operands):
                self.propagate(module.graph, operands[:count])


def _node_value(node: fx.Node) -> Any:
    if node.op == "get_attr" and "val" not in node.meta:  # a nested graph; other attributes are tensors
        owner = node.graph.owning_module
        assert owner is not None
        return owner.get_submodule(str(node.target))
    return node.meta.get("val")


def parse_symbols(names: Mapping[str, tuple[int, int | None, int]]) -> list[Symbol]:
    """The table of a dump as symbols."""
    return [Symbol(name, low, high, example) for name, (low, high, example) in names.items()]
