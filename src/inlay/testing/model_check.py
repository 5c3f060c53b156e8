"""`check_model`: compare a compiled model with the eager model."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from inlay.errors import UsageError, one_line
from inlay.integrations.torch_compile import inlay
from inlay.testing.compiler import record_compiles, use_eager_random
from inlay.testing.inputs import as_input_sets, call, compile_model, copy_inputs, refuse_compiled
from inlay.testing.value_comparison import TOLERANCE, ValueDifference, find_differences, flatten_named, format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.testing.compiler import CompiledFrame
    from inlay.testing.inputs import Inputs, Model


@dataclass(frozen=True)
class ModelCheck:
    """Counts of what `check_model` compared."""

    runs: int
    """Compiled runs: devices times dtypes times input sets, without and with gradients."""
    values: int
    """Compared values: outputs, arguments and state after the call, gradients."""
    frames: int
    """Compiled Python frames, including recompiles."""
    skipped: tuple[str, ...] = ()
    """Devices that are not available, each with the reason."""


@dataclass(frozen=True)
class _ModelRun:
    model: Model
    dtype: torch.dtype | None
    gradients: bool
    device: torch.device | None = None
    prepare: Callable[[Model], Model] = field(default=lambda model: model)

    def execute(self, inputs: Inputs) -> dict[str, Any]:
        """Run once from fresh state and return all values by name."""
        model, given = copy.deepcopy(self.model), copy_inputs(inputs, self.dtype, self.device)
        if isinstance(model, torch.nn.Module):
            model.zero_grad(set_to_none=True)
            model.to(device=self.device, dtype=self.dtype)
        places = {name: value.data_ptr() for name, value in _state(model).items()}
        torch.manual_seed(0)
        with nullcontext() if self.gradients else torch.no_grad():
            outputs = call(self.prepare(model), given)
        values = flatten_named("output", outputs)
        values |= _find_shared_memory(values, flatten_named("input", given))
        values |= {f"{name} afterwards": value for name, value in flatten_named("input", given).items()}
        for name, value in _state(model).items():
            values[f"state {name} afterwards"] = value
            is_same = places.get(name) == value.data_ptr()
            values[f"memory of state {name}"] = "same address" if is_same else "new address"
        if self.gradients:
            _backward(outputs)
            trained = flatten_named("input", given) | _state(model)
            wanted = {name: value for name, value in trained.items() if getattr(value, "requires_grad", False)}
            values |= {f"gradient of {name}": value.grad for name, value in wanted.items() if value.is_leaf}
        return values


def check_model(
    model: Model,
    inputs: Inputs | list[Inputs],
    *,
    backend: str | Callable[..., Any] = "inductor",
    dtypes: Sequence[torch.dtype | None] = (torch.float32, torch.bfloat16),
    devices: Sequence[str | torch.device | None] = ("cpu",),
    gradients: bool | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    tolerance: Mapping[torch.dtype, float] | None = None,
    strides: bool = True,
) -> ModelCheck:
    """Assert that the compiled model equals the eager model: values, dtypes, strides, gradients, state and aliasing.

    `inputs` is one set (a tuple by position, a mapping by name) or a list of sets, which may have different shapes. One
    compiled model serves all sets, each from the same initial state. The model and floating-point inputs are converted
    to each of `dtypes`; None leaves them unchanged. All dtypes are checked on each of `devices`; None leaves the model
    and the inputs where they are. A device that is not available is skipped with a warning, and `ModelCheck.skipped`
    contains the reason. Errors are measured against the model in float64 if it can run in float64. A compiled value may
    differ by `tolerance` (relative to the largest value) plus twice the error of eager; a tolerance of 0 means equal to
    eager.
    Gradients are compared if a parameter or an input requires one, unless the backend is Inlay's, which has none.
    With `strides=False` the layout of outputs is not compared. State outside the arguments of a plain function is not
    reset, and tensors inside objects that are not pytrees are not converted.

    >>> check_model(torch.nn.Linear(4, 2), [(torch.ones(3, 4),), (torch.ones(5, 4),)], backend="aot_eager")
    ModelCheck(runs=8, values=64, frames=8, skipped=())
    """
    refuse_compiled(model)
    sets = as_input_sets(inputs)
    if not dtypes:
        raise UsageError("There are no dtypes.", "Give at least one; None leaves the model unchanged.")
    present, skipped = _find_devices(devices)
    if gradients is None:
        gradients = backend not in ("inlay", inlay) and any(_requires_grad(model, each) for each in sets)
    allowed = {**TOLERANCE, **(tolerance or {})}
    found: list[ValueDifference] = []
    compared = frames = 0
    for device, dtype, training in product(present, dtypes, (False, True) if gradients else (False,)):
        eager = _ModelRun(model, dtype, training, device)
        fast = replace(eager, prepare=lambda each: compile_model(each, backend, options, dynamic))
        torch.compiler.reset()
        with record_compiles() as made, use_eager_random(), torch.random.fork_rng(devices=[]):
            for index, given in enumerate(sets):
                run = _run_text(device, dtype, index, training)
                one, two, precise = eager.execute(given), _run_with_note(run, fast, given), _reference(eager, given)
                found += find_differences(run, one, two, precise, _widen_tolerance(allowed, dtype), strides)
                compared += len(one)
        _assert_compiled(made)
        frames += len(made)
    assert not found, (
        f"The compiled model ({_backend_text(backend)}) differs from eager in {len(found)} places.\n"
        f"{format_table(found)}"
    )
    runs = len(present) * len(dtypes) * len(sets) * (1 + gradients)
    return ModelCheck(runs, compared, frames, skipped)


def _find_devices(devices: Sequence[str | torch.device | None]) -> tuple[list[torch.device | None], tuple[str, ...]]:
    """Return the devices that compute here, and for each other one why it does not."""
    present: list[torch.device | None] = []
    skipped = []
    for each in devices:
        try:
            device = None if each is None else torch.device(each)
        except RuntimeError as error:
            raise UsageError(f"{each!r} is not a device of torch.", "Give cpu, cuda, cuda:1, mps, …") from error
        if device is not None and device.type == "meta":
            raise UsageError("Tensors on the device meta have no values to compare.", "Give a device that computes.")
        try:
            torch.ones(1, device=device)
            present.append(device)
        except Exception as error:
            skipped.append(f"{device}: {one_line(error)}")
            warnings.warn(f"check_model skips the device {skipped[-1]}.", stacklevel=3)
    assert present, f"No device is available, so nothing was checked. {'; '.join(skipped) or 'None was given'}."
    return present, tuple(skipped)


def _widen_tolerance(allowed: Mapping[torch.dtype, float], dtype: torch.dtype | None) -> dict[torch.dtype, float]:
    """Return tolerances at least as large as that of the compute dtype; a wider output dtype is not more accurate."""
    floor = 0.0 if dtype is None else allowed.get(dtype, 0.0)
    return {each: max(share, floor) for each, share in allowed.items()}


def _assert_compiled(made: Sequence[CompiledFrame]) -> None:
    assert made, (
        "Nothing was compiled, so nothing was checked. Check that torch.compile is not disabled by a stance or by "
        "TORCHDYNAMO_DISABLE, and that the model does not only call functions that Dynamo skips."
    )
    assert not any(each.has_hit_limit for each in made), (
        "The recompile limit was reached, so that the last input sets ran eagerly. Pass dynamic=True, or fewer sets."
    )


def _run_text(device: torch.device | None, dtype: torch.dtype | None, index: int, training: bool) -> str:
    where = "" if device is None or device.type == "cpu" else f"{device}, "
    name = "as given" if dtype is None else str(dtype).removeprefix("torch.")
    return f"{where}{name}, inputs {index}, {'with' if training else 'without'} gradients"


def _backend_text(backend: str | Callable[..., Any]) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__name__", repr(backend))


def _run_with_note(run: str, plan: _ModelRun, inputs: Inputs) -> dict[str, Any]:
    try:
        return plan.execute(inputs)
    except Exception as error:
        error.add_note(f"check_model was running the compiled model: {run}.")
        raise


def _reference(eager: _ModelRun, inputs: Inputs) -> dict[str, Any]:
    """Return the values in float64; empty if the model cannot run in float64, or if that is its own dtype."""
    if eager.dtype is None or eager.dtype is torch.float64:
        return {}
    try:
        return replace(eager, dtype=torch.float64).execute(inputs)
    except Exception:
        return {}


def _state(model: Model) -> dict[str, torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        return {}
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _find_shared_memory(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return which inputs each output shares storage with; writing to an output must not change other inputs."""

    def storage(value: Any) -> int | None:
        return value.untyped_storage().data_ptr() or None if isinstance(value, torch.Tensor) else None

    held: dict[int | None, list[str]] = {}
    for name, value in inputs.items():
        held.setdefault(storage(value), []).append(name)
    shared = {name: ", ".join(held.get(storage(value), ())) for name, value in outputs.items() if storage(value)}
    return {f"memory of {name}": names or "not shared" for name, names in shared.items()}


def _requires_grad(model: Model, inputs: Inputs) -> bool:
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    leaves = (*parameters, *tree_leaves(inputs))
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in leaves)


def _backward(outputs: Any) -> None:
    """Run the backward pass from every output that requires a gradient, with the same random gradients in every run."""
    ends = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not ends:
        return
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each) for each in ends]
    torch.autograd.backward(ends, given)
