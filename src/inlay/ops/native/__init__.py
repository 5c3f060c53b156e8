"""The C++ kernels, which are built with the compiler that Inductor also requires, and loaded with a package."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from inlay import machine
from inlay.errors import PackageError, UsageError

LIBRARY_NAME = "kernels.so"
"""Name of the file in a package."""
ABI = 1
"""Version of the functions of run.cpp. Increase it when one of them changes: packages of other versions are refused."""
_PORTABLE_MARCH = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}
"""Supported architectures, and the instruction set that any recent processor of each has: AVX2, or NEON."""
TARGETS = {"native": "native", "portable": _PORTABLE_MARCH.get(platform.machine(), "native")}
"""Build targets: this processor, or any recent processor of its architecture."""
_FOLDER = Path(__file__).parent


def build(file: Path, target: str = "native") -> None:
    """Compile the kernels for a target into a shared library."""
    import torch

    if platform.machine() not in _PORTABLE_MARCH:
        raise UsageError(
            f"The kernels do not support {platform.machine()}.", f"Build on {' or '.join(_PORTABLE_MARCH)}."
        )
    torch_home = Path(torch.__file__).parent
    compiler = os.environ.get("CXX", "g++")
    if not _has_compiler():
        raise UsageError(f"The kernels need {compiler}, which is not installed.", "Install g++, or set CXX.")
    flags = ["-std=c++17", "-O3", f"-march={TARGETS[target]}", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno"]
    flags += ["-fvisibility=hidden", "-Wl,-Bsymbolic", f"-DINLAY_TAG={build_tag(target)}", f"-DINLAY_ABI={ABI}"]
    sources = sorted(str(source) for source in _FOLDER.glob("*.cpp"))
    linking = [f"-I{torch_home / 'include'}", f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-Wl,--strip-all"]
    done = subprocess.run([compiler, *flags, "-o", str(file), *sources, *linking], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{compiler} could not compile the kernels: {done.stderr.strip().splitlines()[0]}")


def install(file: Path, target: str = "native") -> None:
    """Write the kernels for a target to `file`. They are compiled once and cached in the user's cache folder."""
    try:
        folder = machine.make_private_folder(machine.cache_folder() / "kernels")
        kept = folder / f"kernels-{build_tag(target)}.so"
        if _copy_from_cache(kept, file):
            return
        staging = tempfile.TemporaryDirectory(dir=folder)
    except OSError:  # the folder belongs to another user, or is not writable
        build(file, target)
        return
    with staging:
        made = Path(staging.name, LIBRARY_NAME)
        build(made, target)
        (hashed := made.with_suffix(".sha256")).write_text(_sha256(made))
        hashed.replace(kept.with_suffix(".sha256"))
        shutil.copyfile(made, file)
        made.replace(kept)


def _copy_from_cache(kept: Path, file: Path) -> bool:
    """Copy cached kernels. Return whether they exist and match their checksum."""
    try:
        shutil.copyfile(kept, file)
        return _sha256(file) == kept.with_suffix(".sha256").read_text()
    except OSError:
        return False


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@cache
def build_tag(target: str) -> str:
    """Return a hash of the kernels' source, the compiler, torch, and this processor if the target is `native`.

    It is part of the symbols that compiled pieces call, so several versions can be loaded into one process.
    """
    import torch

    compiler = os.environ.get("CXX", "g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout if _has_compiler() else ""
    parts = [target, str(ABI), torch.__version__, version, *(machine.cpu_features() if target == "native" else ())]
    sources = [source.read_bytes() for source in sorted(_FOLDER.glob("*.[hc]*"))]
    return hashlib.sha256(b"\0".join([*(part.encode() for part in parts), *sources])).hexdigest()[:12]


def _has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def declaration(name: str, arguments: str, target: str) -> str:
    """Return the C declaration of an operator's kernel for compiled code."""
    symbol = f"inlay_{build_tag(target)}_{name}"
    return f'AOTITorchError aoti_torch_cpu_{name}({arguments}, AtenTensorHandle*) __asm__("{symbol}")'


def load(file: Path) -> ctypes.CDLL:
    """Load kernels, so that libraries loaded later find them. Several threads may call them concurrently."""
    try:
        library = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        library.inlay_piece_new.restype = library.inlay_plan_new.restype = ctypes.c_void_p
        library.inlay_last_error.restype = ctypes.c_char_p
        abi = library.inlay_abi()
    except (OSError, AttributeError) as error:
        raise PackageError(f"{file.name} cannot be loaded: {error}.", "Build the package again.") from error
    if abi != ABI:
        raise PackageError(
            f"The package was built by another version of Inlay: its kernels have interface {abi}, not {ABI}.",
            "Build the package again.",
        )
    return library
