"""What a mask means: decided by computing it, where that decides it.

A mask built from positions alone (aranges, constants, comparisons, logic) is a function of row and column in which only
comparisons of `row`, `column`, `row - column` with the constants in it matter. Beyond twice the largest constant it has
no new behaviour to show, so computing it up to there settles what it is. Anything else about it, an operator not listed
or a value from outside, and the answer is: unknown, leave it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.program.graphs import ancestors, written_between

aten = torch.ops.aten
_KNOWN = {
    *(aten.arange.default, aten.arange.start, aten.unsqueeze.default, aten.expand.default, aten.slice.Tensor),
    *(aten.add.Tensor, aten.sub.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor),
    *(aten.eq.Tensor, aten.ne.Scalar, aten.__and__.Tensor, aten.__or__.Tensor, aten.bitwise_and.Tensor),
    *(aten.new_ones.default, aten.ones.default, aten.zeros.default, aten.full.default, aten.view.default),
    *(aten.index.Tensor, aten.diff.default, aten.cumsum.default, aten.where.ScalarOther, aten.where.self),
    *(
        aten.where.ScalarSelf,
        aten._to_copy.default,
        aten.clone.default,
        aten.sym_size.int,
        aten.lift_fresh_copy.default,
    ),
}
_LARGEST = 2048
_END = 9223372036854775807


@dataclass(frozen=True)
class Meaning:
    """What a mask hides: later positions, and those `window` steps back or more when it is not 0; or why not known."""

    causal: bool
    window: int = 0
    reason: str = ""


def meaning(mask: fx.Node, reader: fx.Node) -> Meaning:
    """Decide what `mask`, a `[batch, 1, rows, columns]` tensor that `reader` is about to read, hides."""
    calls = [node for node in ancestors(mask, past_sizes=False) if node.op == "call_function"]
    if calls and written_between(calls[0], reader) is not None:
        return Meaning(False, reason="something is written in place while the mask is made")
    values = _values(mask, str(mask.meta["val"].shape[-2]))
    return _compare(values) if isinstance(values, torch.Tensor) else Meaning(False, reason=values)


def counts_up(node: fx.Node) -> bool:
    """Is this 0, 1, 2, … along its last axis, whatever its length, and has it no other axis?"""
    values = _values(node, str(node.meta["val"].shape[-1]))
    if not isinstance(values, torch.Tensor):
        return False
    return torch.equal(values.flatten(), torch.arange(values.shape[-1]))


def _values(mask: fx.Node, length: str) -> torch.Tensor | str:
    """What a function of positions is, computed as far as it can have anything new to show; or why it cannot be."""
    needed = ancestors(mask, past_sizes=False)
    constants = [0]
    for node in needed:
        if node.op == "placeholder":
            if node is mask or any(user.target is not aten.sym_size.int for user in node.users if user in needed):
                return f"the mask depends on the values of {node}"
        elif node.op != "call_function" or not _is_about_positions(node):
            return f"the mask is computed with {node.target}, which is not about positions"
        else:
            numbers = [value for value in tree_leaves((node.args, dict(node.kwargs))) if type(value) is int]
            constants += [abs(value) for value in numbers if value != _END]
    largest = max(constants)
    if largest > _LARGEST:
        return f"the mask holds the constant {largest}, too large to compute it past twice that"
    values = _compute(needed, mask, length, 2 * largest + 8)
    return "the mask cannot be computed from sizes alone" if values is None else values


def _is_about_positions(node: fx.Node) -> bool:
    return node.target in _KNOWN or isinstance(node.meta.get("val"), torch.SymInt)


def _compute(needed: list[fx.Node], mask: fx.Node, symbol: str, length: int) -> torch.Tensor | None:
    """The mask for a batch of one and this many positions; `symbol` is what their number is called."""
    values: dict[fx.Node, Any] = {}
    for node in needed:
        if node.op == "placeholder":
            continue
        if node.target is aten.sym_size.int:
            values[node] = length if str(node.meta["val"]) == symbol else 1
            continue
        try:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:
            return None
        if node.target is aten.cumsum.default and bool(values[node].any()):
            return None  # a sum over positions grows with them: no bound on where it changes
    result = values[mask]
    return result if isinstance(result, torch.Tensor) else None


def _compare(values: torch.Tensor) -> Meaning:
    if values.dim() != 4 or values.shape[0] != 1 or values.shape[1] != 1 or values.shape[2] != values.shape[3]:
        return Meaning(
            False, reason=f"the mask has shape {list(values.shape)} where one head of one sequence was expected"
        )
    seen = values[0, 0]
    if seen.dtype != torch.bool:
        hidden = torch.finfo(seen.dtype).min
        if not bool(((seen == 0) | (seen == hidden) | (seen == float("-inf"))).all()):
            return Meaning(False, reason="the mask adds values that neither show nor hide")
        seen = seen == 0
    length = seen.shape[0]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
    if torch.equal(seen, columns <= rows):
        return Meaning(True)
    window = int(seen[-1].sum())
    if torch.equal(seen, (columns <= rows) & (columns > rows - window)):
        return Meaning(True, window)
    return Meaning(False, reason="the mask hides something else than later positions or a window")
