"""Format a region as one line of Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.insight.candidates.op_kinds import op_name
from inlay.program.text.expressions import Expression, express

if TYPE_CHECKING:
    from torch import fx

    from inlay.insight.candidates.region import FusionRegion

_WIDEST = 200


def format_pattern(region: FusionRegion) -> str:
    """Return a region as an expression of inputs x, y, z and weights w, or as operator names if that is too long."""
    names = argument_names(region)
    inside = set(region.nodes)

    def operand(node: fx.Node) -> Expression:
        return express(node, operand) if node in inside else Expression(names.get(node, node.name))

    if len(region.nodes) <= 24:
        text = "; ".join(operand(node).text for node in region.outputs).replace("aten.", "")
        if len(text) <= _WIDEST:
            return text
    return " → ".join(op_name(node) for node in region.kernels)


def argument_names(region: FusionRegion) -> dict[fx.Node, str]:
    """Return names for the inputs of a region: x, y, z, x3, … and weights w, w1, …"""
    names: dict[fx.Node, str] = {}
    plain = weights = 0
    for node in region.inputs:
        if node.op == "placeholder" and node.name.startswith(("p_", "b_", "c_")):
            names[node] = f"w{weights or ''}"
            weights += 1
        else:
            names[node] = "xyz"[plain] if plain < 3 else f"x{plain}"
            plain += 1
    return names
