"""A replacement that is not what it says is noticed by `assert_rewrites`, by `verify` and by `review`.

Not called after `wrong_replacements.py`: a review would take it for the tests of the rules there, and run it.
"""

from __future__ import annotations

import pytest
import torch

from inlay.errors import InlayError
from inlay.testing import assert_rewrites, program_of
from tests.testing.wrong_replacements import CHECKS, KINDS, Place, ReluTransposed, _operator, sound, unnoticed


def test_faults_drawn_at_random() -> None:
    """As many of each kind; on the way, sound rules at the same places are not spoken against."""
    assert unnoticed(seed=0, count=len(KINDS)) == []


@pytest.mark.nightly
def test_a_hundred_faults() -> None:
    assert unnoticed(seed=1, count=105) == []


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("sizes", [0, 1], ids=["3×4", "4×4"])
def test_a_fake_kernel_that_forgets_the_transpose(check: object, sizes: int) -> None:
    """Of a square only the strides tell."""
    place = Place(ReluTransposed, torch.float32, sizes, "elementwise", False)
    rule = sound(place, operator=_operator(place, fake=lambda made: torch.empty_like(made.T).contiguous()))
    assert check(rule, place)  # type: ignore[operator]
    assert not check(sound(place), place)  # type: ignore[operator]


def test_strided_arguments() -> None:
    """They are checked as they were given: a fake kernel that is right for them is right."""
    place = Place(ReluTransposed, torch.float32, 0, "elementwise", False)
    turned = torch.randn(4, 3).t()
    program = program_of(lambda x: ReluTransposed().pattern(x).tanh(), [turned])
    assert program.graph.find_nodes(op="placeholder")[0].meta["val"].stride() == (1, 3)
    assert_rewrites(program, sound(place)(), args=[turned], sites=1)
    wrong = sound(place, operator=_operator(place, fake=lambda made: made.t().contiguous().t()))
    with pytest.raises((AssertionError, InlayError)):
        assert_rewrites(program, wrong(), args=[turned], sites=1)
