"""Kinds of calls: whether a call launches a kernel, and what it can be fused with."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.graphs import is_mutation, is_view, operands, target_text
from inlay.transforms.base import Numerics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import fx

_ATEN: Any = torch.ops.aten
_INLAY: Any = torch.ops.inlay


class OpKind(StrEnum):
    """Kinds of calls, by what they can be fused with."""

    POINTWISE = "pointwise"
    ROTATION = "rotation"
    """Combines each element with another element of its row."""
    REDUCTION = "reduction"
    STENCIL = "stencil"
    """A depthwise convolution: each element depends on a few neighbors."""
    COPY = "copy"
    """Moves data without arithmetic."""
    VIEW = "view"
    """Costs nothing."""
    GEMM = "gemm"
    ATTENTION = "attention"
    OTHER = "other"


FUSIBLE = frozenset({OpKind.POINTWISE, OpKind.ROTATION, OpKind.REDUCTION, OpKind.STENCIL, OpKind.COPY})
"""Calls that a compiler or a Triton kernel can fuse."""

_BY_TARGET = {
    **dict.fromkeys((_ATEN._to_copy.default, _ATEN.to.dtype), OpKind.POINTWISE),
    **dict.fromkeys((_INLAY.swiglu.default, _INLAY.geglu.default, _INLAY.clamped_swiglu.default), OpKind.POINTWISE),
    **dict.fromkeys((_INLAY.rope.default, _INLAY.rope_interleaved.default), OpKind.ROTATION),
    **dict.fromkeys((_INLAY.rms_norm.default, _INLAY.add_rms_norm.default), OpKind.REDUCTION),
    **dict.fromkeys((_ATEN.softmax.int, _ATEN._softmax.default, _ATEN.logsumexp.default), OpKind.REDUCTION),
    **dict.fromkeys((_ATEN.layer_norm.default, _ATEN.rms_norm.default), OpKind.REDUCTION),
    **dict.fromkeys((_ATEN.clone.default, _ATEN.contiguous.default, _ATEN.cat.default), OpKind.COPY),
    **dict.fromkeys((_ATEN.stack.default, _ATEN.repeat.default, _ATEN.repeat_interleave.self_int), OpKind.COPY),
    **dict.fromkeys((_ATEN.constant_pad_nd.default, _ATEN.roll.default, _ATEN.flip.default), OpKind.COPY),
    **dict.fromkeys((_ATEN.linear.default, _ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default), OpKind.GEMM),
    **dict.fromkeys((_ATEN.matmul.default, _ATEN.baddbmm.default), OpKind.GEMM),
    **dict.fromkeys((_INLAY.attention.default, _INLAY.cached_attention.default), OpKind.ATTENTION),
    _ATEN.scaled_dot_product_attention.default: OpKind.ATTENTION,
    _INLAY.gated_short_conv.default: OpKind.STENCIL,
}
_TRANSCENDENTAL = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "celu", "clamped_swiglu", "cos", "cosh", "digamma"),
    *("elu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "float_power", "geglu", "gelu", "lgamma", "log", "log10"),
    *("log1p", "log2", "log_softmax", "logaddexp", "logaddexp2", "logit", "logsumexp", "mish", "pow", "selu"),
    *("sigmoid", "silu", "sin", "sinc", "sinh", "softmax", "softplus", "swiglu", "tan", "tanh", "xlogy"),
)
_CONVOLUTIONS = {_ATEN.conv1d.default, _ATEN.conv2d.default}


def op_kind(node: fx.Node) -> OpKind:
    """Return the kind of a call.

    >>> from torch import fx
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.ones(2, 2)
    >>> relu = graph.call_function(torch.ops.aten.relu.default, (x,))
    >>> relu.meta["val"] = torch.ones(2, 2)
    >>> str(op_kind(relu)), str(op_kind(x))
    ('pointwise', 'other')
    """
    if node.op != "call_function" or not _is_tensor(node.meta.get("val")) or is_mutation(node):
        return OpKind.OTHER
    if node.target in _BY_TARGET:
        return _BY_TARGET[node.target]
    if node.target in _CONVOLUTIONS:
        return OpKind.STENCIL if _is_depthwise(node) else OpKind.GEMM
    if is_view(node):
        return OpKind.VIEW
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags:
        return OpKind.POINTWISE
    return OpKind.REDUCTION if torch.Tag.reduction in tags else OpKind.OTHER


def is_kernel(node: fx.Node) -> bool:
    """Return whether a call launches a kernel when it runs unfused."""
    return op_kind(node) not in (OpKind.VIEW, OpKind.OTHER)


def op_name(node: fx.Node) -> str:
    """Return the name of an operator without namespace and overload.

    >>> from torch import fx
    >>> op_name(fx.Graph().call_function(torch.ops.aten.mul.Tensor, (1, 2)))
    'mul'
    """
    return target_text(node.target).split(".")[1].strip("_")


def numerical_risk(nodes: Iterable[fx.Node]) -> Numerics:
    """Return what one kernel instead of these calls can change in the results.

    `approximate`: a transcendental function, which libraries approximate differently. `rounding`: a sum, whose order
    can change, or a change of dtype, which a kernel can omit. `exact`: only copies and elementwise arithmetic.
    """
    risk = Numerics.EXACT
    for node in nodes:
        is_product = op_name(node) == "pow" and len(node.args) > 1 and node.args[1] in (2, 3)
        if op_kind(node) is OpKind.ATTENTION or (op_name(node) in _TRANSCENDENTAL and not is_product):
            return Numerics.APPROXIMATE
        values = [each.meta.get("val") for each in (node, *operands(node))]
        dtypes = {each.dtype for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()}
        if op_kind(node) in (OpKind.REDUCTION, OpKind.STENCIL, OpKind.GEMM) or len(dtypes) > 1:
            risk = Numerics.ROUNDING
    return risk


def _is_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, torch.Tensor)


def _is_depthwise(node: fx.Node) -> bool:
    weight: Any = node.args[1]
    shape = weight.meta["val"].shape
    groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    return bool(groups == shape[0] and shape[1] == 1 and groups != 1)
