"""Recognised updates: in place in every backend, right numbers, bytes measured.

All forms are caches of one module, so that a backend compiles six programs and not seventy-eight.
"""

from __future__ import annotations

from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.frontend import Example, capture
from inlay.lowering.compiled_program import compile_program
from inlay.package.memory_profiler import allocate_paged, profile_memory
from tests.lowering.state.update_forms import FORMS, HEADS, SIZE

if TYPE_CHECKING:
    from inlay.program import Program

LENGTH = 128
PAGE = Path(__file__).parents[2] / "docs" / "in_place.md"
CASES = [
    (owner, batch, length)
    for owner, length in (("input", "static"), ("input", "dynamic"), ("buffer", "static"))
    for batch in (1, 4)
]
"""Who owns the caches, how many sequences they hold, and whether their length is known at capture."""


def _write(caches: dict[str, torch.Tensor], rows: torch.Tensor, at: torch.Tensor) -> dict[str, torch.Tensor]:
    for form, value in caches.items():
        FORMS[form](value, rows, at)
    return {form: value.sum((2, 3)) for form, value in caches.items()}


class Owned(torch.nn.Module):
    """The module owns the caches."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        for form in FORMS:
            self.register_buffer(form, torch.zeros(batch, HEADS, LENGTH, SIZE))

    def forward(self, rows: torch.Tensor, at: torch.Tensor) -> dict[str, torch.Tensor]:
        return _write({form: self.get_buffer(form) for form in FORMS}, rows, at)


class Given(torch.nn.Module):
    """The caller owns the caches."""

    def forward(self, rows: torch.Tensor, at: torch.Tensor, **caches: torch.Tensor) -> dict[str, torch.Tensor]:
        return _write(caches, rows, at)

    # torch.export wants a name for each argument whose size may change
    forward.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "rows", "at", *FORMS)]
    )


def _caches(batch: int, length: int, make: Any = torch.zeros) -> dict[str, torch.Tensor]:
    return {form: make([batch, HEADS, length, SIZE]) for form in FORMS}


@cache
def _program(owner: str, batch: int, length: str) -> Program:
    rows, at = torch.randn(batch, HEADS, 2, SIZE), torch.tensor([4, 5])
    if owner == "buffer":
        return capture(Example(Owned(batch), (rows, at)))
    axes = {form: {2: f"room_of_{form}"} for form in FORMS} if length == "dynamic" else {}
    return capture(Example(Given(), (rows, at), _caches(batch, LENGTH), axes=axes))


def _written(backend: str, owner: str, batch: int, length: str) -> dict[str, int]:
    """Bytes written to each cache in one step, of which none are copies; numbers are compared on the way."""
    compiled = compile_program(_program(owner, batch, length), backend, lift_mutable_buffers=owner == "buffer")
    assert {state.reason for state in compiled.states if not state.is_eligible} == set()
    assert len([state for state in compiled.states if state.output.alias is not None]) == len(FORMS)
    room = LENGTH if length == "static" else 2 * LENGTH
    caches, expected = _caches(batch, room, allocate_paged), _caches(batch, room)
    addresses = {form: value.data_ptr() for form, value in caches.items()}
    for step in range(3):
        rows, at = torch.randn(batch, HEADS, 2, SIZE), torch.tensor([step, step + 7])
        sums = _write(expected, rows, at)
        actual = compiled(rows, at, **caches)
        for form in FORMS:
            torch.testing.assert_close(caches[form], expected[form], msg=f"{form}: {{}}".format)
            torch.testing.assert_close(actual[form], sums[form], msg=f"{form}: {{}}".format)
    written = {}
    for form, value in caches.items():
        moved = profile_memory(lambda: compiled(rows, at, **caches), value)
        assert moved.copied_bytes(value.numel() * 4) == 0
        assert 0 < moved.written_bytes < value.numel() * 4, form
        written[form] = moved.written_bytes
    assert addresses == {form: value.data_ptr() for form, value in caches.items()}
    return written


@pytest.mark.fast
@pytest.mark.parametrize(("owner", "batch", "length"), CASES)
def test_eager(owner: str, batch: int, length: str) -> None:
    _written("eager", owner, batch, length)


@pytest.mark.parametrize("backend", ["inductor", pytest.param("aot", marks=pytest.mark.nightly)])
def test_compiled(backend: str, request: pytest.FixtureRequest) -> None:
    """What docs/in_place.md says, for both compilers."""
    measured = [_written(backend, *case) for case in CASES]
    table = [f"| `{form}` | " + " | ".join(f"{each[form]:,} / 0" for each in measured) + " |" for form in FORMS]
    lines = PAGE.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("| update |")) + 2
    last = next(index for index in range(first, len(lines)) if not lines[index].startswith("|"))
    if request.config.getoption("--update-docs"):
        lines[first:last] = table
        PAGE.write_text("\n".join(lines) + "\n")
    assert lines[first:last] == table, "run pytest --update-docs"
