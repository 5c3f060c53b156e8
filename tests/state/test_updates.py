"""Recognised updates: in place in every engine, right numbers, bytes measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forms import FORMS, HEADS, SIZE

from inlay.capture import Example, capture
from inlay.compile.program import compile_program
from inlay.testing.watch import paged, watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.compile.program import CompiledProgram
    from inlay.program import Program

LENGTH = 128
PAGE = Path(__file__).parents[2] / "docs" / "in_place.md"


class Owned(torch.nn.Module):
    """The module owns the cache."""

    def __init__(self, write: Callable[..., None], batch: int) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("cache", torch.zeros(batch, HEADS, LENGTH, SIZE))

    def forward(self, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.write(self.cache, rows, at)
        return self.cache.sum((2, 3))


class Given(torch.nn.Module):
    """The caller owns the cache."""

    def __init__(self, write: Callable[..., None]) -> None:
        super().__init__()
        self.write = write

    def forward(self, cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.write(cache, rows, at)
        return cache.sum((2, 3))


def _program(form: str, owner: str, batch: int, length: str) -> Program:
    rows, at = torch.randn(batch, HEADS, 2, SIZE), torch.tensor([4, 5])
    if owner == "buffer":
        return capture(Example(Owned(FORMS[form], batch), (rows, at)))
    axes = {"cache": {2: "room"}} if length == "dynamic" else {}
    return capture(Example(Given(FORMS[form]), (torch.zeros(batch, HEADS, LENGTH, SIZE), rows, at), axes=axes))


CASES = [
    (form, owner, batch, length)
    for form in FORMS
    for owner, length in (("input", "static"), ("input", "dynamic"), ("buffer", "static"))
    for batch in (1, 4)
]


def _check(engine: str, form: str, owner: str, batch: int, length: str) -> tuple[int, int]:
    """Bytes written to the cache and bytes copied in one step; numbers are compared on the way."""
    program = _program(form, owner, batch, length)
    compiled = compile_program(program, engine, lift_mutable_buffers=owner == "buffer")
    (state,) = compiled.states
    assert state.eligible, state.reason
    assert state.output.alias is not None
    room = LENGTH if length == "static" else 2 * LENGTH
    cache, expected = paged([batch, HEADS, room, SIZE]), torch.zeros(batch, HEADS, room, SIZE)
    address = cache.data_ptr()
    for step in range(3):
        rows, at = torch.randn(batch, HEADS, 2, SIZE), torch.tensor([step, step + 7])
        FORMS[form](expected, rows, at)
        actual = _call(compiled, owner, cache, rows, at)
        torch.testing.assert_close(cache, expected)
        torch.testing.assert_close(actual, expected.sum((2, 3)))
    moved = watch(lambda: _call(compiled, owner, cache, rows, at), cache)
    assert cache.data_ptr() == address
    return moved.written, moved.copies(cache.numel() * 4)


def _call(compiled: CompiledProgram, owner: str, cache: Any, rows: Any, at: Any) -> Any:
    return compiled(rows, at, cache=cache) if owner == "buffer" else compiled(cache, rows, at)


@pytest.mark.fast
@pytest.mark.parametrize(("form", "owner", "batch", "length"), CASES)
def test_eager(form: str, owner: str, batch: int, length: str) -> None:
    written, copied = _check("eager", form, owner, batch, length)
    assert copied == 0
    assert written < batch * HEADS * LENGTH * SIZE * 4


@pytest.mark.parametrize("form", FORMS)
def test_inductor(form: str, request: pytest.FixtureRequest) -> None:
    _compare_with_docs(form, _row("inductor", form), update=request.config.getoption("--update-docs"))


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_aot(form: str) -> None:
    _compare_with_docs(form, _row("aot", form), update=False)


def _row(engine: str, form: str) -> str:
    cells = []
    for _, owner, batch, length in (case for case in CASES if case[0] == form):
        written, copied = _check(engine, form, owner, batch, length)
        assert copied == 0
        assert written < batch * HEADS * LENGTH * SIZE * 4
        cells.append(f"{written:,} / {copied}")
    return f"| `{form}` | " + " | ".join(cells) + " |"


def _compare_with_docs(form: str, row: str, *, update: bool) -> None:
    lines = PAGE.read_text().splitlines()
    place = next((index for index, line in enumerate(lines) if line.startswith(f"| `{form}` |")), None)
    if not update:
        assert place is not None, "run pytest --update-docs"
        assert lines[place] == row
        return
    if place is None:
        head = next(index for index, line in enumerate(lines) if line.startswith("| update |"))
        place = next(index for index in range(head, len(lines)) if not lines[index].startswith("|"))
        lines.insert(place, row)
    else:
        lines[place] = row
    PAGE.write_text("\n".join(lines) + "\n")
