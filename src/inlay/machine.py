"""Facts about this machine: reported by `inlay doctor`, and compared with the target of a package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTED_TORCH = ("2.13", "2.15")
"""The oldest and newest torch this version of Inlay is tested with (docs/versions.md)."""
INSTALL_TORCH = "pip install torch==2.13.0 (for the CPU build, with the index that pytorch.org/get-started names)"
TESTED_TRANSFORMERS = ("5.20", "5.23")
"""The oldest and newest transformers this version of Inlay is tested with."""
_IMPORT_TIME = time.time()
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")


class CheckStatus(StrEnum):
    """Result of a check: `warn` works with limits, `fail` does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class MachineCheck:
    """One line of the `inlay doctor` output."""

    name: str
    status: CheckStatus
    found: str
    remedy: str = ""


def run_checks() -> Iterator[MachineCheck]:
    """Check everything that Inlay needs, one by one."""
    yield _python()
    yield _torch()
    yield _compiler()
    yield _cpu()
    yield _threads()
    yield _memory()
    yield _transformers()
    yield _package("safetensors", "hf", "weights in safetensors files")
    yield _package("gguf", "gguf", "GGUF files")
    yield _package("tokenizers", "run", "running language models")


def cache_folder() -> Path:
    """Return the cache folder of Inlay, whose contents can be regenerated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "inlay")


def make_private_folder(folder: Path) -> Path:
    """Create a folder that no other user can write to, if needed, and return it. Its files are loaded as code.

    Raises PermissionError if it belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user, who could put code there")
    if found.st_mode & 0o022:
        folder.chmod(0o700)
    return folder


def process_start_time() -> float:
    """Return the start of this process, in seconds since 1970. Older files are unchanged since they were imported."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        ticks += 2  # the resolution of the system clock; Python imports no user code that early
        running = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _IMPORT_TIME
    return min(time.time() - running, _IMPORT_TIME)  # a forked process has modules that were imported before it started


def is_newer_than_process(file: Path) -> bool:
    """Return whether a file may have changed since this process started. A copy can keep an old modification time."""
    found = file.stat()
    return max(found.st_mtime, found.st_ctime) > process_start_time()


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage includes the peak of the parent if that was higher
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cpu_name() -> str:
    """Return the model name of this CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def compiler_version() -> str:
    """Return the C++ compiler and its version, or an empty string."""
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name) is None:
        return ""
    said = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
    return f"{name}: {said.partition(chr(10))[0]}"


def cpu_features() -> tuple[str, ...]:
    """Return the instruction sets of this CPU that kernels use."""
    info = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    return tuple(feature for feature in CPU_FEATURES if feature in flags)


def package_version(package: str) -> str:
    """Return the version of an installed package, or an empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def core_count() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _python() -> MachineCheck:
    found = f"{platform.python_version()} ({platform.machine()})"
    if sys.version_info < (3, 11):  # noqa: UP036 - `inlay doctor` must report a wrong setup
        return MachineCheck("python", CheckStatus.FAIL, found, "Install Python 3.11 or newer.")
    return MachineCheck("python", CheckStatus.OK, found)


def _torch() -> MachineCheck:
    if importlib.util.find_spec("torch") is None:
        return MachineCheck("torch", CheckStatus.FAIL, "not installed", INSTALL_TORCH)
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    found = f"{torch.__version__} ({build} build)"
    oldest, newest = TESTED_TORCH
    if not _release(oldest) <= _release(torch.__version__) <= _release(newest):
        remedy = f"Inlay is tested with torch {oldest} to {newest}: {INSTALL_TORCH}"
        return MachineCheck("torch", CheckStatus.WARN, found, remedy)
    return MachineCheck("torch", CheckStatus.OK, found)


def _compiler() -> MachineCheck:
    """Compile, link and run a program as Inductor does."""
    compiler = os.environ.get("CXX") or "g++"
    remedy = "Install a C++ compiler: apt-get install g++ (Debian), dnf install gcc-c++ (Fedora)."
    if shutil.which(compiler) is None:
        return MachineCheck("compiler", CheckStatus.FAIL, f"{compiler} not found", remedy)
    source = '#include <omp.h>\n#include <cstdio>\nint main() { std::printf("%d", omp_get_max_threads()); }\n'
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder, "check.cpp"), Path(folder, "check")
        file.write_text(source)
        try:
            build = [compiler, "-std=c++17", "-fopenmp", str(file), "-o", str(program)]
            for command in (build, [str(program)]):
                subprocess.run(command, check=True, capture_output=True, timeout=60)
            version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, timeout=60).stdout
        except (subprocess.SubprocessError, OSError):
            return MachineCheck(
                "compiler", CheckStatus.FAIL, f"{compiler} cannot build a C++17 program with OpenMP", remedy
            )
    return MachineCheck("compiler", CheckStatus.OK, f"{compiler} {version.strip()}")


def _cpu() -> MachineCheck:
    features = cpu_features()
    found = ", ".join(features) or "none of the instruction sets that Inlay uses"
    if "avx2" not in features:
        return MachineCheck(
            "cpu", CheckStatus.WARN, found, "Kernels need AVX2 to be fast; capture and inspection work without it."
        )
    return MachineCheck("cpu", CheckStatus.OK, found)


def _threads() -> MachineCheck:
    available = core_count()
    asked = os.environ.get("OMP_NUM_THREADS")
    if asked and asked.isdigit() and int(asked) > available:
        remedy = f"Unset OMP_NUM_THREADS or set it to {available}."
        return MachineCheck("threads", CheckStatus.WARN, f"{asked} requested, {available} cores", remedy)
    return MachineCheck("threads", CheckStatus.OK, f"{asked or available} on {available} cores")


def _memory() -> MachineCheck:
    if not hasattr(os, "sysconf"):
        return MachineCheck("memory", CheckStatus.OK, "unknown")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if total < 4:
        return MachineCheck(
            "memory", CheckStatus.WARN, f"{total:.1f} GiB", "Compilation needs up to 3 GiB in addition to the model."
        )
    return MachineCheck("memory", CheckStatus.OK, f"{total:.1f} GiB")


def _transformers() -> MachineCheck:
    check = _package("transformers", "hf", "Hugging Face models")
    oldest, newest = TESTED_TRANSFORMERS
    if check.status is CheckStatus.OK and not _release(oldest) <= _release(check.found) <= _release(newest):
        remedy = f"Inlay is tested with transformers {oldest} to {newest}: pip install 'transformers=={newest}.*'"
        return MachineCheck("transformers", CheckStatus.WARN, check.found, remedy)
    return check


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _package(name: str, extra: str, purpose: str) -> MachineCheck:
    try:
        return MachineCheck(name, CheckStatus.OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return MachineCheck(
            name, CheckStatus.WARN, f"not installed; needed for {purpose}", f"pip install 'inlay[{extra}]'"
        )
