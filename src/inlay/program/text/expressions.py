"""Nodes as readable Python expressions: infix operators, method chains, indexing.

`x * aten.rsqrt((x ** 2).mean([-1], True) + 1e-05)` is equivalent to six statements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.graphs import target_text
from inlay.program.text.literals import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ATOM = 9
_POSTFIX = 8
_MAX_INT64 = 9223372036854775807


@dataclass(frozen=True)
class Expression:
    """An expression and its precedence, from 0 for a comparison to 9 for an atom."""

    text: str
    precedence: int = _ATOM

    def parenthesize(self, level: int) -> str:
        """Return the expression as an operand of an operator with precedence `level`."""
        return self.text if self.precedence >= level else f"({self.text})"


_INFIX = {
    "aten.add.Tensor": ("+", 3),
    "aten.sub.Tensor": ("-", 3),
    "aten.mul.Tensor": ("*", 4),
    "aten.div.Tensor": ("/", 4),
    "aten.matmul.default": ("@", 4),
    "aten.pow.Tensor_Scalar": ("**", 6),
    "aten.le.Tensor": ("<=", 0),
    "aten.lt.Tensor": ("<", 0),
    "aten.ge.Tensor": (">=", 0),
    "aten.gt.Tensor": (">", 0),
    "aten.eq.Tensor": ("==", 0),
    "aten.ne.Scalar": ("!=", 0),
    "aten.gt.Scalar": (">", 0),
    "aten.lt.Scalar": ("<", 0),
    "aten.eq.Scalar": ("==", 0),
    "aten.__and__.Tensor": ("&", 2),
    "aten.__or__.Tensor": ("|", 1),
    "aten.bitwise_and.Tensor": ("&", 2),
    "operator.add": ("+", 3),
    "operator.sub": ("-", 3),
    "operator.mul": ("*", 4),
    "operator.floordiv": ("//", 4),
}
_METHODS = {
    "aten.view.default": "view",
    "aten.reshape.default": "reshape",
    "aten._unsafe_view.default": "view",
    "aten.transpose.int": "transpose",
    "aten.permute.default": "permute",
    "aten.unsqueeze.default": "unsqueeze",
    "aten.squeeze.dim": "squeeze",
    "aten.expand.default": "expand",
    "aten.clone.default": "clone",
    "aten.mean.dim": "mean",
    "aten.sum.dim_IntList": "sum",
    "aten.cumsum.default": "cumsum",
    "aten.softmax.int": "softmax",
}
_VARIADIC_METHODS = {"view", "reshape", "permute", "expand"}
"""Methods whose list of sizes is printed without brackets."""


def express(node: fx.Node, operand: Callable[[fx.Node], Expression]) -> Expression:
    """Return a node as an expression of its operands' expressions."""
    name = target_text(node.target)
    args, kwargs = node.args, node.kwargs

    def postfix(suffix: str) -> Expression:
        return Expression(_express_argument(args[0], operand).parenthesize(_POSTFIX) + suffix, _POSTFIX)

    if name in _INFIX and len(args) == 2 and not kwargs:
        sign, level = _INFIX[name]
        left, right = (_express_argument(arg, operand) for arg in args)
        # `**` is right-associative, all others are left-associative.
        # Comparisons would chain: `a < b == c` is not `(a < b) == c`.
        before, after = (level + 1, level) if sign == "**" else (level, level + 1) if level else (1, 1)
        return Expression(f"{left.parenthesize(before)} {sign} {right.parenthesize(after)}", level)
    if name == "aten.neg.default":
        return Expression(f"-{_express_argument(args[0], operand).parenthesize(5)}", 5)
    if name == "operator.getitem":
        return postfix(f"[{_express_argument(args[1], operand).text}]")
    if name == "aten.sym_size.int":
        return postfix(f".shape[{args[1]}]")
    if name == "aten.slice.Tensor" and len(args) >= 3 and not kwargs:
        return postfix(_slice(args, operand))
    if name == "aten._to_copy.default" and list(kwargs) == ["dtype"]:
        return postfix(f".to({literal(kwargs['dtype'])})")
    if name in _METHODS:
        method = _METHODS[name]
        rest = args[1:]
        if method in _VARIADIC_METHODS and len(rest) == 1 and isinstance(rest[0], (list, tuple)) and rest[0]:
            rest = tuple(rest[0])
        return postfix(f".{method}({_arguments(rest, kwargs, operand)})")
    return Expression(f"{_callee(node)}({_arguments(args, kwargs, operand)})", _POSTFIX)


def _callee(node: fx.Node) -> str:
    name = target_text(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        return name.rpartition(".")[0]
    return name


def _express_argument(arg: Any, operand: Callable[[fx.Node], Expression]) -> Expression:
    if isinstance(arg, fx.Node):
        return operand(arg)
    text = literal(arg, lambda node: operand(node).text)
    return Expression(text, 5 if text.startswith("-") else _ATOM)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], operand: Callable[[fx.Node], Expression]) -> str:
    parts = [_express_argument(arg, operand).text for arg in args]
    parts += [f"{key}={_express_argument(value, operand).text}" for key, value in kwargs.items()]
    return ", ".join(parts)


def _slice(args: tuple[Any, ...], operand: Callable[[fx.Node], Expression]) -> str:
    source = args[0].meta.get("val") if isinstance(args[0], fx.Node) else None
    rank = source.dim() if isinstance(source, torch.Tensor) else None
    dim, start, stop = args[1], args[2], args[3] if len(args) > 3 else None
    begin = "" if start in (0, None) else _express_argument(start, operand).text
    end = "" if stop is None or stop == _MAX_INT64 else _express_argument(stop, operand).text
    step = f":{_express_argument(args[4], operand).text}" if len(args) > 4 and args[4] != 1 else ""
    inside = f"{begin}:{end}{step}"
    if rank is not None and dim in (rank - 1, -1) and rank > 1:
        return f"[..., {inside}]"
    return f"[{':, ' * dim if dim >= 0 else '..., '}{inside}{', :' * (-dim - 1) if dim < -1 else ''}]"
