"""Generated Triton kernels that reduce rows: numbers in the interpreter, compilation, refusals. Not run on a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.insight.candidates import find_candidates
from inlay.insight.scaffold import write_scaffold
from inlay.insight.scaffold.triton_kernel import KernelWriter
from inlay.testing import program_of
from inlay.testing.triton import ARCHITECTURES, POINTERS, compile_to_ptx, run_interpreted

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton")
from tests.insight.row_kernel_settings import load_module, write_module

F = torch.nn.functional
SETTINGS = "tests.insight.row_kernel_settings"


@pytest.mark.fast
def test_random_settings_and_faults(tmp_path: Path) -> None:
    """Eight of each kind; special values; configurations; faults that the comparison must find. All in one process."""
    printed = run_interpreted(
        f"""
        from pathlib import Path
        from {SETTINGS} import FAULTS, check_configurations, check_fault, check_setting, check_special_values
        from {SETTINGS} import check_elementwise

        folder = Path({str(tmp_path)!r})
        for kind in ("norm", "softmax"):
            for number in range(8):
                print("passed:", check_setting(kind, number, folder))
        check_special_values(folder)
        check_elementwise(folder)
        check_configurations(folder, 70)
        for fault in FAULTS:
            check_fault(fault, folder)
        """,
        __file__,
    )
    assert printed.count("passed:") == 16
    assert printed.count("found:") == 8


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, 250])
@pytest.mark.parametrize("kind", ["norm", "softmax"])
def test_five_hundred_settings(kind: str, first: int) -> None:
    code = f"import sys; from {SETTINGS} import main; sys.argv[1:] = ['{kind}', '250', '{first}']; main()"
    assert f"{kind}: 250 of 250 passed" in run_interpreted(code, __file__)


@pytest.mark.nightly
@pytest.mark.parametrize("columns", [3000, 5000])
def test_every_configuration(columns: int, tmp_path: Path) -> None:
    code = f"import pathlib; from {SETTINGS} import *; check_configurations(pathlib.Path({str(tmp_path)!r}), {columns})"
    run_interpreted(code, __file__)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [False, True])
def test_loads_are_masked(fault: bool, tmp_path: Path) -> None:
    """The input ends where its memory ends, so that a load without a mask ends the process."""
    code = f"""
        import ctypes, mmap, pathlib, torch
        from {SETTINGS} import load_module, softmax, write_module

        memory, page = mmap.mmap(-1, 2 * mmap.PAGESIZE), mmap.PAGESIZE
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), page, 0) == 0
        x = torch.frombuffer(memory, dtype=torch.float32, count=21, offset=page - 84).view(3, 7).fill_(2.0)
        source = write_module(softmax, [torch.ones(3, 7)])
        planted = source.replace(", mask=inside, other=0.0)", ")")
        assert planted != source
        module = load_module(planted if {fault} else source, pathlib.Path({str(tmp_path)!r}))
        print("ready", flush=True)
        torch.testing.assert_close(module.launch(x), softmax(x))
        """
    if fault:
        with pytest.raises(AssertionError) as told:
            run_interpreted(code, __file__)
        assert "Error" not in str(told.value), "not a Python error: the process was killed"
    else:
        assert "ready" in run_interpreted(code, __file__)


def _layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


@pytest.mark.fast
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_compiles(capability: int, tmp_path: Path) -> None:
    """A row that fits a block is read once; bfloat16 is rounded by the processor, to nearest."""
    module = load_module(write_module(_layer, [torch.ones(3, 3000), torch.ones(3000), torch.ones(3000)]), tmp_path)
    loads = []
    for constants in module.CONSTANTS if capability == ARCHITECTURES[0] else module.CONSTANTS[:1]:
        text = compile_to_ptx(capability, module.kernel, module.signature("*bf16"), constants, num_warps=4)
        assert f".target sm_{capability}" in text
        assert "cvt.rn.bf16" in text
        loads.append(text.count("ld.global"))
    assert loads[0] == 3 * 1024 // 128, "each element of x, w and b once"
    assert all(each > loads[0] for each in loads[1:]), "a loop reads x for each reduction"


@pytest.mark.nightly
@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("dtype", POINTERS, ids=str)
def test_every_configuration_compiles(capability: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also with sizes and strides of one, which Triton replaces by constants."""
    from inlay.ops.generated_triton import fitting_configs

    for number, function in enumerate((_layer, lambda x, w, b: (torch.softmax(x * w, -1) + b).sum(-1))):
        axes = {"x": {0: "rows", 1: "columns"}, "w": {0: "columns"}, "b": {0: "columns"}}
        source = write_module(function, [torch.ones(3, 7), torch.ones(7), torch.ones(7)], axes)
        module = load_module(source, tmp_path, number)
        signature = module.signature(POINTERS[dtype])
        for columns in (1, 100, 4096, 10000):
            for config in fitting_configs(columns, dtype.itemsize)[::2]:
                options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
                text = compile_to_ptx(capability, module.kernel, signature, config.kwargs, **options)
                assert f".target sm_{capability}" in text
        ones = dict.fromkeys(module.NUMBERS, 1)
        constant = signature | dict.fromkeys(ones, "constexpr")
        assert compile_to_ptx(capability, module.kernel, constant, {**config.kwargs, **ones})


@pytest.mark.fast
@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda x: torch.softmax(x, 0), [torch.ones(3, 4)], "other axes than the last"),
        (lambda x: x - x.mean(), [torch.ones(3, 4)], "other axes than the last"),
        (lambda x: x - x.mean((0, 1)), [torch.ones(3, 4)], "other axes than the last"),
        (lambda x: F.layer_norm(x, (3, 4)), [torch.ones(3, 4)], "other axes than the last"),
        (lambda x: torch.softmax(x.sum(-1), -1), [torch.ones(3, 4)], "several axes"),
        (lambda x: torch.softmax(x, -1).transpose(0, 1) + 1, [torch.ones(3, 4)], "several axes"),
        (lambda x: torch.softmax(x, -1), [torch.ones(3, 4).double()], "has inputs of torch.float64"),
        (lambda x: x.sum(-1) + 1, [torch.ones(3, 4, dtype=torch.int64)], "has inputs of torch.int64"),
        (lambda x, w: torch.softmax(x, -1) * w, [torch.ones(3, 4), torch.ones(4).bfloat16()], "has inputs of"),
        (lambda x: x.sum(-1, dtype=torch.float64), [torch.ones(3, 4)], "computes torch.float64"),
        (lambda x: x.to(torch.bfloat16).sum(-1), [torch.ones(3, 4)], "computes torch.bfloat16"),
        (lambda x: torch.softmax(x, -1), [torch.ones(3, 0)], "rows of length 0"),
        (lambda x: x.var(-1, correction=2), [torch.ones(3, 4)], "correction 2"),
        (lambda x: x.prod(-1), [torch.ones(3, 4)], "calls aten.prod"),
        (lambda x: F.rms_norm(x, (4,)), [torch.ones(3, 4)], "calls aten.rms_norm"),
        (lambda x: torch.softmax(x, -1).clamp(0, 0.5), [torch.ones(3, 4)], "calls aten.clamp"),
        (
            lambda x, w: F.conv1d(torch.softmax(x, -1).transpose(1, 2), w, None, 1, 1, 1, 4).transpose(1, 2),
            [torch.ones(2, 5, 4), torch.ones(4, 1, 3)],
            "convolves the result of a reduction",
        ),
    ],
)
def test_refusals(function: Any, args: list[torch.Tensor], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as told:
        write_module(function, args)
    assert "kernel generation does not support this" in str(told.value)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda x: x.to(torch.int32).to(torch.float32) * 2, [torch.ones(3, 4)], "computes torch.int32"),
        (lambda x: (x.to(torch.float64) * 2).to(torch.float32), [torch.ones(3, 4)], "computes torch.float64"),
        (lambda x: x.to(torch.bfloat16).to(torch.float32) * 2, [torch.ones(3, 4)], "computes torch.bfloat16"),
        (lambda x: x.squeeze((0, 1)) * 2, [torch.ones(1, 1, 4)], "calls aten.squeeze.dims"),
        (lambda x: x.squeeze() * 2, [torch.ones(1, 1, 4)], "calls aten.squeeze.default"),
        (lambda x: x.squeeze(1) * 2, [torch.ones(3, 4)], "calls aten.squeeze.dim"),
        (lambda x: x / x.shape[0] * 2, [torch.ones(3, 4)], "computes with a dynamic size"),
        (
            lambda x, w: F.conv1d(x, w, None, 1, 1, 1, 4) * 2,
            [torch.ones(4, 5), torch.ones(4, 1, 3)],
            "convolves other than rows of a batch",
        ),
        (
            lambda x, w: torch.ops.inlay.gated_short_conv(x, w) * 2,
            [torch.ones(1, 5, 12), torch.ones(4, 1, 3)],
            "convolves other than rows of a batch",
        ),
    ],
)
def test_refusals_without_reductions(function: Any, args: list[torch.Tensor], reason: str) -> None:
    axes = {"x": {0: "rows"}} if "dynamic" in reason else None
    with pytest.raises(UsageError, match=reason):
        write_module(function, args, axes, KernelWriter)


@pytest.mark.fast
def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    """A static size is checked at launch; a dynamic one must be the same everywhere. Rows of length 0 are refused."""
    x, w = torch.ones(3, 4), torch.ones(4)
    static = load_module(write_module(lambda x, w: torch.softmax(x, -1) * w, [x, w]), tmp_path)
    assert static.mismatch(x, w) == ""
    assert "is not (3, 4)" in static.mismatch(torch.ones(3, 5), torch.ones(5))
    assert "is not (3, 4)" in static.mismatch(torch.ones(4), w)
    assert "is not (3, 4)" in static.mismatch(torch.ones(3), w), "the first sizes fit, but there are too few"
    assert "is not (3, 4)" in static.mismatch(torch.ones(3, 4, 1), w)
    assert "torch.float64" in static.mismatch(x.double(), w.double())
    assert "dtypes" in static.mismatch(x, w.bfloat16())
    with pytest.raises(ValueError, match="is not"):
        static.launch(torch.ones(2, 4), w)
    axes = {"x": {0: "rows", 1: "columns"}, "w": {0: "columns"}}
    dynamic = load_module(write_module(lambda x, w: torch.softmax(x, -1) * w, [x, w], axes), tmp_path, 1)
    assert dynamic.mismatch(torch.ones(9, 5), torch.ones(5)) == ""
    assert "is not" in dynamic.mismatch(torch.ones(9, 5), torch.ones(1))
    assert "is not" in dynamic.mismatch(torch.ones(9), torch.ones(5))
    sums = load_module(write_module(lambda x: x.sum(-1), [x], {"x": axes["x"]}), tmp_path, 2)
    with pytest.raises(ValueError, match="length 0"):
        sums.launch(torch.ones(3, 0))
    assert sums.launch(torch.ones(0, 3)).shape == (0,)


def _conv_then_norm(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        mixed = F.conv1d(x.transpose(1, 2), w, None, 1, 2, 1, 8)[..., : x.shape[1]].transpose(1, 2)
        x = torch.softmax(mixed / 3, -1) * mixed @ y
    return x


@pytest.mark.nightly
def test_scaffold(tmp_path: Path) -> None:
    """What is written for a convolution with a softmax passes its own tests."""
    search = find_candidates(program_of(_conv_then_norm, [torch.randn(2, 6, 8), torch.randn(8, 1, 3), torch.eye(8)]))
    name = search.candidates[0].name
    assert not search.candidates[0].advice.kernels
    write_scaffold(search, name, tmp_path, kernel="triton")
    assert "launch_rows" in (tmp_path / f"{name}_triton.py").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert " skipped" not in run.stdout
