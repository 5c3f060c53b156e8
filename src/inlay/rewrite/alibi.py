"""Is a value added to scores ALiBi: for each head a slope times the position of the key?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.graphs import sizes

if TYPE_CHECKING:
    from inlay.rewrite.masks import Masks

aten = torch.ops.aten
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def slopes(bias: fx.Node, masks: Masks, reader: fx.Node) -> fx.Node | None:
    """What `bias`, `[batch, heads, 1, keys]`, multiplies the positions of the keys with, `[heads, 1, 1]`; if it does.

    The chain is view(to(repeat(slopes * positions, [batch, 1, 1]))), the cast optional, every shape checked.
    """
    wanted = _shape(bias)
    if bias.target not in _RESHAPES or len(wanted) != 4 or wanted[2] != "1":
        return None
    at: Any = bias.args[0]
    if at.target is aten._to_copy.default:
        at = at.args[0]
    batch, heads, _, keys = bias.meta["val"].shape
    if at.target is not aten.repeat.default or _shape(at) != [str(batch * heads), "1", str(keys)]:
        return None
    product, times = at.args
    if len(times) != 3 or list(times[1:]) != [1, 1] or product.target is not aten.mul.Tensor:
        return None
    if _shape(product) != [str(heads), "1", str(keys)]:
        return None
    for factor, positions in (product.args, tuple(reversed(product.args))):
        if isinstance(factor, fx.Node) and isinstance(positions, fx.Node):
            one_a_head = _shape(factor) == [str(heads), "1", "1"]
            one_a_key = _shape(positions)[-1:] == [str(keys)] and set(_shape(positions)[:-1]) <= {"1"}
            if one_a_head and one_a_key and masks.counts_up(positions, reader):
                return factor
    return None


def _shape(node: fx.Node) -> list[str]:
    return sizes(node.meta["val"])
