"""The binding table: everything that goes into or comes out of a program, in one order."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, overload

from inlay.errors import ProgramError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterator


class Role(StrEnum):
    """What a binding is to the caller."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True)
class Alias:
    """This output *is* the storage of the binding `binding`; `kind` says how that is known.

    `mutated` comes from the captured signature: the model wrote to it in place.
    """

    binding: str
    kind: str


@dataclass(frozen=True)
class Binding:
    """One tensor or number that crosses the program's boundary.

    `name` is the placeholder's name for everything that goes in; for an output it is the path of
    the value in what the model returns. `target` is the name users know: the qualified name of
    a parameter or buffer, the name of an argument. `dtype` is empty for a Python number.
    """

    name: str
    role: Role
    target: str
    dtype: str
    shape: tuple[int | str, ...]
    alias: Alias | None = None
    persistent: bool = True
    value: int | float | bool | str | None = None
    """What a Python number or string was when the program was captured: it is part of the program."""

    @property
    def is_tensor(self) -> bool:
        """Whether the binding is a tensor, not a Python number, string or None."""
        return bool(self.dtype)

    @property
    def type_text(self) -> str:
        """The type as people write it.

        >>> Binding("x", Role.INPUT, "x", "float32", ("batch", 8)).type_text
        'f32[batch, 8]'
        """
        return tensor_text(self.dtype, self.shape) if self.is_tensor else "scalar"

    @property
    def nbytes(self) -> int:
        """The bytes of its values, sizes that have no number counted as 1.

        >>> Binding("cache", Role.INPUT, "cache", "bfloat16", ("batch", 8, 4)).nbytes
        64
        """
        bits = re.search(r"\d+$", self.dtype)
        known = (size for size in self.shape if isinstance(size, int))
        return math.prod(known) * (int(bits[0]) // 8 if bits else 1)


_SHORT_DTYPES = {
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


def tensor_text(dtype: str, shape: tuple[int | str, ...]) -> str:
    """A dtype and a shape in the short form used by every dump and table.

    >>> tensor_text("bfloat16", ("batch", "length", 576))
    'bf16[batch, length, 576]'
    """
    return f"{_SHORT_DTYPES.get(dtype, dtype)}[{', '.join(map(str, shape))}]"


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
            raise ProgramError(f"The binding table names {', '.join(twice)} more than once.")
        for row in self.rows:
            if row.alias is not None and row.alias.binding not in names:
                raise ProgramError(f"{row.name} is declared to live in {row.alias.binding}, which is no binding.")

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
        raise ProgramError(f"No binding is called {key}.", suggest(key, (row.name for row in self.rows)))

    def with_role(self, *roles: Role) -> tuple[Binding, ...]:
        """The bindings that have one of these roles, in order."""
        return tuple(row for row in self.rows if row.role in roles)

    @property
    def ins(self) -> tuple[Binding, ...]:
        """What goes in, one per placeholder, in placeholder order."""
        return tuple(row for row in self.rows if row.role is not Role.OUTPUT)

    @property
    def outs(self) -> tuple[Binding, ...]:
        """What comes out, one per value of the graph's output, in order."""
        return self.with_role(Role.OUTPUT)

    def find_alias(self, state: str) -> Alias:
        """How it is known that this state is written to."""
        return next(row.alias for row in self.outs if row.alias is not None and row.alias.binding == state)

    @property
    def state(self) -> tuple[Binding, ...]:
        """The bindings whose storage some output writes to."""
        written = {row.alias.binding for row in self.outs if row.alias is not None}
        return tuple(row for row in self.ins if row.name in written)
