"""Adapter: compiled libraries, loaded directly. Imports no compiler.

torch.cpu._init_amx comes first: code with AMX instructions dies without it. A library is a file `NAME.so`; the calls
that it leaves to torch are listed in `NAME.json` beside it, where torch's loader looks for them. A library that leaves
none is called through its C interface, and a run of such calls is one call of `run.cpp` (`inlay.ops.native`).

What is made here may be called by any number of threads. Arguments, values and results belong to a call; what calls
share are containers, and AOTInductor lets one thread at a time into one: its first run folds constants, and its own way
of waiting hangs when the run that it waits for fails. So every container has a lock: a mutex in `run.cpp`, or one of
Python where a library calls back into torch, which may need the interpreter that a waiting thread must not hold.
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
"""As malloc.h numbers them."""
_Int = ctypes.c_int32
_Pointer = ctypes.c_void_p


@cache
def _prepare() -> None:
    """AMX for this process, and an allocator that keeps what a step frees: the next one wants as much again."""
    torch.cpu._init_amx()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 128 << 20)


class Library:
    """A compiled library. Each container has constants of its own, which stay the tensors they are.

    `num_inputs` and `num_outputs` say how many tensors a call takes and gives, where that is known; `kernels` are the
    C++ kernels it may call, loaded.
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
        """A container whose constants are these tensors, which must be all it has and of the right types."""
        container = self._unbound if self._unbound is not None else self._open()
        self._unbound = None if self.kernels is None else container
        if set(self._types) != set(constants):
            strange = sorted(set(self._types) ^ set(constants))
            raise PackageError(f"{self.file.name} and its manifest disagree about the constant {strange[0]}.", _REMEDY)
        for name, value in constants.items():
            if self._types[name] != _DTYPE_CODES[value.dtype]:
                raise PackageError(f"{self.file.name} wants {name} in another format than {value.dtype}.", _REMEDY)
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
            raise PackageError(f"{self.file.name} cannot be loaded: {one_line(error)}.", _REMEDY) from error
        self._types = container.get_constant_names_to_dtypes()
        for known, spec in zip((self.num_inputs, self.num_outputs), container.get_call_spec(), strict=True):
            if known is not None and spec.count('"type": null') != known:
                raise PackageError(f"{self.file.name} takes or gives something else than its manifest says.", _REMEDY)
        return container


def _with_lock(run: Run) -> Run:
    alone = threading.Lock()

    def entered(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with alone:
            return run(inputs)

    return entered


class Container:
    """A library with constants, called without Python in between when others like it come before or after."""

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
        """What AOTInductor says of the last call of this thread, if that failed."""
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
    """The same steps, but neighbours that need no Python are one step."""
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
    """Steps that run one after the other in C++."""

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
        # A tensor in C++ is a pointer to what `_cdata` says: an array of those is an array of tensors, borrowed.
        given, results = self._input_array(*(value._cdata for value in inputs)), self._results()
        failed = self._api.inlay_plan_run(self._plan, given, self._output_ids, len(self._output_ids), results)
        if failed:
            raise self._error(failed)
        return _aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(each, None, None) for each in results])

    def _error(self, failed: int) -> PackageError:
        """Why the call of this thread failed: what a kernel said, or else the step itself."""
        said = self._api.inlay_last_error().decode(errors="replace")
        if failed < 0:
            return PackageError(f"The package failed: {said}.")
        said = said or self.steps[failed - 1].last_error() or "no reason was given"
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
"""How torch numbers its number formats."""
