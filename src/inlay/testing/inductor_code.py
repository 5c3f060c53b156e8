"""`generated_code`: the code that Inductor generates, with kernel counts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.testing.compiler import collect_sources, disable_caches
from inlay.testing.inputs import call, compile_model, copy_inputs, copy_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.testing.inputs import Inputs, Model

_KERNEL_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\(|^extern \"C\"\s+void\s+(\w+)\(", re.MULTILINE)
_BODY = re.compile(r"r?'''.*?'''", re.DOTALL)
_EXTERNAL = re.compile(r"\b(?:extern_kernels\.(\w+)|torch\.ops\.(\w+\.\w+)\.\w+|aoti_torch_cpu_(\w+))\(")


@dataclass(frozen=True)
class GeneratedCode:
    """The generated code of one call."""

    sources: tuple[str, ...]
    """One file per graph, as Inductor wrote it."""
    kernels: Mapping[str, int]
    """Generated kernels and their call counts."""
    external_kernels: Mapping[str, int]
    """Calls of existing kernels, by operator."""

    @property
    def source(self) -> str:
        """All files as one text."""
        return "\n".join(self.sources)


def generated_code(
    model: Model,
    inputs: Inputs,
    *,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> GeneratedCode:
    """Return the code that Inductor generates when the model is called, in Python or, with `cpp_wrapper`, in C++.

    Kernels are C++ on the CPU. The caches are disabled and the compiler is reset, so that everything is compiled.

    >>> import torch
    >>> code = generated_code(lambda x: x @ x, torch.ones(2, 2))
    >>> dict(code.kernels), dict(code.external_kernels)
    ({}, {'mm': 1})
    """
    with disable_caches():
        sources = collect_sources(
            lambda: call(compile_model(copy_model(model), backend, options, dynamic), copy_inputs(inputs))
        )
    if not sources:
        raise UsageError("Inductor generated no code.", "Use a backend that calls Inductor, and enable torch.compile.")
    kernels: Counter[str] = Counter()
    external: Counter[str] = Counter()
    for source in sources:
        names = {first or second for first, second in _KERNEL_DEFINITION.findall(source)} - {"kernel"}
        text = _BODY.sub("''", source)
        kernels.update(dict.fromkeys(names, 0))
        kernels.update(_calls(text, names))
        external.update("".join(each).removesuffix("_out").removeprefix("aten.") for each in _EXTERNAL.findall(text))
    return GeneratedCode(tuple(sources), dict(kernels), dict(external))


def _calls(text: str, names: set[str]) -> list[str]:
    if not names:
        return []
    found = re.finditer(r"^[ \t]+(" + "|".join(map(re.escape, sorted(names))) + r")(?:\.run)?\(", text, re.MULTILINE)
    return [each[1] for each in found]
