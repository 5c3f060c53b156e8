"""Adapter: torch's structured trace, so that tlparse shows the program after each transform.

The trace is on when the environment variable TORCH_TRACE names a folder. Each program becomes an artifact called
`inlay_NNN_stage_transform`, in the folded form.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch._logging import _internal

from inlay.program.text.folded_printer import dump_folded

if TYPE_CHECKING:
    from inlay.program.program import Program
    from inlay.transforms.base import Transform
    from inlay.transforms.pass_manager import TransformRecord


def trace_instruments() -> list[StructuredTrace]:
    """Return an instrument that writes programs to the trace, if a trace is being written."""
    handler: Any = _internal.LOG_TRACE_HANDLER
    return [StructuredTrace()] if handler is not None and handler.root_dir is not None else []


@dataclass
class StructuredTrace:
    """An instrument that emits the program before the first transform and after each that changed it.

    An artifact starts with the summaries of this transform and of preceding ones that changed nothing.
    """

    count: int = 0
    header_lines: list[str] = field(default_factory=list)

    def before(self, transform: Transform, program: Program) -> None:
        """Emit the program before the first transform."""
        if self.count == 0:
            self._emit("capture", "program", program)

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        """Emit the program if the transform changed it."""
        misses = f" misses={len(record.misses)}" if record.misses else ""
        self.header_lines.append(f"# {record.summary}{misses}\n")
        if record.status == "ran" and record.sites:
            self._emit(record.stage, re.sub(r"[^\w.-]", "_", record.key), program)

    def _emit(self, stage: str, key: str, program: Program) -> None:
        text = "".join(self.header_lines) + dump_folded(program)
        emit(f"inlay_{self.count:03d}_{stage}_{key}", text)
        self.count += 1
        self.header_lines.clear()


def emit(name: str, payload: str) -> None:
    """Write one artifact into the trace. Outside of torch.compile it belongs to no frame."""
    _internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: payload,
        expect_trace_id=False,
    )
