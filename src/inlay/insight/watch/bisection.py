"""Find the match that makes a program fail, by runs in which each process applies only its first matches.

`INLAY_WATCH_LIMIT` is their number. Each process writes those that it applies to a file of the folder of the watch.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import UsageError
from inlay.program.exported_program import select_meta
from inlay.program.graphs import SOURCE
from inlay.watch_startup import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

LIMIT = "INLAY_WATCH_LIMIT"
ALL = 1 << 62
"""The limit that applies all matches."""
_SUFFIX = ".matches.jsonl"
_REQUIRED = ("post_grad.decompose_", "replace_random.")
"""Inductor does not compile what these passes of its own leave, so that all of their matches are applied."""
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it
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


@dataclass(frozen=True)
class BadMatches:
    """The program is good with the first `good` matches and bad with the first `bad`, of `total`."""

    good: int
    bad: int
    total: int
    runs: int
    matches: tuple[AppliedMatch, ...]
    """The matches in between: one of each process, unless some runs could not be judged."""


def may_apply(pass_name: str, pattern: str, node: fx.Node) -> bool:
    """Count a match if there is a limit, and return whether it is within the limit."""
    limit = os.environ.get(LIMIT)
    if not limit or pass_name.startswith(_REQUIRED):
        return True
    with _lock:
        here = folder, process = os.environ.get(VARIABLE, "."), os.getpid()
        if _counts[here] >= int(limit):
            return False
        _counts[here] += 1
        match = AppliedMatch(_counts[here], pass_name, pattern, node.name, str(select_meta(node).get(SOURCE, "")))
        with (Path(folder) / f"{process}{_SUFFIX}").open("a") as out:
            out.write(json.dumps(asdict(match)) + "\n")
    return True


def read_matches(folder: Path) -> list[AppliedMatch]:
    """Return the matches that processes applied."""
    lines = [line for file in sorted(folder.glob(f"*{_SUFFIX}")) for line in file.read_text().splitlines()]
    return [AppliedMatch(**json.loads(line)) for line in lines]


def find_bad_match(run: Callable[[int], tuple[bool | None, list[AppliedMatch]]]) -> BadMatches | None:
    """Run a program with limits until the first bad match is known; None if it is good with all matches.

    `run` returns whether the program is good (None: cannot be judged), and the matches that it applied.
    """
    is_good, _ = run(0)
    if is_good is None:
        raise UsageError(
            "Without a match, the program cannot be judged.", "Make it end with 0 if it is good, or 1 if it is bad."
        )
    if not is_good:
        raise UsageError(
            "The program is not good when no match is applied, so that no match is the cause.",
            "Run it with TORCH_COMPILE_DISABLE=1 to see whether the compiler is.",
        )
    is_good, applied = run(ALL)
    if is_good:
        return None
    total = bad = max((each.number for each in applied), default=0)
    if is_good is None or not total:
        problem = "With all matches, the program cannot be judged." if total else "It fails, but no match was applied."
        raise UsageError(problem, "Exit codes must be the same each time: 0 good, 125 cannot judge, another one bad.")
    good, runs, unknown = 0, 2, set[int]()
    while left := [each for each in range(good + 1, bad) if each not in unknown]:
        middle, runs = left[len(left) // 2], runs + 1
        is_good, matches = run(middle)
        if is_good is None:
            unknown.add(middle)
        elif is_good:
            good = middle
        else:
            bad, applied = middle, matches
    found = dict.fromkeys(each for each in applied if good < each.number <= bad)
    return BadMatches(good, bad, total, runs, tuple(found))
