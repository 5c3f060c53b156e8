"""What a caller gives a compiled program, held against the table: compiled code reads memory as it was told to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import UsageError
from inlay.program.bindings import Role, tensor_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.program.bindings import Binding
    from inlay.program.program import Program


class Given:
    """The arguments of a program: types are checked, and tensors laid out in memory as they were captured."""

    def __init__(self, program: Program) -> None:
        captured = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
        self.rows = [row for row in program.bindings.of(Role.INPUT) if row.is_tensor]
        self.state = {row.name for row in program.bindings.state}
        self.in_order = {
            row.name for row in self.rows if (value := captured[row.name]) is not None and value.is_contiguous()
        }

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All values, those that need it in another layout."""
        return {**values, **{row.name: self._laid_out(row, values[row.name]) for row in self.rows}}

    def _laid_out(self, row: Binding, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"{row.target} is {row.text}, and a {type(value).__name__} was given.")
        dtype = str(value.dtype).removeprefix("torch.")
        fits = len(value.shape) == len(row.shape) and all(
            isinstance(wanted, str) or wanted == size for wanted, size in zip(row.shape, value.shape, strict=True)
        )
        if dtype != row.dtype or not fits:
            found = tensor_text(dtype, tuple(value.shape))
            raise UsageError(f"{row.target} is {row.text}, and {found} was given.")
        if row.name not in self.in_order or value.is_contiguous():
            return value
        if row.name in self.state:
            raise UsageError(
                f"{row.target} is state, and a part or another view of a larger tensor was given.",
                "Give a contiguous tensor: it is written to in place.",
            )
        return value.contiguous()
