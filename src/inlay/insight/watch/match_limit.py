"""Apply only the first matches of a process: `INLAY_WATCH_LIMIT`, which `inlay bisect --watch` sets.

Each process counts its own matches, in the order in which they are applied, and writes them to a file of the folder.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.program.exported_program import select_meta
from inlay.program.graphs import SOURCE
from inlay.watch_startup import VARIABLE

if TYPE_CHECKING:
    from torch import fx

LIMIT = "INLAY_WATCH_LIMIT"
"""The environment variable with the number of matches that are applied."""
_SUFFIX = ".matches.jsonl"
_REQUIRED = ("post_grad.decompose_", "replace_random.")
"""Inductor does not compile what these passes of its own leave, so that all of their matches are applied."""
_lock = threading.Lock()
_counts: Counter[tuple[str, int]] = Counter()
"""Number of matches of each folder and process."""


@dataclass(frozen=True)
class AppliedMatch:
    """A match, and its number in its process."""

    number: int
    pass_name: str
    pattern: str
    node: str
    source: str

    @property
    def text(self) -> str:
        """The match in words."""
        source = f" ({self.source})" if self.source else ""
        return f"pass {self.pass_name}, pattern {self.pattern}, node {self.node}{source}"


def is_limited() -> bool:
    """Return whether this process applies only some matches."""
    return bool(os.environ.get(LIMIT))


def may_apply(pass_name: str) -> bool:
    """Return whether another match of a pass may be applied."""
    limit = os.environ.get(LIMIT)
    return not limit or pass_name.startswith(_REQUIRED) or _counts[_here()] < int(limit)


def count_match(pass_name: str, pattern: str, node: fx.Node) -> None:
    """Count a match that is applied, if there is a limit."""
    if is_limited() and not pass_name.startswith(_REQUIRED):
        folder, process = here = _here()
        with _lock:
            _counts[here] += 1
            source = str(select_meta(node).get(SOURCE, ""))
            match = AppliedMatch(_counts[here], pass_name, pattern, node.name, source)
            with (Path(folder) / f"{process}{_SUFFIX}").open("a") as out:
                out.write(json.dumps(asdict(match)) + "\n")


def read_matches(folder: Path) -> list[AppliedMatch]:
    """Return the matches that processes applied."""
    lines = [line for file in sorted(folder.glob(f"*{_SUFFIX}")) for line in file.read_text().splitlines()]
    return [AppliedMatch(**json.loads(line)) for line in lines]


def _here() -> tuple[str, int]:
    return os.environ.get(VARIABLE, "."), os.getpid()
