"""Adapter: load compiled libraries directly. Imports no compiler.

torch.cpu._init_amx is called first: without it, code with AMX instructions crashes. A library is a file `NAME.so`. Its
calls that fall back to torch are listed in `NAME.json` in the same folder, where torch's loader reads them. A library
without such calls is called through its C interface, and consecutive such calls are one call of `run.cpp`
(`inlay.ops.native`).

Any number of threads may call what this module returns. Arguments, values and results belong to one call. Calls share
containers, and only one thread at a time may run an AOTInductor container: its first run folds constants, and its
built-in waiting hangs when the run that it waits for fails. So every container has a lock. It is a mutex in `run.cpp`,
or a Python lock where a library calls back into torch, which may need the GIL that a waiting thread must not hold.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _aoti

from inlay.errors import PackageError, one_line
from inlay.lowering.executable import BoundStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

_REMEDY = "Build the package again."
_API = "AOTInductorModelContainer"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The constants of malloc.h."""
_Int = ctypes.c_int32
_Pointer = ctypes.c_void_p


@cache
def _prepare() -> None:
    """Enable AMX, and configure malloc to keep freed memory: the next step allocates as much again."""
    torch.cpu._init_amx()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 128 << 20)


class Library:
    """A compiled library. Each container has its own constants, which are the caller's tensors, not copies.

    `num_inputs` and `num_outputs` are the numbers of tensors that a call takes and returns, if known. `kernels` is the
    loaded library of C++ kernels that it may call.
    """

    def __init__(
        self,
        file: Path,
        num_inputs: int | None = None,
        num_outputs: int | None = None,
        kernels: ctypes.CDLL | None = None,
    ) -> None:
        self.file, self.num_inputs, self.num_outputs, self.kernels = file, num_inputs, num_outputs, kernels
        self._unbound: Any = None
        self._types: dict[str, int] = {}

    def bind(self, constants: Mapping[str, torch.Tensor]) -> Any:
        """Create a container with these tensors as constants. They must be all its constants, in the right dtypes."""
        container = self._unbound if self._unbound is not None else self._open()
        self._unbound = None if self.kernels is None else container
        if set(self._types) != set(constants):
            strange = sorted(set(self._types) ^ set(constants))
            raise PackageError(f"{self.file.name} and its manifest disagree about the constant {strange[0]}.", _REMEDY)
        for name, value in constants.items():
            if self._types[name] != _DTYPE_CODES[value.dtype]:
                raise PackageError(f"{self.file.name} requires {name} in another dtype than {value.dtype}.", _REMEDY)
        if self.kernels is not None:
            return Container(self.file, self.kernels, constants)
        if constants:
            container.update_constant_buffer(dict(constants), False, True, True)
        return _with_lock(container.run)

    def _open(self) -> Any:
        _prepare()
        try:
            container: Any = _aoti.AOTIModelContainerRunnerCpu(str(self.file), 1)
        except RuntimeError as error:
            remedy = "If it calls a custom operator, import its module first. Otherwise build the package again."
            raise PackageError(f"{self.file.name} cannot be loaded: {one_line(error)}.", remedy) from error
        self._types = container.get_constant_names_to_dtypes()
        for known, spec in zip((self.num_inputs, self.num_outputs), container.get_call_spec(), strict=True):
            if known is not None and spec.count('"type": null') != known:
                raise PackageError(f"{self.file.name} has other inputs or outputs than its manifest lists.", _REMEDY)
        return container


def _with_lock(run: Run) -> Run:
    alone = threading.Lock()

    def entered(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with alone:
            return run(inputs)

    return entered


class Container:
    """A library with bound constants. Consecutive containers are called without Python in between."""

    def __init__(self, file: Path, kernels: ctypes.CDLL, constants: Mapping[str, torch.Tensor]) -> None:
        self.kernels, self.constants = kernels, constants
        library = ctypes.CDLL(str(file))
        self._handle = _Pointer()
        create = getattr(library, f"{_API}CreateWithDevice")
        self._check(create(ctypes.byref(self._handle), ctypes.c_size_t(1), b"cpu", None), file)
        self._free = getattr(library, f"{_API}Delete")
        self._last_error = library.AOTInductorGetLastError
        held = (_Pointer * len(constants))(*(value._cdata for value in constants.values()))
        pairs = (_Constant * len(constants))(
            *(
                _Constant(name.encode(), ctypes.addressof(held) + place * ctypes.sizeof(_Pointer))
                for place, name in enumerate(constants)
            )
        )
        update = getattr(library, f"{_API}UpdateUserManagedConstantBufferPairs")
        self._check(update(self._handle, pairs, ctypes.c_size_t(len(constants)), False, True), file)
        run = ctypes.cast(getattr(library, f"{_API}RunSingleThreaded"), _Pointer)
        self.piece = _Pointer(kernels.inlay_piece_new(run, self._handle))

    def last_error(self) -> str:
        """Return AOTInductor's error message of the last call of this thread, if it failed."""
        text = ctypes.c_char_p()
        self._last_error(ctypes.byref(text))
        return (text.value or b"").decode(errors="replace")

    def _check(self, error: int, file: Path) -> None:
        if error:
            raise PackageError(f"{file.name} cannot be prepared.", _REMEDY)

    def __del__(self) -> None:
        if getattr(self, "piece", None) is not None:
            self.kernels.inlay_piece_free(self.piece)
        if getattr(self, "_free", None) is not None:
            self._free(self._handle)


class _Constant(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("handle", _Pointer))


def chain_steps(steps: Sequence[BoundStep], results: Sequence[str]) -> list[BoundStep]:
    """Return the same steps, with consecutive steps that need no Python merged into one."""
    made: list[BoundStep] = []
    group: list[BoundStep] = []
    for place, step in enumerate((*steps, None)):
        if step is not None and isinstance(step.run, Container):
            group.append(step)
            continue
        if group:
            later = {name for each in steps[place:] for name in each.ins} | set(results)
            made.append(_chain(group, later))
            group = []
        if step is not None:
            made.append(step)
    return made


def _chain(group: Sequence[BoundStep], later: set[str]) -> BoundStep:
    inside = {name for step in group for name in step.outs}
    ins = tuple(dict.fromkeys(name for step in group for name in step.ins if name not in inside))
    outs = tuple(name for step in group for name in step.outs if name in later)
    return BoundStep(_ContainerChain(group, ins, outs), ins, outs)


class _ContainerChain:
    """Consecutive steps that run in C++."""

    def __init__(self, steps: Sequence[BoundStep], ins: Sequence[str], outs: Sequence[str]) -> None:
        names = dict.fromkeys([*ins, *(name for step in steps for name in step.outs)])
        number = {name: place for place, name in enumerate(names)}
        last = {name: place for place, step in enumerate(steps) for name in (*step.ins, *step.outs)}
        self.steps: list[Container] = [step.run for step in steps]
        self._api: Any = self.steps[0].kernels
        self._plan = _Pointer(self._api.inlay_plan_new(len(ins), len(number)))
        for place, step in enumerate(steps):
            gone = [name for name in number if last.get(name) == place and name not in outs and name not in ins]
            lists = [_int_array([number[name] for name in each]) for each in (step.ins, step.outs, gone)]
            flat = [part for each in lists for part in (each, len(each))]
            self._api.inlay_plan_add(self._plan, self.steps[place].piece, *flat)
        self._output_ids = _int_array([number[name] for name in outs])
        self._input_array, self._results = _Pointer * len(ins), _Pointer * len(outs)

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        # A tensor in C++ is one pointer, the value of `_cdata`: an array of those is an array of borrowed tensors.
        given, results = self._input_array(*(value._cdata for value in inputs)), self._results()
        failed = self._api.inlay_plan_run(self._plan, given, self._output_ids, len(self._output_ids), results)
        if failed:
            raise self._error(failed)
        return _aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(each, None, None) for each in results])

    def _error(self, failed: int) -> PackageError:
        """Return the error of this thread's call: the message of a kernel, or else of the step."""
        said = self._api.inlay_last_error().decode(errors="replace")
        if failed < 0:
            return PackageError(f"The package failed: {said}.")
        said = said or self.steps[failed - 1].last_error() or "no error message"
        return PackageError(f"Step {failed} of the package failed: {one_line(RuntimeError(said))}.")

    def __del__(self) -> None:
        self._api.inlay_plan_free(self._plan)


def _int_array(values: Sequence[int]) -> Any:
    return (_Int * len(values))(*values)


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [_Pointer, ctypes.c_char_p, _Pointer]

_DTYPE_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
}
"""torch's numbers of its dtypes."""
