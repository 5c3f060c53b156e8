"""The seam between the steps of sessions and engines and device graphs. Not run on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.program.decoder import SIGNATURE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.lowering.executable import Executable
    from inlay.streams.graph_replay import GraphReplayer


def has_graphs(device: torch.device) -> bool:
    """Whether steps can be captured on a device. A CPU has no graphs."""
    return device.type != "cpu" and torch.accelerator.is_available() and hasattr(torch.accelerator, "Graph")


def open_steps(executable: Executable, state: Mapping[str, torch.Tensor]) -> Any:
    """Return what runs the steps on this state: the executable itself, or captured steps if its device has graphs."""
    return ReplayedSteps(executable, state) if has_graphs(executable.device) else executable


class ReplayedSteps:
    """Steps on a device. A decode step is captured once for each bucket and batch size, and then replayed.

    Inputs and results are on the host. Results are copies, so no later step overwrites them.
    """

    def __init__(self, executable: Executable, state: Mapping[str, torch.Tensor]) -> None:
        self._executable, self._state = executable, dict(state)
        self.captured: dict[tuple[int, int], GraphReplayer] = {}
        """Index of a decode bucket and batch size → its captured step."""

    def __call__(self, inputs: Mapping[str, Any], *, is_prefill: bool = False) -> dict[str, torch.Tensor]:
        """Run one step. Checks run on the host's inputs, before anything is copied."""
        index = self._executable.find_bucket(inputs, is_prefill=is_prefill)
        given = {name: value for name, value in inputs.items() if name not in self._state}
        batch, length = given[SIGNATURE.tokens].shape
        if is_prefill or length != 1:
            made = self._executable.run_bucket(index, {**self._on_device(given), **self._state})
        else:
            made = self._find_step(index, batch, given)(given)
        return {name: value.to("cpu", copy=True) for name, value in made.items()}

    def _find_step(self, index: int, batch: int, given: Mapping[str, torch.Tensor]) -> GraphReplayer:
        from inlay.streams.graph_replay import GraphReplayer

        found = self.captured.get((index, batch))
        if found is None:
            found = GraphReplayer(lambda each: self._executable.run_bucket(index, each), self._state)
            found.capture(self._on_device(given))
            self.captured[index, batch] = found
        return found

    def _on_device(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.to(self._executable.device) for name, value in given.items()}
