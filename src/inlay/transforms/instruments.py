"""Instruments: observers around transforms, which never change a program."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import UsageError
from inlay.program.text.folded_printer import dump_folded
from inlay.program.text.printer import save, save_text

if TYPE_CHECKING:
    from inlay.program.program import Program
    from inlay.transforms.base import Transform
    from inlay.transforms.pass_manager import TransformRecord


DUMP_VARIABLE = "INLAY_DUMP_GRAPHS_DIR"
"""The environment variable that names a folder for dumps."""


def dump_instruments(folder: Path | None = None, below: str = "") -> list[Dump]:
    """Return an instrument that dumps into this folder, or else into the one that the environment variable names."""
    folder = folder or (Path(named) if (named := os.environ.get(DUMP_VARIABLE)) else None)
    return [Dump(folder / below)] if folder is not None else []


@dataclass
class Dump:
    """An instrument that writes the program after each transform that changed it, and `index.json` about all of them.

    Files are named `NNN_stage_transform.py`. Other files in the folder are kept; an earlier dump is overwritten.
    """

    folder: Path
    count: int = 0
    index: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file.", "Name a folder for the dumps.")

    def before(self, transform: Transform, program: Program) -> None:
        """Dump the program before the first transform."""
        if self.count == 0:
            self._write("capture", "program", program)

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        """Dump the program if it changed, or record why it did not."""
        entry: dict[str, object] = {"transform": record.key, "stage": record.stage, "status": record.status}
        if record.status == "ran" and record.sites:
            entry["file"] = self._write(record.stage, re.sub(r"[^\w.-]", "_", record.key), program)
            entry["matches" if record.has_site_count else "changed_nodes"] = record.sites
        elif record.status == "ran":
            entry["why"] = record.misses[0].reason if record.misses else "no node starts a match"
        else:
            entry["why"] = record.skip_reason or "enabled: false"
        self.index.append(entry)
        (self.folder / "index.json").write_text(json.dumps(self.index, indent=2) + "\n")

    def _write(self, stage: str, name: str, program: Program) -> str:
        file = self.folder / f"{self.count:03d}_{stage}_{name}.py"
        self.count += 1
        save(program, file)
        save_text(dump_folded(program), file.with_suffix(".folded.py"))
        return file.name


@dataclass
class TransformSnapshot:
    """An instrument that keeps the program before and after one transform."""

    key: str
    pair: tuple[Program, Program] | None = None
    _before: Program | None = None

    def before(self, transform: Transform, program: Program) -> None:
        """Keep the program before the transform."""
        self._before = program

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        """Keep both programs if this is the transform with the key."""
        if record.key == self.key and self._before is not None:
            self.pair = (self._before, program)
