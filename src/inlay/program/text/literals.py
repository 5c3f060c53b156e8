"""Conversion of values and operators to Python source and back.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import ast
import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import ProgramError, suggest
from inlay.program.graphs import target_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inlay.program.bindings import Binding


_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


def literal(value: Any, name: Callable[[fx.Node], str] = lambda node: node.name) -> str:
    """Return Python source for an argument of a node; `name` returns the names of nodes.

    >>> literal([1, 2.0, None, torch.float32, torch.device("cpu"), float("inf"), slice(0, 2)])
    "[1, 2.0, None, torch.float32, torch.device('cpu'), inf, slice(0, 2, None)]"
    """
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, _TORCH_VALUES):
        return str(value)
    if isinstance(value, torch._ops.OpOverload):
        return target_text(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else ("inf" if value > 0 else "-inf")
    if value is None or value is Ellipsis or isinstance(value, (bool, int, float, complex, str)):
        return repr(value) if value is not Ellipsis else "..."
    if isinstance(value, slice):
        return f"slice({', '.join(literal(part, name) for part in (value.start, value.stop, value.step))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {literal(item, name)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(literal(item, name) for item in value) + "]"
    if isinstance(value, tuple):
        inside = ", ".join(literal(item, name) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    raise ProgramError(f"A program contains {value!r}, a {type(value).__name__}, which has no text form.")


def parse_literal(node: ast.expr, names: Callable[[str], Any]) -> Any:
    """Return the value of Python source from `literal`. Nothing is executed.

    >>> parse_literal(ast.parse("(1, -inf, [torch.bool], x)", mode="eval").body, {"x": "node x"}.__getitem__)
    (1, -inf, [torch.bool], 'node x')
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name(id="nan"):
            return math.nan
        case ast.Name(id=name):
            return names(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -parse_literal(operand, names)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):  # a complex number
            real, imaginary = parse_literal(left, names), parse_literal(right, names)
            return real + imaginary if isinstance(op, ast.Add) else real - imaginary
        case ast.List(elts=items):
            return [parse_literal(item, names) for item in items]
        case ast.Tuple(elts=items):
            return tuple(parse_literal(item, names) for item in items)
        case ast.Dict(keys=keys, values=values):
            return {
                parse_literal(key, names): parse_literal(value, names)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case ast.Attribute(value=ast.Name(id="torch"), attr=attribute):
            found = getattr(torch, attribute, None)
            if isinstance(found, _TORCH_VALUES):
                return found
        case ast.Attribute(value=ast.Attribute(value=ast.Name())):
            return find_target(ast.unparse(node))
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="torch"), attr="device"), args=[ast.Constant(value=str(text))]
        ):
            return torch.device(text)
        case ast.Call(func=ast.Name(id="slice"), args=parts):
            return slice(*(parse_literal(part, names) for part in parts))
    raise ProgramError(f"Line {node.lineno}: {ast.unparse(node)} is not part of the text form of programs.")


def namespace(target: Any) -> str:
    """Return the first name of an operator's text form, which a dump must bind or import."""
    return target_text(target).partition(".")[0]


def registering_module(target: Any) -> str:
    """Return the module whose import registers a custom operator; empty for operators of torch and if unknown."""
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(f"{target.namespace}::{target._opname}")
    return definition._init_fn.__module__ if definition is not None else ""


_FUNCTIONS = {
    "operator": {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "invert"}
    | {"and_", "or_", "xor", "lshift", "rshift", "eq", "ne", "lt", "le", "gt", "ge", "not_", "truth", "getitem"},
    "math": {"ceil", "floor", "trunc", "sqrt", "log", "log2", "exp", "pow"},
    "builtins": {"abs", "bool", "float", "int", "max", "min", "round", "pow"},
    "torch": {name for name in dir(torch) if name.startswith(("sym_", "_sym_"))},
}
"""The Python functions that a program may call. Dumps are untrusted, and reading one calls them to compute types."""
_FORBIDDEN_OPERATORS = {"from_file"}
"""Operators of torch that access the file system."""


def find_target(text: str) -> Any:
    """Return the operator or function that `target_text` printed as `text`.

    >>> find_target("aten.mul.Tensor")
    <OpOverload(op='aten.mul', overload='Tensor')>
    """
    first, *rest = text.split(".")
    found: Any = None
    if first == "higher_order" and len(rest) == 1:
        found = getattr(torch.ops.higher_order, rest[0], None)
        found = found if isinstance(found, torch._ops.HigherOrderOperator) else None
    elif first in _FUNCTIONS:
        if len(rest) == 1 and rest[0] in _FUNCTIONS[first]:
            found = getattr(importlib.import_module(first), rest[0])
    elif len(rest) == 2 and rest[0] not in _FORBIDDEN_OPERATORS:
        found = _overload(first, *rest)
    if found is None:
        raise ProgramError(
            f"{text} is not an operator that a program may call.",
            "If a Python package registers it, import that package before reading the program.",
        )
    return found


def _overload(space: str, name: str, overload: str) -> Any:
    """Return an operator, or None for other attributes: some of torch.ops load libraries and import modules."""
    holder = getattr(torch.ops, space)
    packet = getattr(holder, name, None) if isinstance(holder, torch._ops._OpNamespace) else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    known: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    if overload not in known:
        raise ProgramError(f"{space}.{name} has no overload {overload}.", suggest(overload, known))
    return getattr(packet, overload)


def attribute_path(parts: Sequence[str]) -> str:
    """Return Python source for a path of attributes and indices.

    >>> attribute_path(["layers", "3", "mlp"])
    '.layers[3].mlp'
    """
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


def path_text(root: str, row: Binding) -> str:
    """Return the target of a binding as an attribute of `root`."""
    return root + attribute_path(row.target.split("."))


@dataclass(frozen=True)
class Owner:
    """The module that contains all weights of one occurrence of a block."""

    parts: tuple[str, ...]
    root: str = "model"

    @property
    def text(self) -> str:
        """The module as an attribute of the root."""
        return self.root + attribute_path(self.parts)

    @property
    def list_path(self) -> str:
        """The module list that contains the module, or an empty string."""
        return self.root + attribute_path(self.parts[:-1]) if self.parts[-1].isdigit() else ""

    @property
    def number(self) -> int:
        """Its index in that list."""
        return int(self.parts[-1])

    def relative_path(self, name: str, row: Binding) -> str:
        """Return the path of a weight relative to this module."""
        return name + attribute_path(row.target.split(".")[len(self.parts) :])


def find_owners(rows: Sequence[Sequence[Binding]], root: str = "model") -> list[Owner]:
    """Return the deepest module with all weights of each occurrence; empty if there is none.

    All occurrences must use the same names within their module, because a block names its weights once.
    """
    if not rows or not rows[0]:
        return []
    owners = [Owner(_shared_parts([row.target.split(".")[:-1] for row in each]), root) for each in rows]
    insides = {tuple(owner.relative_path("w", row) for row in each) for owner, each in zip(owners, rows, strict=True)}
    distinct = len({owner.parts for owner in owners}) == len(owners)
    return owners if len(insides) == 1 and distinct and all(owner.parts for owner in owners) else []


def _shared_parts(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return tuple(shared)
