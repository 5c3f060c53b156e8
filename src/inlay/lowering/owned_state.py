"""State that a program or session owns: named tensors at fixed addresses, for one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


class OwnedState(Mapping[str, torch.Tensor]):
    """State tensors by their names in the model. Calls, `reset` and `copy_from` write to them in place.

    One thread at a time may use them. An operation that starts while another one runs raises an error and changes
    nothing, because the content would depend on the order of the two.

    >>> state = OwnedState({"b_count": torch.tensor([3])}, {"count": "b_count"}, {"b_count": torch.tensor([1])})
    >>> state.reset()
    >>> state["count"]
    tensor([1])
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], initial: Mapping[str, torch.Tensor]
    ) -> None:
        """`names` maps names in the model to keys of `tensors` and `initial`. State without initial value is zero."""
        self._tensors, self._names, self._initial = tensors, dict(names), initial
        self._busy = threading.Lock()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @contextmanager
    def exclusive(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Reserve the state for one operation, or raise an error if another one runs; yield the tensors."""
        if not self._names:
            yield self._tensors
            return
        if not self._busy.acquire(blocking=False):
            raise UsageError("Another thread is using this state.", "Give each thread its own session or state.")
        try:
            yield self._tensors
        finally:
            self._busy.release()

    def reset(self) -> None:
        """Write the initial values to the tensors: those of the model, or zeros."""
        with self.exclusive(), torch.no_grad():
            for name in self._names.values():
                if name in self._initial:
                    self._tensors[name].copy_(self._initial[name])
                else:
                    self._tensors[name].zero_()

    def copy_from(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write these values, one for each name, to the tensors."""
        with self.exclusive(), torch.no_grad():
            for name in self:
                self[name].copy_(values[name])
