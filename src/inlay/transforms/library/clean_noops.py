"""Remove calls that return their operand unchanged.

x[:, 0:9223372036854775807], x - 0, x * 1.0, x.to(x.dtype), x.transpose(1, 2).transpose(1, 2)        x

Adding 0 to floating-point numbers is not removed, because -0.0 + 0 is 0.0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import has_same_type, is_copy_observable, is_view
from inlay.rewrite import Match
from inlay.transforms.base import Case, LocalTransform, Numerics, Stage, transform

if TYPE_CHECKING:
    from inlay.rewrite import Rewriter

aten = torch.ops.aten
_END = 9223372036854775807


@transform("clean_noops", stage=Stage.CLEAN, numerics=Numerics.EXACT)
class CleanNoops(LocalTransform):
    """Remove calls without effect: full slices, subtraction of 0, multiplication by 1, casts to the same dtype."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        x = torch.randn(2, 3, 8)
        return [
            Case("whole slice", lambda x: aten.slice.Tensor(x, 1, 0, _END).relu(), (x,)),
            Case("zero and one", lambda x: (x * 1.0 - 0).relu() / 1, (x,)),
            Case("whole numbers", lambda x: (x + 0) * 2 - 0, (torch.arange(4),)),
            Case("there and back", lambda x: x.transpose(1, 2).transpose(1, 2).relu(), (x,)),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x = torch.randn(2, 3, 8)
        return [
            Case("part of an axis", lambda x: x[:, :2].relu(), (x,)),
            Case("every second", lambda x: x[:, ::2].relu(), (x,)),
            Case("one is added", lambda x: (x + 1) * 2.0, (x,)),
            Case("zero is added, which has no sign", lambda x: 1 / (x + 0), (x,)),
            Case("minus zero is taken away", lambda x: 1 / (x - -0.0), (x,)),
            Case("a number is the first operand", lambda x: aten.mul.Tensor(1.0, x).relu(), (x,)),
            Case("complex numbers", lambda x: (x * 1 + 0) / 1 * 2, (torch.view_as_complex(torch.randn(4, 2)),)),
            Case("a complex zero", lambda x: (x + 0j).abs(), (x,)),
            Case("addition widens", lambda x: x + 0.0, (torch.arange(4),)),
            Case("two different transposes", lambda x: x.transpose(1, 2).transpose(0, 1).relu(), (x,)),
            Case("a copy in another layout", lambda x: (x.expand(4, 2, 3, 8) * 1).sigmoid(), (x,)),
            Case("a real cast", lambda x: x.to(torch.float64), (x,)),
            Case("a copy is returned", lambda x: x + 0, (x,)),
            Case("a view of a copy is returned", lambda x: (x * 1).transpose(0, 1), (x,)),
        ]

    def match(self, node: fx.Node) -> Match | None:
        source = _passthrough_operand(node)
        if source is None or not has_same_type(node, source) or _is_observable(node, source):
            return None
        return Match.at(node, source=source)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        operands = match.root.all_input_nodes
        rewriter.replace(match.root, match.values["source"])
        rewriter.erase(match.root)
        rewriter.erase_unused(*(node for node in operands if node.target is aten.transpose.int))


def _passthrough_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand that a call returns unchanged, or None."""
    given: dict[str, Any] = dict(normalize_args(node))
    source = given.get("self")
    if not isinstance(source, fx.Node):  # the first operand may be a number
        return None
    match node.target:
        case aten.slice.Tensor:
            whole = given["start"] in (0, None) and given["end"] in (_END, None) and given["step"] == 1
            return source if whole else None
        case aten.add.Tensor | aten.sub.Tensor | aten.mul.Tensor | aten.div.Tensor:
            return source if _is_identity_arithmetic(node, given) else None
        case aten._to_copy.default:
            only_dtype = all(given[key] is None for key in given if key not in ("self", "dtype", "non_blocking"))
            return source if only_dtype else None
        case aten.transpose.int:
            inner = dict(normalize_args(source)) if source.target is aten.transpose.int else {}
            same = inner and {inner["dim0"], inner["dim1"]} == {given["dim0"], given["dim1"]}
            return inner["self"] if same else None
    return None


def _is_identity_arithmetic(node: fx.Node, given: dict[str, Any]) -> bool:
    """Return whether arithmetic returns its operand exactly, including signed zeros and non-finite values."""
    value, number, alpha = given["self"].meta.get("val"), given["other"], given.get("alpha", 1)
    if type(number) not in (int, float) or alpha != 1 or not isinstance(value, torch.Tensor) or value.is_complex():
        return False
    if number != (1 if node.target in (aten.mul.Tensor, aten.div.Tensor) else 0):
        return False
    minus_zero = math.copysign(1.0, number) < 0
    return number == 1 or not value.is_floating_point() or minus_zero == (node.target is aten.add.Tensor)


def _is_observable(node: fx.Node, source: fx.Node) -> bool:
    """Return whether removing a call can be observed. A full view is kept if removing it would make an input an
    output."""
    if is_view(node):
        return source.op == "placeholder" and any(user.op == "output" for user in node.users)
    return is_copy_observable(node)
