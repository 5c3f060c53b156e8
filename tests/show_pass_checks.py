"""Checks of what `inlay show --pass` prints, for the tests of small and of real models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from inlay.config import resolve_config
from inlay.program.text.diff import diff
from inlay.program.text.diff_rows import DiffRow, drop_equal_notes
from inlay.program.text.side_by_side import diff_lines
from inlay.transforms import configure, run

if TYPE_CHECKING:
    from inlay.program import Program
    from inlay.transforms import Transform, TransformRecord

SCREEN, WIDTH = 60, 120
_WORDS = re.compile(r"(?:aten|inlay|operator)\.\w+|\.\w+(?=\()|(?<![\w.])-?\d[\d.e+-]*|True|False|None")


class EachStep:
    """Keeps the programs around every transform."""

    def __init__(self) -> None:
        self.pairs: dict[str, tuple[Program, Program]] = {}

    def before(self, step: Transform, program: Program) -> None:
        self.program = program

    def after(self, step: Transform, program: Program, record: TransformRecord) -> None:
        self.pairs[record.key] = (self.program, program)


def check_each_pass(program: Program) -> dict[str, list[str]]:
    """Run the default transforms; every difference fits a screen, shows all shapes, and counts what it leaves out."""
    steps = EachStep()
    run(program, configure(resolve_config()), [steps])
    texts = {}
    for key, pair in steps.pairs.items():
        found = diff(*pair)
        lines = diff_lines(found, WIDTH)
        assert len(lines) <= SCREEN, f"{key}: {len(lines)} lines"
        assert max(len(line.text) for line in lines) <= WIDTH
        differing = [row for row in found.rows if row.kind != "same"]
        shown = [row for row in found.summary(0) if row.kind not in ("same", "skipped")]
        assert {_kind(row) for row in differing} == {_kind(row) for row in shown}, key
        counted = sum(int(count) for row in found.summary(0) for count in re.findall(r"(\d+) changed like", row.left))
        assert len(shown) + counted == len(differing), key
        texts[key] = [line.text for line in lines]
    return texts


def _kind(row: DiffRow) -> tuple[str, ...]:
    """Roughly what `rows.shape` does, written differently: operators, methods, numbers and flags of both sides."""
    sides = drop_equal_notes(row.left, row.right)
    words = (_WORDS.findall(re.sub(r"\bmodel\.[\w.\[\]]+", "", side)) for side in sides)
    return (row.kind, *(" ".join(found) for found in words))
