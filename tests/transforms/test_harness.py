"""Every registered transform: fires where it says it does, and leaves alone what it says it must."""

from __future__ import annotations

import pytest

from inlay.testing import assert_rewrites, assert_untouched, program_of
from inlay.transforms import Case, registry
from inlay.transforms.base import Transform, find

FIRES = [(name, case) for name, cls in registry().items() for case in cls.fires()]
LEAVES = [(name, case) for name, cls in registry().items() for case in cls.leaves()]
pytestmark = pytest.mark.fast


def _id(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


@pytest.mark.parametrize("cls", registry().values(), ids=lambda cls: cls.name)
def test_declares_its_cases(cls: type[Transform]) -> None:
    assert len(cls.fires()) >= 1
    assert len(cls.leaves()) >= 3
    assert cls.summary().endswith(".")


@pytest.mark.parametrize(("name", "case"), FIRES, ids=_id)
def test_fires(name: str, case: Case) -> None:
    program = program_of(case.function, case.args, after=case.after)
    sites = find(name)().apply(program.copy()).sites
    assert sites >= 1, [miss.reason for miss in find(name)().apply(program.copy()).misses]
    assert_rewrites(case.function, name, args=case.args, sites=sites, after=case.after)


@pytest.mark.parametrize(("name", "case"), LEAVES, ids=_id)
def test_leaves_alone(name: str, case: Case) -> None:
    assert_untouched(case.function, name, args=case.args, after=case.after)
