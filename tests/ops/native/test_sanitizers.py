"""Drivers of the kernels and the plan runner in C++, under sanitizers, for processors that the machine need not be.

VNNI, BF16 and AMX are emulated on AVX-512 (native/emulated.h), so all of them run wherever there is AVX-512, and
sanitizers see what tiles read. On a processor that has them, `test_kernels.py` runs the real instructions.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from inlay.ops import native

DRIVERS = Path(__file__).parent
KERNELS = Path(native.__file__).parent
INCLUDES = [f"-I{folder}" for folder in (KERNELS, DRIVERS, Path(torch.__file__).parent / "include")]
EMULATED = ["-march=skylake-avx512", "-include", str(DRIVERS / "emulated.h")]
PROCESSORS = {
    "AVX2": ["-march=x86-64-v3"],
    "AVX-512": ["-march=skylake-avx512"],
    "AVX-512 with VNNI and BF16": [*EMULATED, "-DEMULATE_VNNI"],
    "AMX": [*EMULATED, "-DEMULATE_AMX", "-DINLAY_SEGMENT=64"],
}
NEEDED = {"AVX2": {"avx2", "fma", "f16c"}}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the drivers are for x86-64")


def missing(processor: str) -> list[str]:
    """What the drivers for a kind of processor need, and this one has not."""
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    return sorted(NEEDED.get(processor, AVX512) - set(flags))


def skip_unless_runnable(processor: str) -> None:
    if missing(processor):
        pytest.skip(f"this processor has no {', '.join(missing(processor))}")


def compiled(folder: Path, checked: list[Path], plain: list[Path], flags: list[str], checks: list[str]) -> Path:
    """A program of sources that a sanitizer looks at and sources that it does not; of what both hold, the former's."""
    compiler, linking = os.environ.get("CXX", "g++"), [check for check in checks if check.startswith("-fsanitize")]
    shared, objects = ["-std=c++17", "-fopenmp", "-fno-math-errno", *flags, *INCLUDES], []
    # Kernels without -O: optimised, the code of the sanitizers takes longer to compile than it then runs.
    for sources, more in ((checked, ["-O0", *checks]), (plain, ["-O1"])):
        for source in sources:
            objects.append(str(folder / f"{source.stem}.o"))
            subprocess.run([compiler, *shared, *more, "-c", str(source), "-o", objects[-1]], check=True)
    program = folder / "driver"
    openmp = [] if any("openmp" in each for each in objects) else ["-fopenmp"]
    subprocess.run([compiler, *objects, *linking, *openmp, "-pthread", "-o", str(program)], check=True)
    return program


def cases(command: list[str], **environment: str) -> int:
    """How many cases a driver ran. A sanitizer that finds something ends it."""
    quiet = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | quiet | environment, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    count, word = done.stdout.split()
    assert word == "cases"
    return int(count)


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "processor",
    [
        "AVX2",
        pytest.param("AVX-512", marks=pytest.mark.nightly),
        "AVX-512 with VNNI and BF16",
        pytest.param("AMX", marks=pytest.mark.nightly),
    ],
)
def test_memory(processor: str, rounds: int, tmp_path: Path) -> None:
    """Every way, format, number of rows, end of the cache; NaN, Inf; an empty batch; what must be refused."""
    skip_unless_runnable(processor)
    checks = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
    kernels = [KERNELS / "attention.cpp", KERNELS / "linear.cpp"]
    driver = compiled(tmp_path, kernels, [DRIVERS / "memory.cpp"], PROCESSORS[processor], checks)
    seed = str(list(PROCESSORS).index(processor))
    assert cases([str(driver), seed, str(rounds)], ASAN_OPTIONS="allocator_may_return_null=1") >= 400 * rounds


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.nightly)])
def test_threads(rounds: int, tmp_path: Path) -> None:
    """Eight threads on one plan and on the kernels, which start threads of their own (native/openmp.cpp)."""
    processor = "AVX2" if missing("AMX") else "AMX"
    names = ("run", "attention", "linear")
    sources = [DRIVERS / "threads.cpp", DRIVERS / "openmp.cpp", *(KERNELS / f"{name}.cpp" for name in names)]
    driver = compiled(tmp_path, sources, [], PROCESSORS[processor], ["-fsanitize=thread"])
    # Where addresses are drawn at random, this sanitizer may not find room for its own.
    command = ["setarch", platform.machine(), "-R", str(driver), "0", "8", str(rounds)]
    assert cases(command, TSAN_OPTIONS="halt_on_error=1") >= 700 * rounds


@pytest.mark.nightly  # tests/ops/native/test_kernels.py has smaller ones
@pytest.mark.parametrize("rounds", [1, 50])
@pytest.mark.parametrize("processor", list(PROCESSORS))
def test_bits_do_not_depend_on_the_company(processor: str, rounds: int, tmp_path: Path) -> None:
    """A row alone, among others, in chunks, by one thread or several: the same bits, within a phase."""
    skip_unless_runnable(processor)
    sources = [DRIVERS / "invariant.cpp", KERNELS / "attention.cpp", KERNELS / "linear.cpp"]
    driver = compiled(tmp_path, [], sources, PROCESSORS[processor], [])
    assert cases([str(driver), str(list(PROCESSORS).index(processor)), str(rounds)]) >= 1000 * rounds


def test_another_processor(tmp_path: Path) -> None:
    """The kernels compile for aarch64, and compute there what they compute here."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    flags = ["-std=c++17", "-O1", "-march=armv8-a", "-fopenmp", *INCLUDES]
    sources = [DRIVERS / "memory.cpp", KERNELS / "attention.cpp", KERNELS / "linear.cpp"]
    driver = tmp_path / "driver"
    subprocess.run([compiler, *flags, "-static", *map(str, sources), "-o", str(driver)], check=True)
    assert cases([emulator, str(driver), "0", "1"]) >= 400
    for name in ("run", "shims"):  # these need torch to be linked
        subprocess.run([compiler, *flags, "-fsyntax-only", str(KERNELS / f"{name}.cpp")], check=True)
