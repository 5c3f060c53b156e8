"""Adapter: the result of `ExportedProgram.run_decompositions({})` without its fixed cost.

The only file that imports torch.export's tables of composite operators. An empty table means
that composite operators are preserved. torch then registers all of them, about a thousand, at every call, which takes
longer than tracing a small program. Only the operators that a program calls matter, unless it calls an operator that
decomposes into composite operators. Such programs, and all programs on a torch with other tables, use the public API.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from inlay.program.graphs import all_nodes

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ATEN = torch.ops.aten
ALWAYS_DECOMPOSED: frozenset[Any] = frozenset(
    {
        *(_ATEN.to.dtype, _ATEN.to.device, _ATEN.to.dtype_layout, _ATEN.to.other),
        *(_ATEN.contiguous.default, _ATEN.reshape.default, _ATEN.flatten.using_ints, _ATEN.unflatten.int),
        *(_ATEN.view_as.default, _ATEN.expand_as.default, _ATEN.movedim.int, _ATEN.movedim.intlist),
        *(_ATEN.sym_size.int, _ATEN.sym_numel.default),
        *(_ATEN.chunk.default, _ATEN.narrow.default, _ATEN.dropout.default, _ATEN.numpy_T.default),
    }
)
"""Composite operators that torch always decomposes, because their results may be views. None of their parts is a
composite operator that could be preserved (tests/program/test_decomposition.py)."""


def _type_as(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return value.to(other.dtype) if value.device == other.device else value.to(other)


SYNONYMS: dict[Any, Any] = {_ATEN.type_as.default: _type_as}
"""Composite operators that torch may preserve, although another one means the same; and their decompositions."""

_EXPECTED_PARAMETERS = {"ep", "cia_to_decomp", "python_decomp_table", "joint_loss_index", "decompose_custom_triton_ops"}
"""Expected parameters of `_decompose_exported_program`."""


def decompose(exported: ExportedProgram) -> ExportedProgram:
    """Make a program functional. Composite operators are preserved, except those that may return views."""
    called = {node.target for node in all_nodes(exported.graph) if node.op == "call_function"}
    tables = _load_torch_internals()
    if tables is None or not all(map(_is_known, called)):
        whole: ExportedProgram = exported.run_decompositions(dict(SYNONYMS))
        return whole
    preserve, decomposed = tables
    made: ExportedProgram = decomposed(
        exported,
        cia_to_decomp=dict.fromkeys(filter(_is_preserved, called - SYNONYMS.keys()), preserve),
        python_decomp_table=dict(SYNONYMS),
        joint_loss_index=None,
        decompose_custom_triton_ops=False,
    )
    return made


def _is_known(target: Any) -> bool:
    """Whether the decomposition of a call is known."""
    if not isinstance(target, torch._ops.OpOverload):
        return not isinstance(target, torch._ops.OperatorBase)  # a higher-order operator has nested graphs
    if target._schema.is_mutable:
        packet = getattr(torch.ops, target.namespace), target._schema.name.partition("::")[2].removesuffix("_")
        functional = getattr(getattr(*packet, None), target._overloadname, target)
        return not _is_composite(target) and not _is_composite(functional)
    return target in ALWAYS_DECOMPOSED or not _is_composite(target) or _is_preserved(target)


def _is_composite(target: torch._ops.OpOverload) -> bool:
    from torch._export.utils import _is_cia_op

    return bool(_is_cia_op(target))


def _is_preserved(target: Any) -> bool:
    from torch._export.utils import _is_preservable_cia_op

    return isinstance(target, torch._ops.OpOverload) and bool(_is_preservable_cia_op(target))


@cache
def _load_torch_internals() -> tuple[Any, Any] | None:
    """Return torch's marker for preserved operators and its decomposition function; None if this torch differs."""
    try:
        from torch._export.utils import (  # noqa: F401 - all of them must exist
            _is_cia_op,
            _is_preservable_cia_op,
            _special_op_to_preserve_cia,
        )
        from torch.export.exported_program import _decompose_exported_program
    except ImportError:
        return None
    takes = set(inspect.signature(_decompose_exported_program).parameters)
    if takes != _EXPECTED_PARAMETERS:
        return None
    return _special_op_to_preserve_cia, _decompose_exported_program
