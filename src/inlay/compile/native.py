"""Adapter: compiled libraries, loaded directly. Imports no compiler.

torch.cpu._init_amx comes first: code with AMX instructions dies without it. A library is a file `NAME.so`; the calls
that it leaves to torch are listed in `NAME.json` beside it, where torch's loader looks for them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _aoti

from inlay.errors import PackageError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]

_AGAIN = "Build the package again."


@cache
def _prepare() -> None:
    torch.cpu._init_amx()


class Library:
    """A compiled library. Each container has constants of its own, which stay the tensors they are.

    `takes` and `gives` say how many tensors a call takes and gives, where that is known.
    """

    def __init__(self, file: Path, takes: int | None = None, gives: int | None = None) -> None:
        self.file, self.takes, self.gives = file, takes, gives

    def bind(self, constants: Mapping[str, torch.Tensor]) -> Run:
        """A container whose constants are these tensors, which must be all it has and of the right types."""
        _prepare()
        try:
            container: Any = _aoti.AOTIModelContainerRunnerCpu(str(self.file), 1)
        except RuntimeError as error:
            raise PackageError(f"{self.file.name} cannot be loaded: {one_line(error)}.", _AGAIN) from error
        reported = container.get_constant_names_to_original_fqns()
        if set(reported) != set(constants):
            strange = sorted(set(reported) ^ set(constants))
            raise PackageError(f"{self.file.name} and its manifest disagree about the constant {strange[0]}.", _AGAIN)
        types = container.get_constant_names_to_dtypes()
        for name, value in constants.items():
            if types[name] != _NUMBERS[value.dtype]:
                raise PackageError(f"{self.file.name} wants {name} in another format than {value.dtype}.", _AGAIN)
        for known, spec in zip((self.takes, self.gives), container.get_call_spec(), strict=True):
            if known is not None and spec.count('"type": null') != known:
                raise PackageError(f"{self.file.name} takes or gives something else than its manifest says.", _AGAIN)
        if constants:
            container.update_constant_buffer(dict(constants), False, True, True)
        return container.run  # type: ignore[no-any-return]


_NUMBERS = {
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
