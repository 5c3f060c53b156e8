"""What places look like: every pattern at random sizes, and the examples that transforms state themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.bindings import Role
from inlay.testing.rewrites import program_of
from inlay.transforms.base import Rewrite, registry

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

_SIZES = (1, 1, 2, 3, 4, 5, 8)
_NUMBERS = (0.25, 0.5, 1.0, 1e-5)
_DTYPES = {torch.float32, torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Template:
    """A small graph: its placeholders are leaves, each with a value to be replaced by a random one, or a fixed one."""

    transform: str
    graph: fx.Graph
    leaves: tuple[torch.Tensor, ...]
    fixed: tuple[bool, ...]
    parameters: tuple[bool, ...]
    """Which leaves are parameters of the model: transforms may make other weights of them."""


class Templates:
    """Templates by transform, captured when first drawn: a capture takes about half a second."""

    def __init__(self, only: Sequence[str] = (), variants: int = 1) -> None:
        self.known: dict[Any, Template] = {}
        self.keys: dict[str, list[tuple[Any, ...]]] = {}
        for name, cls in registry().items():
            if not only or name in only:
                keys: list[tuple[Any, ...]] = [("case", index) for index in range(len(cls.fires()) + len(cls.leaves()))]
                if issubclass(cls, Rewrite):
                    count = len(list(cls().alternatives(_DTYPES)))
                    keys += [("pattern", index, variant) for index in range(count) for variant in range(variants)] * 3
                self.keys[name] = keys

    def draw(self, rng: random.Random) -> Template:
        """A transform by chance, then one of its templates."""
        name = rng.choice(list(self.keys))
        key = (name, *rng.choice(self.keys[name]))
        if key not in self.known:
            self.known[key] = _case(*key) if key[1] == "case" else _pattern(key, rng)
        return self.known[key]


def _case(name: str, kind: str, index: int) -> Template:
    cls = registry()[name]
    case = [*cls.fires(), *cls.leaves()][index]
    return _capture(name, case.function, case.args, case.after)  # sizes are numbers here, whatever the case's axes


def _pattern(key: tuple[Any, ...], rng: random.Random) -> Template:
    name, _, index, variant = key
    cls = registry()[name]
    assert issubclass(cls, Rewrite)
    alternative = list(cls().alternatives(_DTYPES))[index]
    example = resized(alternative.example, rng) if variant else dict(alternative.example)
    tensors = [each for each, value in example.items() if isinstance(value, torch.Tensor)]
    numbers = {each: value for each, value in example.items() if each not in tensors}

    def function(*values: torch.Tensor) -> Any:
        return alternative.function(**dict(zip(tensors, values, strict=True)), **numbers)

    return _capture(name, function, [example[each] for each in tensors])


def resized(example: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same example at other sizes: each odd prime in a size is a size of its own, 1 and 2 are themselves.

    >>> import random
    >>> made = resized({"x": torch.ones(3, 10), "half": 5}, random.Random(1))
    >>> made["x"].shape[1] == 2 * made["half"]
    True
    """
    sizes: dict[int, int] = {}
    magnitude = rng.choice(_NUMBERS) if rng.random() < 0.7 else None

    def size(number: int) -> int:
        made, divisor = 1, 2
        while number > 1:
            while number % divisor == 0:
                number //= divisor
                made *= divisor if divisor == 2 else sizes.setdefault(divisor, rng.choice(_SIZES))
            divisor += 1
        return made

    def value(old: Any) -> Any:
        if isinstance(old, torch.Tensor):
            steps = old.stride()
            strides = sorted(range(old.dim()), key=lambda axis: -steps[axis])
            whole = torch.ones([size(old.shape[axis]) for axis in strides], dtype=old.dtype)
            return whole.permute([strides.index(axis) for axis in range(old.dim())])
        if isinstance(old, float):
            return (magnitude or rng.choice(_NUMBERS)) * (-1 if old < 0 else 1)
        return size(old) if type(old) is int else old

    return {name: value(old) for name, old in example.items()}


def _capture(name: str, function: Callable[..., Any], args: Sequence[Any], after: Sequence[str] = ()) -> Template:
    program = program_of(function, args, after=after)
    given = iter(args)
    leaves, fixed = [], []
    parameters = tuple(row.role is Role.PARAMETER for row in program.bindings.ins)
    for row in program.bindings.ins:
        value = next(given) if row.role is Role.INPUT else program.tensors[row.name].read()
        leaves.append(value)
        fixed.append(row.role is not Role.INPUT or not value.is_floating_point())
    return Template(name, program.graph, tuple(leaves), tuple(fixed), parameters)
