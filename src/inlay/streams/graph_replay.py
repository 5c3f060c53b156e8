"""Capture and replay of a step with fixed shapes: inputs and outputs have fixed addresses, the caller owns the state.

On a device with graphs (`torch.accelerator.Graph`) a step is captured once and then replayed without Python. On a CPU
the code is called instead. The interface is the same and is tested there. Not verified on a GPU.
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
"""Runs before capture. A device loads code and selects kernels at their first run, which must not be during capture."""


class GraphReplayer:
    """Captured steps of a decoder, one bucket per shape: `capture` each shape once, then call with inputs of it.

    `code` maps inputs and state by name to results by name, like an `Executable`. `state` must contain every tensor
    that `code` writes to, passed or its own. State is written in place and never copied by a replay.

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
        """Capture a bucket for inputs of these shapes. State is copied before and restored afterwards."""
        inputs = self._inputs(example)
        self._buckets[_shape(inputs)] = CapturedStep(self._code, inputs, self._state)

    def __call__(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Run the step that was captured for these shapes. Python numbers must equal those at capture.

        Results have fixed addresses. Clone a result to keep it beyond the next call of the same shapes: that call is
        rejected while a reference to the result exists.
        """
        inputs = self._inputs(arguments)
        return self._lookup(inputs)(inputs)

    def bucket(self, arguments: Mapping[str, Any]) -> CapturedStep:
        """Return the step that was captured for inputs of these shapes."""
        return self._lookup(self._inputs(arguments))

    def _lookup(self, inputs: Mapping[str, Any]) -> CapturedStep:
        found = self._buckets.get(_shape(inputs))
        if found is None:
            known = "; ".join(_text(shape) for shape in self._buckets) or "nothing"
            raise UsageError(
                f"No step was captured for {_text(_shape(inputs))}.", f"Capture it first. Captured so far: {known}."
            )
        return found

    def _inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments without the state. State may be passed too if its address is unchanged."""
        for name, value in self._state.items():
            if _place(value) != self._addresses[name] or _place(given.get(name, value)) != self._addresses[name]:
                raise UsageError(
                    f"The address, shape or strides of {name} have changed since capture.",
                    "Write to the original tensor, or capture again.",
                )
        return {name: value for name, value in given.items() if name not in self._state}


class CapturedStep:
    """One bucket: a captured step with its own memory for inputs and outputs; state is not copied."""

    def __init__(self, code: Code, example: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
        self._code, self._state = code, dict(state)
        with torch.inference_mode(False), torch.no_grad():  # else the tensors are read-only outside inference mode
            self.inputs = {
                name: value.clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value
                for name, value in example.items()
            }
        """The input tensors of the step. Pass these tensors to avoid the copy."""
        self._outputs = self._warm_up()
        self._live_outputs: dict[str, Callable[[], Any]] = {}
        self._replay: Callable[[], None] = self._step
        devices = {value.device for value in (*self._outputs.values(), *state.values())}
        if any(device.type != "cpu" for device in devices):
            self._replay = self._capture_graph()

    def __call__(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Copy the inputs in, run the step and return the outputs."""
        self._check_outputs_released()
        self._copy_in(given)
        self._replay()
        return {name: self._wrap_output(name, value) for name, value in self._outputs.items()}

    @torch.no_grad()
    def _copy_in(self, given: Mapping[str, Any]) -> None:
        """Copy inputs that are not in place yet. Inputs that overlap the memory to be written are cloned first."""
        mine = {name: value for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        places = {value.untyped_storage().data_ptr() for value in mine.values()}
        new = {name: value for name, value in given.items() if name in mine and value is not mine[name]}
        for name, value in new.items():
            if value.untyped_storage().data_ptr() in places:
                new[name] = value.clone()
        for name, value in new.items():
            mine[name].copy_(value)

    def _warm_up(self) -> dict[str, torch.Tensor]:
        """Run the step to allocate its outputs and warm up the device; state is restored."""
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
                raise UsageError(f"The result {name} is not a tensor, so it has no address.", "Return tensors only.")
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
                        f"{name} had the shape {list(value.shape)} at capture, but has {list(made[name].shape)} now.",
                        "Replay only steps whose results have fixed shapes.",
                    )
                value.copy_(made[name])

    def _capture_graph(self) -> Callable[[], None]:
        """Capture the step as a device graph. Its intermediate values are in the graph's memory pool."""
        graph = torch.accelerator.Graph()
        stream = torch.Stream()
        stream.wait_stream(torch.accelerator.current_stream())
        with stream, graph:
            self._step()
        torch.accelerator.current_stream().wait_stream(stream)
        return graph.replay

    def _wrap_output(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the same memory as a separate storage, which is freed with the last tensor, view or array of it."""
        handed = from_dlpack(value)
        self._live_outputs[name] = weakref.ref(handed.untyped_storage())
        return handed

    def _check_outputs_released(self) -> None:
        for name, storage in self._live_outputs.items():
            if storage() is not None:
                raise UsageError(
                    f"{name} of the last replay is still referenced and would be overwritten.",
                    f"Clone it if you need it, or release it: del {name}.",
                )


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.shape, value.stride()


def _shape(inputs: Mapping[str, Any]) -> Shape:
    return tuple(sorted((name, _type(value)) for name, value in inputs.items()))


def _type(value: Any) -> Any:
    """Return dtype and shape of a tensor, or the repr of a number, because 1, 1.0 and True compare equal."""
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
