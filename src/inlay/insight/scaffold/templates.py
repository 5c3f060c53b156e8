"""Templates of the generated files."""

TRANSFORM = '''"""$pattern
becomes `inlay.$name`.

Written by `inlay candidates --scaffold $name` from $model ($source), where it occurs $times times.
Recommendation: $recommendation; $evidence
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from inlay.ops.registration import canonical_op$more
from inlay.rewrite import Match, Reason
from inlay.integrations import graph_pass
from inlay.transforms import Case, Numerics, PatternTransform, Stage, transform

ops: Any = torch.ops


def calls($arguments, between: Callable[[Any], Any] = lambda value: value) -> tuple[Tensor, ...]:
    """The calls as in the model. Returns the value of each kernel, in order."""
$body
    return ($kernels)


@canonical_op("$name")
def $name($arguments) -> $result:
    """The calls as one operator. This reference implementation runs until a kernel replaces it."""
    values = calls($names)
    return $picked

$device
@transform("fuse_$name", stage=Stage.FUSE, numerics=Numerics.$numerics)
class Fuse$title(PatternTransform):
    """Replace the calls by one operator."""

    ignored_args = frozenset($loose)

    @classmethod
    def positive_cases(cls) -> list[Case]:
        return [
            *(Case(str(dtype), cls().pattern, inputs(dtype)) for dtype in (torch.float32, torch.bfloat16)),
            Case("other sizes", cls().pattern, inputs(torch.float32, others=True)),
            Case("dynamic sizes", cls().pattern, inputs(torch.float32), axes=$axes),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        def shared($arguments) -> Any:
            values = calls($names)
            return $shared

        def other($arguments) -> Any:
            return calls($names, between=torch.neg)[-1]

        given = inputs(torch.float32)
        return [
            Case("$shared_name", shared, given),
            Case("a call in between", other, given),
            Case("a part of it", lambda $names: calls($names)[0], given),
            *(Case(f"mixed dtypes {number}", cls().pattern, each) for number, each in enumerate(mixed())),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return examples(dtype)

    def pattern(self, $arguments) -> Any:
        return $name($names)

    def check(self, match: Match) -> None:
        kinds = {match.value(name).dtype for name in $floats}
        match.require(len(kinds) <= 1, Reason.DTYPE, f"{sorted(map(str, kinds))} are mixed")

    def replacement(self, $arguments) -> Any:  # type: ignore[override]
        return torch.ops.inlay.$name($names)


def examples(dtype: torch.dtype, others: bool = False) -> dict[str, Tensor]:
    """Arguments for tracing, in one of two sizes."""
    if others:
        return {$others}
    return {$examples}


def inputs(dtype: torch.dtype, others: bool = False) -> tuple[Tensor, ...]:
    """Random arguments."""
    made = examples(dtype, others).values()
    return tuple(torch.randn(each.shape).to(each.dtype) if each.is_floating_point() else each for each in made)


def mixed() -> list[tuple[Tensor, ...]]:
    """Arguments of which one has another dtype than the rest, if the calls accept them."""
    given, found = inputs(torch.float32), []
    for index, each in enumerate(given):
        changed = (*given[:index], each.double(), *given[index + 1 :])
        with contextlib.suppress(RuntimeError):
            calls(*changed)
            found.append(changed)
    return found


rewrite = graph_pass("fuse_$name")
"""The transform as a pass: `inlay show MODEL --pass fuse_$name:rewrite`, from the folder of this file."""
'''

YAML = """# Add this line to src/inlay/config/default.yaml, or pass this file with --config.
transforms:
  fuse_$name: {enabled: false}   # until it is reviewed
"""

TEST = '''"""fuse_$name matches its pattern at several sizes and dtypes, and nothing else."""

from __future__ import annotations

import pytest

from fuse_$name import Fuse$title
from inlay.testing import assert_rewrites, assert_untouched
from inlay.transforms import Case

NAME = "fuse_$name"


@pytest.mark.parametrize("case", Fuse$title.positive_cases(), ids=lambda case: case.name)
def test_positive_cases(case: Case) -> None:
    program = assert_rewrites(case.function, NAME, args=case.args, axes=case.axes, sites=1)
    assert program.op_counts()["inlay.$name.default"] == 1


@pytest.mark.parametrize("case", Fuse$title.negative_cases(), ids=lambda case: case.name)
def test_negative_cases(case: Case) -> None:
    assert_untouched(case.function, NAME, args=case.args, axes=case.axes)
'''

TRITON_TEST = '''"""The Triton kernel of $name: results in the interpreter, and compilation. Not timed."""

from __future__ import annotations

import pytest

from inlay.testing.triton import ARCHITECTURES, POINTERS, compile_to_ptx, run_interpreted

pytest.importorskip("triton")


def test_numbers() -> None:
    """With NaN around the inputs and canaries around the result."""
    printed = run_interpreted(
        """
        from fuse_$name import $name, inputs
        from inlay.testing.triton import check_launch
        from ${name}_triton import DTYPES, launch

        for dtype in DTYPES:
            for others in (False, True):
                check_launch(launch, $name, inputs(dtype, others))
                print(dtype, others)
        """,
        __file__,
    )
    assert "True" in printed, "the second sizes of each dtype"


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_compiles(capability: int) -> None:
    from ${name}_triton import CONSTANTS, DTYPES, kernel, signature

    for dtype in DTYPES:
        for constants in CONSTANTS:
            text = compile_to_ptx(capability, kernel, signature(POINTERS[dtype]), constants)
            assert f".target sm_{capability}" in text
'''
