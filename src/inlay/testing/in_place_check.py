"""`assert_in_place`: a compiled step writes its state in place, and writes no more than needed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import UsageError, suggest
from inlay.package.memory_profiler import allocate_paged, profile_memory
from inlay.testing.compiler import record_compiles
from inlay.testing.inputs import call, compile_model, copy_inputs, refuse_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.package.memory_profiler import MemoryProfile
    from inlay.testing.inputs import Inputs, Model


@dataclass(frozen=True)
class StateTraffic:
    """The measured state traffic of one step."""

    state_bytes: int
    """Bytes of the state."""
    bytes_written: int
    """Bytes in pages of the state that the compiled step writes."""
    bytes_needed: int
    """Bytes in pages that the eager step writes, or `max_bytes`."""


def assert_in_place(
    model: Model,
    inputs: Inputs,
    state: str | int,
    *,
    step: Model | None = None,
    backend: str | Callable[..., Any] = "inductor",
    options: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
) -> StateTraffic:
    """Assert that the compiled step updates its state in place: no allocation as large, no other page written.

    `state` is the position or name of an input, or the name of a buffer of the model. The required bytes are measured
    on the eager model, or set by `max_bytes` in whole pages. `step` is another compiled form of the model with the same
    arguments. Use a state with many more pages than one step writes; a small state shows little.

    >>> def append(cache, row):
    ...     cache[3] = row
    >>> assert_in_place(append, (torch.zeros(64, 1024), torch.ones(1024)), state=0, backend="eager")
    StateTraffic(state_bytes=262144, bytes_written=4096, bytes_needed=4096)
    """
    refuse_compiled(model)
    if step is not None and state in _buffers(model):
        raise UsageError("A separately compiled step has its own buffers.", "Give the state as an input.")
    with torch.no_grad():
        plain, plain_moved, _ = _measure_step(model, lambda each: each, inputs, state)
        make = (lambda each: compile_model(each, backend, options, None)) if step is None else (lambda _: step)
        torch.compiler.reset()
        with record_compiles() as made:
            fast, moved, stayed = _measure_step(model, make, inputs, state)
    assert made or step is not None, "Nothing was compiled, so nothing was checked. Check that torch.compile is on."
    size = fast.numel() * fast.element_size()
    needed = plain_moved.written_bytes if max_bytes is None else max_bytes
    assert stayed, f"The state {state} is another tensor after the step: it was replaced, not updated in place."
    if not needed:
        raise UsageError(f"The model does not write to {state}.", "Name the state that it updates, or pass max_bytes.")
    assert not moved.copied_bytes(size), (
        f"The step allocates {moved.copied_bytes(size)} bytes in blocks as large as the state ({size} bytes):"
        " it is copied. "
        "docs/in_place.md lists which updates stay in place, and how to change the others."
    )
    assert moved.written_bytes, f"The step does not write to the state {state}."
    assert moved.written_bytes <= needed, (
        f"The step writes to {moved.written_bytes} bytes of the state's pages, but only {needed} are needed: "
        f"{'the whole state is copied back' if moved.written_bytes >= size else 'more than the update is written'}."
    )
    torch.testing.assert_close(fast, plain, equal_nan=True, msg=lambda text: f"The state {state} afterwards: {text}")
    return StateTraffic(size, moved.written_bytes, needed)


def _measure_step(
    model: Model, make: Callable[[Model], Model], inputs: Inputs, state: str | int
) -> tuple[torch.Tensor, MemoryProfile, bool]:
    """Return the state after a few steps, the memory profile of one step, and whether the address is unchanged."""
    own, given = copy.deepcopy(model), copy_inputs((inputs,) if isinstance(inputs, torch.Tensor) else inputs)
    given, held = _replace_state(own, given, state)
    run = make(own)
    call(run, given)  # compiles
    moved = profile_memory(lambda: call(run, given), held)
    now = _buffers(own).get(str(state), held)
    return held, moved, now.data_ptr() == held.data_ptr()


def _buffers(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) if isinstance(model, torch.nn.Module) else {}


def _replace_state(model: Model, inputs: Any, state: str | int) -> tuple[Inputs, torch.Tensor]:
    """Replace the given state by a copy in memory whose pages are tracked."""
    if isinstance(model, torch.nn.Module) and state in _buffers(model):
        owner, _, name = str(state).rpartition(".")
        module = model.get_submodule(owner)
        held = _paged_copy(module.get_buffer(name))
        setattr(module, name, held)
        return inputs, held
    known = list(inputs) if isinstance(inputs, Mapping) else list(range(len(inputs)))
    if state not in known:
        names = [str(each) for each in (*known, *_buffers(model))]
        raise UsageError(f"There is no state {state}.", suggest(str(state), names) or f"Choose {', '.join(names)}.")
    held = _paged_copy(inputs[state])
    if isinstance(inputs, Mapping):
        return {**inputs, str(state): held}, held
    return tuple(held if index == state else each for index, each in enumerate(inputs)), held


def _paged_copy(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        raise UsageError("The state is not a contiguous tensor.", "Give the whole tensor, not a view of it.")
    made = allocate_paged(value.shape, value.dtype)
    made.copy_(value.detach())
    return made
