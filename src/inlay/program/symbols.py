"""Adapter: symbolic sizes and fake values for programs that do not come from torch.export.

The only file that imports torch's symbolic-shape modules. Used by the parser of dumps and by code that builds graphs
directly.

Tested on torch 2.13 to 2.15.
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
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols, statically_known_true

from inlay.errors import ProgramError, one_line
from inlay.program.size_specialization import size_oblivious

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from inlay.program.program import Symbol

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
    """Allow every operator to run on fake tensors with symbolic sizes, including sizes that may be 1.

    Operators that fail raise, and torch does not log an additional traceback.
    """
    token = _QUIET.set(True)
    try:
        with size_oblivious(), enable_python_dispatcher():
            yield
    finally:
        _QUIET.reset(token)


def evaluate(text: str, lookup: Callable[[str], Any]) -> Any:
    """Return the value of an expression of integers and names; anything else raises KeyError.

    >>> evaluate("128*batch*length + 2", {"batch": 2, "length": 1}.__getitem__)
    258
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return lookup(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](value(left), value(right))
        raise KeyError(text)

    return value(ast.parse(text, mode="eval").body)


def is_statically_true(condition: Any) -> bool:
    """Whether a condition on sizes holds for all sizes; no guard is added."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def is_data_dependent(size: Any) -> bool:
    """Whether a size is computed from tensor values at run time."""
    return bool(free_unbacked_symbols(size))


def is_same_size(one: Any, two: Any) -> bool:
    """Whether two sizes are equal for all values of the symbols. Data-dependent sizes equal any size.

    No guard is added.
    """
    if isinstance(one, int) and isinstance(two, int):
        return one == two
    if str(one) == str(two) or is_data_dependent((one, two)):
        return True
    return is_statically_true(one == two)


def fixed_symbols(graph: fx.Graph) -> dict[str, str]:
    """Return the raw symbols of a graph that were specialized to a number or to another symbol."""
    values = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    env = next((value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor)), None)
    return {str(symbol): str(value) for symbol, value in env.replacements.items()} if env is not None else {}


class FakeValues:
    """Creates fake tensors whose sizes are named symbols, and computes the fake values of graph nodes."""

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
        """Reuse the fake mode of a graph's placeholders, so that their symbols are kept."""
        return cls.from_values(node.meta.get("val") for node in graph.nodes if node.op == "placeholder")

    @classmethod
    def from_values(cls, values: Iterable[Any]) -> FakeValues:
        """Reuse the fake mode of these values."""
        made = cls([])
        made.mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), made.mode)
        return made

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make torch compute with fake values and symbolic sizes in this context."""
        with enable_python_dispatcher(), self.mode:
            yield

    @contextmanager
    def forbid_guards(self) -> Iterator[None]:
        """Make calls that would add a guard on a size raise in this context."""
        env = self.mode.shape_env
        assert env is not None
        with symbolic_sizes(), self.mode, env.error_on_new_guards():
            yield

    def tensor(self, dtype: torch.dtype, shape: Sequence[int | str]) -> torch.Tensor:
        """Return a fake tensor with this dtype and shape; sizes are numbers, symbols or expressions of symbols."""
        sizes = [self.size(size) for size in shape]
        with self.mode:
            return torch.empty(sizes, dtype=dtype)

    def size(self, size: int | str) -> Any:
        """Return a size as an int or SymInt."""
        if isinstance(size, int):
            return size
        try:
            return evaluate(size, self._sizes.__getitem__)
        except (SyntaxError, KeyError) as error:
            raise ProgramError(f"The size {size} is not an expression of the symbols of the program.") from error

    def propagate(self, graph: fx.Graph, inputs: Sequence[Any]) -> Any:
        """Set `meta["val"]` on every node of `graph` and its nested graphs; return the values of the outputs."""
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
        """Return the fake value of a call, computed from the values of its operands."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _node_value)
        self._propagate_nested(args)
        target: Any = node.target
        try:
            with symbolic_sizes(), self.mode, torch.no_grad():  # allows in-place writes to parameters
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
