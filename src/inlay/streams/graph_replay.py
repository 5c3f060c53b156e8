"""Capture and replay: a step at fixed shapes, its inputs and outputs at addresses that stay, its state the caller's.

On a device with graphs (`torch.accelerator.Graph`) a step is captured once and then replayed without Python. On a CPU
the code is called, and everything else is the same: what a caller may rely on is tested there. Not verified on a GPU.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from inlay.errors import UsageError
from inlay.program.bindings import tensor_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Code = Callable[[Mapping[str, Any]], Mapping[str, Any]]
    Shape = tuple[tuple[str, Any], ...]

WARM_UPS = 2
"""A device loads code and picks kernels when it first runs them, which it must not do while it captures."""


class GraphReplayer:
    """Steps of a decoder, one bucket a shape: `capture` each shape once, then call with inputs of these shapes.

    `code` takes inputs and state by name and gives results by name, as an `Executable` does. `state` is every tensor
    that it writes to, given or its own; they are written where they are, and nothing of them is copied or copied back.

    >>> def step(arguments):
    ...     return {"total": arguments["state"].add_(arguments["x"]).sum()}
    >>> state = torch.zeros(2)
    >>> replays = GraphReplayer(step, {"state": state})
    >>> replays.capture({"x": torch.ones(2)})
    >>> replays({"x": torch.ones(2)})["total"].item(), replays({"x": torch.ones(2)})["total"].item(), state.tolist()
    (2.0, 4.0, [2.0, 2.0])
    """

    def __init__(self, code: Code, state: Mapping[str, torch.Tensor]) -> None:
        self._code, self._state = code, dict(state)
        self._addresses = {name: _place(value) for name, value in state.items()}
        self._buckets: dict[Shape, CapturedStep] = {}

    def capture(self, example: Mapping[str, Any]) -> None:
        """Make a bucket for inputs of these shapes. State is afterwards what it was; it is copied meanwhile."""
        inputs = self._inputs(example)
        self._buckets[_shape(inputs)] = CapturedStep(self._code, inputs, self._state)

    def __call__(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Run the step that was captured for these shapes. Numbers must be what they were at capture.

        The results lie at the addresses they always lie at. Who wants to keep one longer than until the next call of
        the same shapes has to clone it: while somebody holds it, that call is refused.
        """
        inputs = self._inputs(arguments)
        return self._lookup(inputs)(inputs)

    def bucket(self, arguments: Mapping[str, Any]) -> CapturedStep:
        """What was captured for inputs of these shapes."""
        return self._lookup(self._inputs(arguments))

    def _lookup(self, inputs: Mapping[str, Any]) -> CapturedStep:
        found = self._buckets.get(_shape(inputs))
        if found is None:
            known = "; ".join(_text(shape) for shape in self._buckets) or "nothing"
            raise UsageError(
                f"Nothing was captured for {_text(_shape(inputs))}.", f"Captured: {known}. A replay takes no other."
            )
        return found

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is given but for the state, which may be given too, if it is where it was."""
        for name, value in self._state.items():
            if _place(value) != self._addresses[name] or _place(given.get(name, value)) != self._addresses[name]:
                raise UsageError(
                    f"{name} is at another address, or lies there otherwise, than when it was captured.",
                    "Write to that tensor, or capture anew.",
                )
        return {name: value for name, value in given.items() if name not in self._state}


class CapturedStep:
    """One bucket: memory of its own for all that goes in and comes out and is no state, and the step over it."""

    def __init__(self, code: Code, example: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
        self._code, self._state = code, dict(state)
        with torch.inference_mode(False), torch.no_grad():  # or nobody could write here when that mode is over
            self.inputs = {
                name: value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value
                for name, value in example.items()
            }
        """What the step reads. Who writes here spares the copy: give these tensors."""
        self._outputs = self._warm_up()
        self._live_outputs: dict[str, Callable[[], Any]] = {}
        self._replay: Callable[[], None] = self._step
        devices = {value.device for value in (*self._outputs.values(), *state.values())}
        if any(device.type != "cpu" for device in devices):
            self._replay = self._capture_graph()

    def __call__(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Copy the inputs in, run the step, hand the outputs out."""
        self._check_outputs_released()
        self._copy_in(given)
        self._replay()
        return {name: self._wrap_output(name, value) for name, value in self._outputs.items()}

    @torch.no_grad()
    def _copy_in(self, given: Mapping[str, Any]) -> None:
        """Copy what is not there yet. What lies in memory that this writes, in another way or place, is saved first."""
        mine = {name: value for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        places = {value.untyped_storage().data_ptr() for value in mine.values()}
        new = {name: value for name, value in given.items() if name in mine and value is not mine[name]}
        for name, value in new.items():
            if value.untyped_storage().data_ptr() in places:
                new[name] = value.clone()
        for name, value in new.items():
            mine[name].copy_(value)

    def _warm_up(self) -> dict[str, torch.Tensor]:
        """Run the step to learn what comes out, and let a device get ready; state is put back."""
        before = {name: value.clone() for name, value in self._state.items()}
        with torch.no_grad():
            for _ in range(WARM_UPS):
                try:
                    made = self._code({**self.inputs, **self._state})
                finally:
                    for name, value in before.items():
                        self._state[name].copy_(value)
        for name, value in made.items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(f"{name} is no tensor, and has no address.", "Return tensors only.")
        with torch.inference_mode(False):
            return {
                name: torch.empty_like(value, memory_format=torch.contiguous_format) for name, value in made.items()
            }

    def _step(self) -> None:
        with torch.no_grad():
            made = self._code({**self.inputs, **self._state})
            for name, value in self._outputs.items():
                if made[name].shape != value.shape:
                    raise UsageError(
                        f"{name} had the shape {list(value.shape)} at capture, and has {list(made[name].shape)} now.",
                        "A step whose results change their shapes cannot be replayed.",
                    )
                value.copy_(made[name])

    def _capture_graph(self) -> Callable[[], None]:
        """The step as a graph of the device. Its intermediate values lie in a pool of the graph's own."""
        graph = torch.accelerator.Graph()
        stream = torch.Stream()
        stream.wait_stream(torch.accelerator.current_stream())
        with stream, graph:
            self._step()
        torch.accelerator.current_stream().wait_stream(stream)
        return graph.replay

    def _wrap_output(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The same memory as a storage of its own, which dies with the last tensor, view or array over it."""
        handed = from_dlpack(value)
        self._live_outputs[name] = weakref.ref(handed.untyped_storage())
        return handed

    def _check_outputs_released(self) -> None:
        for name, storage in self._live_outputs.items():
            if storage() is not None:
                raise UsageError(
                    f"{name} of the last replay is still held, and would be written over.",
                    f"Clone it if you need it, or let it go: del {name}.",
                )


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.shape, value.stride()


def _shape(inputs: Mapping[str, Any]) -> Shape:
    return tuple(sorted((name, _type(value)) for name, value in inputs.items()))


def _type(value: Any) -> Any:
    """The type of a tensor, or a number as it is written, for 1, 1.0 and True are equal: all are part of a capture."""
    return (str(value.dtype), tuple(value.shape)) if isinstance(value, torch.Tensor) else ("", repr(value))


def _text(shape: Shape) -> str:
    """
    >>> _text((("n", ("", "3")), ("x", ("torch.float32", (1, 8)))))
    'n 3, x f32[1, 8]'
    """
    return ", ".join(
        f"{name} {tensor_text(dtype.removeprefix('torch.'), value) if dtype else value}"
        for name, (dtype, value) in shape
    )
