"""`assert_rewrites` and `assert_untouched`: assertions about the matches and results of a transform."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from inlay.errors import one_line
from inlay.frontend import Example, capture
from inlay.insight.interpreter import find_type_mismatches, match_layout, other_sizes, random_inputs
from inlay.program.bindings import Role
from inlay.program.graphs import MODULE, SOURCE, all_nodes
from inlay.program.program import Program
from inlay.program.text.diff import diff
from inlay.program.text.printer import dump
from inlay.rewrite import Rule
from inlay.rewrite.near_misses import find_near_misses
from inlay.rewrite.reasons import Reason
from inlay.transforms.base import Numerics, Transform, TransformResult, find_transform
from inlay.transforms.pass_manager import check_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_ROUNDS = 3


class _FunctionModule(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


def program_of(
    model: torch.nn.Module | Callable[..., Any] | Program,
    args: Sequence[Any],
    axes: Mapping[str, Mapping[int, str]] | None = None,
    prerequisites: Sequence[str] = (),
) -> Program:
    """Capture a module or a plain function and run the named transforms on it; a Program is returned unchanged.

    >>> program_of(lambda x: x.relu() + 1, [torch.ones(2)]).op_counts()
    Counter({'aten.relu.default': 1, 'aten.add.Tensor': 1})
    """
    if isinstance(model, Program):
        return model
    module = model if isinstance(model, torch.nn.Module) else _FunctionModule(model)
    if axes and module is not model:
        module.forward = model  # axes refer to the argument names of the function
    program = capture(Example(module, tuple(args), axes=axes or {}))
    for name in prerequisites:
        program = find_transform(name)().apply(program.copy()).program
    return program


def assert_rewrites(
    before: torch.nn.Module | Callable[..., Any] | Program,
    transform: str | Transform,
    expected: torch.nn.Module | Callable[..., Any] | None = None,
    *,
    args: Sequence[Any],
    sites: int,
    axes: Mapping[str, Mapping[int, str]] | None = None,
    prerequisites: Sequence[str] = (),
) -> Program:
    """Assert that the transform matches `sites` times, gives the structure of `expected`, and keeps types and results.

    Results are compared on random inputs with the shapes, dtypes and strides of `args`, on large numbers, on zeros, and
    at other sizes of dynamic `axes`. The comparison is exact if the transform declares exact numerics, and is skipped
    if it adds inputs. Inputs must not change. Every intermediate value is compared with the type that its node
    declares, so that fake kernels match real kernels. Metadata other than types and sources must not matter; the
    transform is repeated without it.

    >>> silu = torch.nn.functional.silu
    >>> two = [torch.ones(3), torch.ones(3)]
    >>> program = assert_rewrites(lambda g, u: silu(g) * u, "match_swiglu", args=two, sites=1)
    """
    program = program_of(before, args, axes, prerequisites)
    applied = _apply(program, transform)
    if applied.sites != sites:
        rule: Any = _instance(transform)
        misses = find_near_misses(program, rule).misses if isinstance(rule, Rule) else applied.misses
        why = "; ".join(miss.reason for miss in misses) or "no misses"
        raise AssertionError(f"{applied.sites} sites instead of {sites}: {why}")
    faulty = [miss.reason for miss in applied.misses if miss.kind is Reason.REPLACEMENT]
    assert not faulty, faulty[0]
    bare = program.copy()
    for node in all_nodes(bare.graph):
        node.meta = {key: node.meta[key] for key in ("val", SOURCE, MODULE) if key in node.meta}
    assert dump(_apply(bare, transform).program) == dump(applied.program), "the result depends on hidden metadata"
    if expected is not None:
        found = diff(program_of(expected, args, axes), applied.program)
        rows = "\n".join(f"{row.left!r} ≠ {row.right!r}" for row in found.hunks(0))
        assert found.is_equal, f"expected ≠ result:\n{rows}"
    if not _instance(transform).adds_inputs:
        _assert_same_numbers(program, applied.program, args, _instance(transform).numerics)
    return applied.program


def assert_untouched(
    before: torch.nn.Module | Callable[..., Any] | Program,
    transform: str | Transform,
    *,
    args: Sequence[Any],
    axes: Mapping[str, Mapping[int, str]] | None = None,
    prerequisites: Sequence[str] = (),
) -> None:
    """Assert that the transform does not match and does not change the program."""
    program = program_of(before, args, axes, prerequisites)
    applied = _apply(program, transform)
    assert applied.sites == 0, f"{applied.sites} sites where none are allowed: {applied.matched_roots}"
    assert dump(applied.program) == dump(program), "nothing matched, yet the program changed"


def _instance(transform: str | Transform) -> Transform:
    return find_transform(transform)() if isinstance(transform, str) else transform


def _apply(program: Program, transform: str | Transform) -> TransformResult:
    applied = _instance(transform).apply(program.copy())
    check_metadata(applied.program, program)
    return applied


def _assert_same_numbers(before: Program, after: Program, args: Sequence[Any], numerics: Numerics) -> None:
    runs = before.module(), after.module()
    _assert_types_are_true(before, after, [_random_like(arg, torch.Generator().manual_seed(0)) for arg in args])
    for what, inputs in _inputs(before, args):
        pairs = [_copies(inputs), _copies(inputs)]
        with torch.no_grad():
            try:
                one = tree_leaves(runs[0](*pairs[0]))
            except Exception:
                if what in _SIZE_CASES:
                    continue  # the original program does not accept these sizes
                raise
            try:
                two = tree_leaves(runs[1](*pairs[1]))
            except Exception as error:
                raise AssertionError(f"{what}: the transformed program fails: {one_line(error)}") from error
        allowed = _noise(runs[0], inputs, one) if what == "large numbers" else [0.0] * len(one)
        for left, right, noise in zip(one, two, allowed, strict=True):
            _assert_close(left, right, noise, numerics, what)
        for left, right in zip(*map(tree_leaves, pairs), strict=True):
            same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
            assert same, f"{what}: the call changes an input"


_SIZE_CASES = ("the smallest sizes", "larger sizes")


def _inputs(program: Program, args: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield inputs to compare results on, with a description."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(_ROUNDS):
        yield "random numbers", [_random_like(arg, generator) for arg in args]
    yield "large numbers", [_random_like(arg, generator, 100.0) for arg in args]
    yield "zeros", [_insert_numbers(_random_like(arg, generator), generator, (0.0, -0.0)) for arg in args]
    spec = tree_flatten(list(args))[1]
    for what, sizes in zip(_SIZE_CASES, other_sizes(program), strict=False):
        made = random_inputs(program, sizes=sizes)
        yield what, tree_unflatten([made[row.name] for row in program.bindings.with_role(Role.INPUT)], spec)


def _assert_close(left: Any, right: Any, noise: Any, numerics: Numerics, what: str) -> None:
    if not isinstance(left, torch.Tensor):
        assert left == right, what
        return
    assert left.dtype == right.dtype, f"{what}: {left.dtype} became {right.dtype}"
    assert left.shape == right.shape, f"{what}: {list(left.shape)} became {list(right.shape)}"
    if numerics is Numerics.EXACT and left.is_floating_point():
        signs = [torch.signbit(each) & ~each.isnan() for each in (left, right)]
        assert torch.equal(*signs), f"{what}: a sign of zero differs, but the transform declares exact numerics"
    tolerance = 0.0 if numerics is Numerics.EXACT else _TOLERANCE.get(left.dtype, 0.0)
    if isinstance(noise, torch.Tensor) and tolerance:  # ignore differences below the sensitivity to input rounding
        right = torch.where((right - left).abs() <= noise, left, right)
    torch.testing.assert_close(
        right, left, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def _noise(run: Callable[..., Any], inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Return how much each result changes when inputs change by a few ULPs, as with softmax of large numbers."""
    generator, moved = torch.Generator().manual_seed(1), [torch.zeros(()) for _ in results]
    for _ in range(4):
        with torch.no_grad():
            near = tree_leaves(run(*[_perturb(each, generator) for each in _copies(inputs)]))
        for place, (one, two) in enumerate(zip(results, near, strict=True)):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                moved[place] = torch.maximum(moved[place], (one - two).abs().nan_to_num(0.0, 0.0))
    return [8 * each for each in moved]


def _perturb(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    steps = torch.randint(-2, 3, value.shape, generator=generator)
    return (value.double() * (1 + steps * torch.finfo(value.dtype).eps)).to(value.dtype)


def _assert_types_are_true(before: Program, after: Program, inputs: Sequence[Any]) -> None:
    """Assert that new values have the types that their nodes declare, which compares fake with real kernels."""
    names = [row.name for row in before.bindings.with_role(Role.INPUT)]
    was, now = (
        find_type_mismatches(each, dict(zip(names, tree_leaves(_copies(inputs)), strict=True)))
        for each in (before, after)
    )
    wrong = [text for name, text in now.items() if name not in was]
    assert not wrong, f"a fake kernel is wrong: {wrong[0]}"


def _random_like(arg: Any, generator: torch.Generator, scale: float = 1.0) -> Any:
    if not isinstance(arg, torch.Tensor) or not arg.is_floating_point():
        return arg
    numbers = torch.randn(arg.shape, generator=generator, dtype=torch.float64) * scale
    return match_layout(numbers.to(arg.dtype), arg)


def _insert_numbers(value: Any, generator: torch.Generator, numbers: Sequence[float]) -> Any:
    """Replace random elements by the given numbers."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    for number in numbers:
        value = value.masked_fill(torch.rand(value.shape, generator=generator) < 0.2, number)
    return value


def _copies(values: Sequence[Any]) -> list[Any]:
    return [deepcopy(value.detach()) if isinstance(value, torch.Tensor) else value for value in values]
