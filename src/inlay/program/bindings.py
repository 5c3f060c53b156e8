"""The binding table: all inputs and outputs of a program, in a fixed order."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, overload

from inlay.errors import ProgramError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Role(StrEnum):
    """The role of a binding at the program boundary."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True)
class Alias:
    """The output shares the storage of the binding `binding`; `kind` is the source of this information.

    `mutated` comes from the captured signature: the model mutates the binding in place.
    """

    binding: str
    kind: str


@dataclass(frozen=True)
class Binding:
    """One tensor or number at the boundary of a program.

    `name` is the name of the placeholder, or for an output the path of the value in the structure that the model
    returns. `target` is the name in the model: the qualified name of a parameter or buffer, or the name of an
    argument. `dtype` is empty for a Python number.
    """

    name: str
    role: Role
    target: str
    dtype: str
    shape: tuple[int | str, ...]
    alias: Alias | None = None
    persistent: bool = True
    value: int | float | bool | str | None = None
    """The value of a Python number or string at capture, which is baked into the program."""
    below: int | None = None
    """All numbers of an index are below this, if it is known. For the lengths of a KV cache, it is the most tokens of a
    sequence; None if these are the rows of a slot."""

    @property
    def is_tensor(self) -> bool:
        """Whether the binding is a tensor, not a Python number, string or None."""
        return bool(self.dtype)

    @property
    def type_text(self) -> str:
        """The type in short form.

        >>> Binding("x", Role.INPUT, "x", "float32", ("batch", 8)).type_text
        'f32[batch, 8]'
        """
        return tensor_text(self.dtype, self.shape) if self.is_tensor else "scalar"

    @property
    def numel(self) -> int:
        """The number of its values, with symbolic sizes counted as 1."""
        return math.prod(size for size in self.shape if isinstance(size, int))

    @property
    def nbytes(self) -> int:
        """The number of bytes of its values, with symbolic sizes counted as 1.

        >>> Binding("cache", Role.INPUT, "cache", "bfloat16", ("batch", 8, 4)).nbytes
        64
        """
        bits = re.search(r"\d+$", self.dtype)
        return self.numel * (int(bits[0]) // 8 if bits else 1)


SHORT_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
    "complex64": "c64",
    "complex128": "c128",
}
"""dtype → its name in dumps and tables."""


def tensor_text(dtype: object, shape: Iterable[int | str]) -> str:
    """Return a dtype, or its name, and a shape in the short form of dumps and tables.

    >>> tensor_text("bfloat16", ("batch", "length", 576))
    'bf16[batch, length, 576]'
    """
    name = str(dtype).removeprefix("torch.")
    return f"{SHORT_DTYPES.get(name, name)}[{', '.join(map(str, shape))}]"


@dataclass(frozen=True)
class Bindings:
    """A frozen, ordered table of bindings: all inputs in placeholder order, then all outputs.

    >>> table = Bindings((Binding("x", Role.INPUT, "x", "float32", (2,)),))
    >>> table["x"].shape
    (2,)
    """

    rows: tuple[Binding, ...]

    def __post_init__(self) -> None:
        names = Counter(row.name for row in self.rows)
        if len(names) != len(self.rows):
            twice = sorted(name for name, count in names.items() if count > 1)
            raise ProgramError(f"The binding table contains {', '.join(twice)} more than once.")
        for row in self.rows:
            if row.alias is not None and row.alias.binding not in names:
                raise ProgramError(f"{row.name} is an alias of {row.alias.binding}, which is not a binding.")

    def __iter__(self) -> Iterator[Binding]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, key: str) -> Binding: ...
    @overload
    def __getitem__(self, key: int) -> Binding: ...
    def __getitem__(self, key: str | int) -> Binding:
        if isinstance(key, int):
            return self.rows[key]
        for row in self.rows:
            if row.name == key:
                return row
        raise ProgramError(f"There is no binding {key}.", suggest(key, (row.name for row in self.rows)))

    def with_role(self, *roles: Role) -> tuple[Binding, ...]:
        """Return the bindings that have one of these roles, in order."""
        return tuple(row for row in self.rows if row.role in roles)

    @property
    def ins(self) -> tuple[Binding, ...]:
        """The inputs, one for each placeholder, in order."""
        return tuple(row for row in self.rows if row.role is not Role.OUTPUT)

    @property
    def outs(self) -> tuple[Binding, ...]:
        """The outputs, one for each value of the graph's output, in order."""
        return self.with_role(Role.OUTPUT)

    def find_alias(self, state: str) -> Alias:
        """Return the alias of the output that updates this state."""
        return next(row.alias for row in self.outs if row.alias is not None and row.alias.binding == state)

    @property
    def state(self) -> tuple[Binding, ...]:
        """The bindings whose storage an output shares."""
        written = {row.alias.binding for row in self.outs if row.alias is not None}
        return tuple(row for row in self.ins if row.name in written)
