"""Templates of sites: every pattern at random sizes and dtypes, the cases that transforms declare, and attention with
random position masks."""

from __future__ import annotations

import inspect
import operator
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from inlay.errors import CaptureError
from inlay.program.bindings import Role
from inlay.rewrite.rule import DTYPES
from inlay.testing.rewrites import program_of
from inlay.transforms.base import PatternTransform, registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_SIZES = (1, 1, 2, 3, 4, 5, 8)
_NUMBERS = (0.25, 0.5, 1.0, 1e-5)
_FLOAT64_SHARE = 0.15
"""Probability of a pattern in float64; no pattern is traced in float64."""
_EMPTY_SHARE = 0.12
"""Probability that a variable size is 0."""
_MASKED_TRANSFORM = "match_attention"
_MASKS = 2
"""Number of masks per variant of a pattern."""


@dataclass(frozen=True, eq=False)
class Template:
    """A small graph with a value for each placeholder, which is either fixed or replaced by a random one."""

    transform: str
    graph: fx.Graph
    example_inputs: tuple[torch.Tensor, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    """The shapes of the placeholders; a name is a dynamic size."""
    fixed: tuple[bool, ...]
    parameters: tuple[bool, ...]
    """Which placeholders are parameters; transforms may derive other weights from them."""


class Templates:
    """Templates by transform, captured on first use, because a capture takes about half a second.

    A template depends only on the seed and its key, so that a program can be generated again without earlier ones.
    """

    def __init__(self, transforms: Sequence[str] = (), variants: int = 4, seed: int = 0) -> None:
        self.seed = seed
        self.captured_templates: dict[Any, Template] = {}
        self.keys: dict[str, list[tuple[Any, ...]]] = {}
        for name, cls in registry().items():
            if not transforms or name in transforms:
                cases = [*cls.positive_cases(), *cls.negative_cases()]
                keys: list[tuple[Any, ...]] = [("case", index, False) for index in range(len(cases))]
                keys += [("case", index, True) for index, case in enumerate(cases) if case.axes]
                if issubclass(cls, PatternTransform):
                    count = len(list(cls().alternatives({DTYPES[0]})))
                    keys += [("pattern", index, variant) for index in range(count) for variant in range(variants)] * 3
                if name == _MASKED_TRANSFORM:
                    keys += [("mask", index, 0) for index in range(_MASKS * variants)] * 3
                self.keys[name] = keys

    def sample(self, rng: random.Random) -> Template:
        """Choose a transform at random, then one of its templates."""
        name = rng.choice(list(self.keys))
        key = (name, *rng.choice(self.keys[name]))
        if key not in self.captured_templates:
            kind = _KINDS[key[1]]
            self.captured_templates[key] = kind(name, *key[2:], random.Random(f"{self.seed}/{key}"))
        return self.captured_templates[key]


def _case(name: str, index: int, any_size: bool, rng: random.Random) -> Template:
    cls = registry()[name]
    case = [*cls.positive_cases(), *cls.negative_cases()][index]
    return _capture(name, case.function, case.args, case.prerequisites, case.axes if any_size else {})


def _pattern(name: str, index: int, variant: int, rng: random.Random) -> Template:
    """Return a pattern as traced; variants other than 0 have other sizes, some of them dynamic, and other dtypes."""
    cls = registry()[name]
    assert issubclass(cls, PatternTransform)
    dtype = rng.choice(DTYPES) if variant else DTYPES[0]
    alternative = list(cls().alternatives({dtype}))[index]
    ways: list[tuple[Mapping[str, Any], Mapping[str, Mapping[int, str]]]] = [(alternative.example, {})]
    if variant:
        example = resize_example(alternative.example, rng)
        if rng.random() < _FLOAT64_SHARE:
            example = {each: _to_float64(value) for each, value in example.items()}
        ways = [
            (example, pick_dynamic_axes(alternative.example, rng) if rng.random() < 0.5 else {}),
            (example, {}),
            *ways,
        ]
    for values, axes in ways[:-1]:
        # A pattern may require constant sizes and may not support some sizes, such as zero channels.
        try:
            return _capture(name, *_bind_constants(alternative.function, values), axes=axes)
        except CaptureError:
            continue
    return _capture(name, *_bind_constants(alternative.function, alternative.example))


def _bind_constants(
    function: Callable[..., Any], example: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return the function of only its tensors, with their names in the signature, because axes refer to these names."""
    names = [each for each in inspect.signature(function).parameters if isinstance(example[each], torch.Tensor)]
    numbers = {each: value for each, value in example.items() if each not in names}

    def named(*values: torch.Tensor) -> Any:
        return function(**dict(zip(names, values, strict=True)), **numbers)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return named, [example[each] for each in names]


def _mask(name: str, index: int, variant: int, rng: random.Random) -> Template:
    """Return attention with a mask computed from positions, usually of dynamic length."""
    function, values = random_masked_attention(rng)
    axes = {each: {2: LENGTH} for each in ("q", "k", "v")} if rng.random() < 0.85 else {}
    return _capture(name, function, values, axes=axes)


_KINDS: dict[str, Callable[..., Template]] = {"case": _case, "pattern": _pattern, "mask": _mask}


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _related(size: int, other: int) -> bool:
    """Return whether one of two sizes may be derived from the other."""
    return size != other and (other % size == 0 or (other > 1 and size % other == 0))


def pick_dynamic_axes(example: Mapping[str, Any], rng: random.Random) -> dict[str, dict[int, str]]:
    """Return axes for one or two sizes of an example that are unrelated to its other sizes and integers.

    >>> import random
    >>> pick_dynamic_axes({"x": torch.ones(3, 10), "y": torch.ones(3), "half": 5}, random.Random(0))
    {'x': {0: 'size_3'}, 'y': {0: 'size_3'}}
    """
    tensors = {name: value for name, value in example.items() if isinstance(value, torch.Tensor)}
    numbers = {value for value in example.values() if type(value) is int}
    sizes = {size for value in tensors.values() for size in value.shape}
    others = sizes | numbers
    free = sorted(size for size in sizes - numbers if size > 2 and not any(_related(size, each) for each in others))
    chosen = rng.sample(free, min(len(free), rng.choice((1, 1, 2))))
    found = {
        name: {axis: f"size_{size}" for axis, size in enumerate(value.shape) if size in chosen}
        for name, value in tensors.items()
    }
    return {name: axes for name, axes in found.items() if axes}


def resize_example(example: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the example at other sizes: each odd prime factor is replaced by a random size, 1 and 2 do not change.

    >>> import random
    >>> made = resize_example({"x": torch.ones(3, 10), "half": 5}, random.Random(1))
    >>> made["x"].shape[1] == 2 * made["half"]
    True
    """
    sizes: dict[int, int] = {}
    magnitude = rng.choice(_NUMBERS) if rng.random() < 0.7 else None

    def drawn() -> int:
        return 0 if rng.random() < _EMPTY_SHARE else rng.choice(_SIZES)

    def size(number: int) -> int:
        made, divisor = 1, 2
        while number > 1:
            while number % divisor == 0:
                number //= divisor
                if divisor > 2 and divisor not in sizes:
                    sizes[divisor] = drawn()
                made *= sizes.get(divisor, 2)
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


def _capture(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    after: Sequence[str] = (),
    axes: Mapping[str, Mapping[int, str]] | None = None,
) -> Template:
    program = program_of(function, args, axes, after)
    given = iter(args)
    leaves, fixed = [], []
    parameters = tuple(row.role is Role.PARAMETER for row in program.bindings.ins)
    for row in program.bindings.ins:
        value = next(given) if row.role is Role.INPUT else program.tensors[row.name].read()
        leaves.append(value)
        fixed.append(row.role is not Role.INPUT or not value.is_floating_point())
    shapes = tuple(row.shape for row in program.bindings.ins)
    return Template(name, program.graph, tuple(leaves), shapes, tuple(fixed), parameters)


LENGTH = "length"
"""The name of the position axis."""
_COMPARE = (operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne)
_LARGEST = 12
"""The largest constant; each side of a comparison adds at most four of them."""


def random_masked_attention(rng: random.Random) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return a function that computes a mask and uses it in one or two attention calls, and arguments for it."""
    mask = _random_mask(rng)
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    form = rng.choice(("seen", "seen", "lowest", "infinite"))
    layers = rng.choice((1, 1, 2))
    length, heads = rng.randint(3, 9), rng.choice((1, 2))
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        seen = mask(places[:, None], places[None, :])[None, None]
        hidden = torch.finfo(q.dtype).min if form == "lowest" else float("-inf")
        given = seen if form == "seen" else torch.where(seen, 0.0, hidden).to(q.dtype)
        x = sdpa(q, k, v, attn_mask=given)
        return sdpa(x.tanh(), k, v, attn_mask=given) if layers == 2 else x

    return attention, [torch.ones(rng.choice((1, 2)), heads, length, 4, dtype=dtype)] * 3


def _random_mask(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a mask in one of many forms: usually causal or causal with a window, rarely another one."""
    steps = [_causal(rng) if rng.random() < 0.9 else _any(rng)]
    steps += [_window(rng) if rng.random() < 0.75 else _any(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    joins = [operator.and_ if rng.random() < 0.9 else operator.or_ for _ in steps[1:]]

    def mask(rows: Tensor, columns: Tensor) -> Tensor:
        seen = steps[0](rows, columns)
        for join, step in zip(joins, steps[1:], strict=True):
            seen = join(seen, step(rows, columns))
        return seen

    return mask


def _causal(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a causal mask with the same constants added on both sides."""
    added = _constants(rng, rng.choice((0, 0, 1, 2)))
    if rng.random() < 0.5:
        return lambda rows, columns: _plus(columns, added) <= _plus(rows, added)
    return lambda rows, columns: _plus(rows, [*added, 1]) > _plus(columns, added)


def _window(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a window mask; the window is the sum of up to four constants."""
    parts = [-abs(each) for each in _constants(rng, rng.choice((1, 1, 2, 4)))]
    if rng.random() < 0.5:
        return lambda rows, columns: columns > _plus(rows, parts)
    return lambda rows, columns: rows - columns < -sum(parts)


def _any(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    compare = rng.choice(_COMPARE)
    left, right = (_constants(rng, rng.choice((0, 1, 2))) for _ in range(2))
    return lambda rows, columns: compare(_plus(columns, left), _plus(rows, right))


def _constants(rng: random.Random, count: int) -> list[float]:
    whole = [rng.randint(1, _LARGEST) * rng.choice((1, 1, -1)) for _ in range(count)]
    return [each + rng.choice((0.0, 0.0, 0.5)) if rng.random() < 0.2 else each for each in whole]


def _plus(positions: Tensor, constants: list[float]) -> Tensor:
    for constant in constants:
        positions = positions + constant
    return positions
