"""What a call costs: whether it is a kernel of its own, and of which sort."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.graphs import is_view, mutates, target_text

if TYPE_CHECKING:
    from torch import fx

_ATEN: Any = torch.ops.aten
_INLAY: Any = torch.ops.inlay


class Work(StrEnum):
    """Sorts of calls, by what they could be fused with."""

    POINTWISE = "pointwise"
    ROTATION = "rotation"
    """Each number with another one of its row."""
    REDUCTION = "reduction"
    STENCIL = "stencil"
    """A convolution of each channel by itself: a few neighbours a number."""
    COPY = "copy"
    """Moves numbers without computing any."""
    VIEW = "view"
    """Costs nothing."""
    GEMM = "gemm"
    ATTENTION = "attention"
    OTHER = "other"


FUSIBLE = frozenset({Work.POINTWISE, Work.ROTATION, Work.REDUCTION, Work.STENCIL, Work.COPY})
"""Calls that a compiler, or somebody with Triton, can put into one kernel."""

_BY_TARGET = {
    **dict.fromkeys((_ATEN._to_copy.default, _ATEN.to.dtype), Work.POINTWISE),
    **dict.fromkeys((_INLAY.swiglu.default, _INLAY.geglu.default, _INLAY.clamped_swiglu.default), Work.POINTWISE),
    **dict.fromkeys((_INLAY.rope.default, _INLAY.rope_interleaved.default), Work.ROTATION),
    **dict.fromkeys((_INLAY.rms_norm.default, _INLAY.add_rms_norm.default), Work.REDUCTION),
    **dict.fromkeys((_ATEN.softmax.int, _ATEN._softmax.default, _ATEN.logsumexp.default), Work.REDUCTION),
    **dict.fromkeys((_ATEN.layer_norm.default, _ATEN.rms_norm.default), Work.REDUCTION),
    **dict.fromkeys((_ATEN.clone.default, _ATEN.contiguous.default, _ATEN.cat.default), Work.COPY),
    **dict.fromkeys((_ATEN.stack.default, _ATEN.repeat.default, _ATEN.repeat_interleave.self_int), Work.COPY),
    **dict.fromkeys((_ATEN.constant_pad_nd.default, _ATEN.roll.default, _ATEN.flip.default), Work.COPY),
    **dict.fromkeys((_ATEN.linear.default, _ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default), Work.GEMM),
    **dict.fromkeys((_ATEN.matmul.default, _ATEN.baddbmm.default), Work.GEMM),
    **dict.fromkeys((_INLAY.attention.default, _INLAY.cached_attention.default), Work.ATTENTION),
    _ATEN.scaled_dot_product_attention.default: Work.ATTENTION,
    _INLAY.gated_short_conv.default: Work.STENCIL,
}
_CONVOLUTIONS = {_ATEN.conv1d.default, _ATEN.conv2d.default}


def work_of(node: fx.Node) -> Work:
    """The sort of a call.

    >>> from torch import fx
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.ones(2, 2)
    >>> relu = graph.call_function(torch.ops.aten.relu.default, (x,))
    >>> relu.meta["val"] = torch.ones(2, 2)
    >>> str(work_of(relu)), str(work_of(x))
    ('pointwise', 'other')
    """
    if node.op != "call_function" or not _is_tensor(node.meta.get("val")) or mutates(node):
        return Work.OTHER
    if node.target in _BY_TARGET:
        return _BY_TARGET[node.target]
    if node.target in _CONVOLUTIONS:
        return Work.STENCIL if _is_depthwise(node) else Work.GEMM
    if is_view(node):
        return Work.VIEW
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags:
        return Work.POINTWISE
    return Work.REDUCTION if torch.Tag.reduction in tags else Work.OTHER


def is_kernel(node: fx.Node) -> bool:
    """Whether a call starts a kernel when it runs by itself."""
    return work_of(node) not in (Work.VIEW, Work.OTHER)


def short(node: fx.Node) -> str:
    """An operator's bare name.

    >>> from torch import fx
    >>> short(fx.Graph().call_function(torch.ops.aten.mul.Tensor, (1, 2)))
    'mul'
    """
    return target_text(node.target).split(".")[1].strip("_")


def _is_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, torch.Tensor) for each in value)
    return isinstance(value, torch.Tensor)


def _is_depthwise(node: fx.Node) -> bool:
    weight: Any = node.args[1]
    shape = weight.meta["val"].shape
    groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    return bool(groups == shape[0] and shape[1] == 1 and groups != 1)
