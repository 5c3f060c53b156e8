"""The key of a build in the cache: the hash of all factors (name and value) that the build depends on."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inlay import lowering, machine
from inlay.build_cache.module_files import SITE_FOLDERS, collect_sources, source_file
from inlay.ops import native
from inlay.package.files import stamp
from inlay.package.weights_file import raw_bytes
from inlay.program.bindings import Role
from inlay.program.graphs import all_nodes
from inlay.program.text.literals import registering_module
from inlay.program.text.printer import dump
from inlay.program.weights import InMemoryTensor, MissingTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from inlay.config import ResolvedConfig
    from inlay.program.program import Program
    from inlay.transforms.pass_manager import TransformStep

COMPILER = ("inlay.lowering.lower", "inlay.package.writer", "inlay.transforms.pass_manager")
"""Modules that turn programs into packages; their imports count too."""
_SETTINGS = ("TORCHINDUCTOR_", "TORCH_COMPILE", "AOT_INDUCTOR", "CXXFLAGS", "CPATH")
_NO_SETTINGS = ("TORCHINDUCTOR_CACHE_DIR",)
_SHORT = 60
_IGNORED_INDUCTOR_SETTINGS = ("aot_inductor.metadata", ".cutlass_dir")
"""Settings that Inlay sets, and the folder of GPU kernel sources, which by default is in the working folder."""
_PLAIN = (str, int, float, bool, type(None))


class NotCacheable(Exception):  # noqa: N818 - it is not an error
    """The result of a build cannot be cached; the message is the reason."""


@dataclass(frozen=True)
class BuildRequest:
    """A build: a captured program, its configuration and options."""

    program: Program
    resolved: ResolvedConfig
    steps: Sequence[TransformStep]
    level: str = "native"
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that neither the program nor the configuration contains."""


def collect_factors(request: BuildRequest) -> dict[str, str]:
    """Return all factors that the result depends on, by name. Raise `NotCacheable` if they cannot be determined."""
    found = {**_program_factors(request.program), **request.options, "kernels for": request.level}
    found["order of transforms"] = _hash(" ".join(entry.key for entry in request.resolved.entries).encode())
    for entry in request.resolved.entries:
        for name, setting in entry.options.items():
            found[f"setting {entry.key}.{name}"] = _short(json.dumps(setting.value, default=str))
    found |= _source_factors([*COMPILER, *_modules(request.steps), *_operator_modules(request.program)])
    return found | machine_factors(request.level) | {"settings of Inductor": _inductor()}


def compute_key(factors: Mapping[str, str]) -> str:
    """Return the key of a build: the hash of all factors.

    >>> compute_key({"a": "1", "b": "2"}) == compute_key({"b": "2", "a": "1"}) != compute_key({"a": "1", "b": "3"})
    True
    """
    return _hash(json.dumps(sorted(factors.items())).encode())


def _program_factors(program: Program) -> dict[str, str]:
    """Return factors of the program (without its name), its facts and its weights."""
    found = {
        "program": _hash(dump(program).partition("\n")[2].encode()),
        "facts": _hash(repr((program.facts.architecture, list(program.facts.items()))).encode()),
    }
    memory: dict[str, list[str]] = {"values in the program": [], "weights in memory": []}
    for row in program.bindings.ins:
        ref = program.tensors.get(row.name)
        if ref is None or isinstance(ref, MissingTensor):
            continue
        files = set(_files(ref))
        for file in files:
            found[f"weights {file}"] = stamp(file)
        if not files:
            kind = "weights in memory" if row.role is Role.PARAMETER else "values in the program"
            memory[kind].append(f"{row.target} {_tensor_hash(row.target, ref)}")
    return found | {name: _hash("\n".join(lines).encode()) for name, lines in memory.items()}


def _files(ref: Any) -> Iterator[Path]:
    """Yield the files that a weight reference reads."""
    for value in [getattr(ref, each.name) for each in fields(ref)] if is_dataclass(ref) else ():
        if isinstance(value, Path):
            yield value.resolve()
        elif isinstance(value, (tuple, list)):
            for each in value:
                yield from (part for item in (each if isinstance(each, tuple) else (each,)) for part in _files(item))
        else:
            yield from _files(value)


def _tensor_hash(name: str, ref: Any) -> str:
    if not isinstance(ref, InMemoryTensor):
        raise NotCacheable(f"The source of {name} is unknown: {ref.origin}.")
    try:
        return _hash(raw_bytes(ref.tensor))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise NotCacheable(f"{name} is a tensor whose bytes cannot be read.") from error


def _modules(steps: Iterable[TransformStep]) -> Iterator[str]:
    """Yield the modules that define the enabled transforms."""
    for step in steps:
        if not step.transform.options.enabled:
            continue
        kind = type(step.transform)
        for cls in (*kind.__mro__, *type(step.transform.options).__mro__):
            top = cls.__module__.partition(".")[0]
            if cls is kind or (top not in sys.stdlib_module_names and not _is_installed(cls.__module__)):
                _check_has_source(step.key, cls)
                yield cls.__module__


def _is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package, for which the version is the factor."""
    file = source_file(module)
    return file is not None and not SITE_FOLDERS.isdisjoint(file.parts)


def _check_has_source(transform: str, cls: type) -> None:
    """Check that a class is defined at the top level of a file, so that the file determines its behavior."""
    methods = {name: each for name, each in vars(cls).items() if inspect.isfunction(each)}
    if is_dataclass(cls):  # special methods of a dataclass are generated
        methods = {name: each for name, each in methods.items() if not name.startswith("__")}
    strange = [name for each in methods.values() if not Path(name := each.__code__.co_filename).is_file()]
    if source_file(cls.__module__) is None or strange:
        where = strange[0] if strange else cls.__module__
        raise NotCacheable(f"The transform {transform} has no source file: it was defined in {where}.")
    if "<locals>" in cls.__qualname__:
        raise NotCacheable(f"The transform {transform} was defined inside a function and may depend on it.")


def _operator_modules(program: Program) -> set[str]:
    """Return the modules that registered custom operators of the program."""
    found = {registering_module(node.target) for node in all_nodes(program.graph) if node.op == "call_function"}
    return {name for name in found if name and source_file(name) is not None}


def _source_factors(modules: Iterable[str]) -> dict[str, str]:
    read = collect_sources(modules, without_imports=("inlay.flow",))
    for name, (file, _) in read.files.items():
        if machine.is_newer_than_process(file):
            raise NotCacheable(f"{name} was changed after this process started, which may run the old version.")
    found = {f"source {name}": value for name, (_, value) in read.files.items()}
    headers = (Path(lowering.__file__).parent / "headers").iterdir()
    for file in sorted([*Path(native.__file__).parent.glob("*.[hc]*"), *headers]):
        found[f"source inlay/{file.relative_to(Path(__file__).parents[1])}"] = _hash(file.read_bytes())
    return found | {f"package {name}": value for name, value in read.packages.items()}


def machine_factors(level: str) -> dict[str, str]:
    """Return the factors that are not properties of the model: libraries, compiler, CPU and settings."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "C++ compiler": machine.compiler_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()),
        **{
            f"package {name}": machine.package_version(name)
            for name in ("inlay", "transformers", "tokenizers", "gguf")
            if machine.package_version(name)
        },
    }
    if level == "native":
        found |= {"CPU": machine.cpu_name(), "CPU features": " ".join(machine.cpu_features())}
    for name, value in os.environ.items():
        if name.startswith(_SETTINGS) and name not in _NO_SETTINGS:
            found[f"environment {name}"] = _short(value)
    return found


def _inductor() -> str:
    """Return the hash of the Inductor settings of this process."""
    config: Any = sys.modules["torch._inductor.config"]  # `rewrite` has imported it
    found = {
        name: value for name, value in config.get_config_copy().items() if not name.endswith(_IGNORED_INDUCTOR_SETTINGS)
    }
    strange = [name for name, value in found.items() if not _is_plain(value)]
    if strange:
        raise NotCacheable(f"torch._inductor.config.{strange[0]} is set to code, which cannot be hashed.")
    return _hash(json.dumps(found, sort_keys=True, default=sorted).encode())


def _is_plain(value: Any) -> bool:
    """Whether a value is plain data; a function is not."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple, set)) else isinstance(value, _PLAIN)


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else _hash(text.encode())


def _hash(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
