"""`assert_rewrites` and `assert_untouched`."""

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
    """Capture a module or a plain function, and run the named transforms on it; a program is taken as it is.

    >>> program_of(lambda x: x.relu() + 1, [torch.ones(2)]).op_counts()
    Counter({'aten.relu.default': 1, 'aten.add.Tensor': 1})
    """
    if isinstance(model, Program):
        return model
    module = model if isinstance(model, torch.nn.Module) else _FunctionModule(model)
    if axes and module is not model:
        module.forward = model  # axes are told by the names of the function's arguments
    program = capture(Example(module, tuple(args), axes=axes or {}))
    for name in prerequisites:
        program = find_transform(name)().apply(program.copy()).program
    return program


def op_counts(program: Program) -> Mapping[str, int]:
    """How often each operator is called."""
    return program.op_counts()


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
    """The transform fires `sites` times, gives the structure of `expected`, keeps types and numbers.

    Numbers are compared on random inputs of the shapes and dtypes of `args`, laid out as they are, on large ones, on
    zeros, and at other sizes where `axes` leave them open: exactly when the transform says it is exact, not at all when
    it says it adds inputs. Inputs must stay what they were. On the way every value is held against what its node
    states: a fake kernel must say what the real one makes. Metadata that is not a type or a source must not matter: the
    run is repeated without any.

    >>> silu = torch.nn.functional.silu
    >>> two = [torch.ones(3), torch.ones(3)]
    >>> program = assert_rewrites(lambda g, u: silu(g) * u, "match_swiglu", args=two, sites=1)
    """
    program = program_of(before, args, axes, prerequisites)
    applied = _apply(program, transform)
    assert applied.sites == sites, (
        f"{applied.sites} sites instead of {sites}: {'; '.join(miss.reason for miss in applied.misses) or 'no miss'}"
    )
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
        _assert_same_numbers(program, applied.program, args, _numerics(transform))
    return applied.program


def assert_untouched(
    before: torch.nn.Module | Callable[..., Any] | Program,
    transform: str | Transform,
    *,
    args: Sequence[Any],
    axes: Mapping[str, Mapping[int, str]] | None = None,
    prerequisites: Sequence[str] = (),
) -> None:
    """The transform must not fire here, and must not change anything."""
    program = program_of(before, args, axes, prerequisites)
    applied = _apply(program, transform)
    assert applied.sites == 0, f"{applied.sites} sites where none must be: {applied.matched_roots}"
    assert dump(applied.program) == dump(program), "nothing matched, yet the program changed"


def _instance(transform: str | Transform) -> Transform:
    return find_transform(transform)() if isinstance(transform, str) else transform


def _numerics(transform: str | Transform) -> Numerics:
    return _instance(transform).numerics


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
                    continue  # the program itself does not take them
                raise
            try:
                two = tree_leaves(runs[1](*pairs[1]))
            except Exception as error:
                raise AssertionError(f"{what}: the result cannot be computed: {one_line(error)}") from error
        allowed = _noise(runs[0], inputs, one) if what == "large numbers" else [0.0] * len(one)
        for left, right, noise in zip(one, two, allowed, strict=True):
            _assert_close(left, right, noise, numerics, what)
        for left, right in zip(*map(tree_leaves, pairs), strict=True):
            same = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
            assert same, f"{what}: an input is changed by the call"


_SIZE_CASES = ("the smallest sizes", "larger sizes")


def _inputs(program: Program, args: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Inputs to compare numbers on, and what is special about them."""
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
        assert torch.equal(*signs), f"{what}: a sign of zero differs, and the transform says that it is exact"
    tolerance = 0.0 if numerics is Numerics.EXACT else _TOLERANCE.get(left.dtype, 0.0)
    if isinstance(noise, torch.Tensor) and tolerance:  # what cannot be told more exactly is not compared more exactly
        right = torch.where((right - left).abs() <= noise, left, right)
    torch.testing.assert_close(
        right, left, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def _noise(run: Callable[..., Any], inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """How far each result moves when its inputs do by a few units in the last place: softmax of large numbers does."""
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
    """Fake kernels are held against the real ones: new values must be what their nodes state."""
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
    """Some of the numbers are these instead."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    for number in numbers:
        value = value.masked_fill(torch.rand(value.shape, generator=generator) < 0.2, number)
    return value


def _copies(values: Sequence[Any]) -> list[Any]:
    return [deepcopy(value.detach()) if isinstance(value, torch.Tensor) else value for value in values]
