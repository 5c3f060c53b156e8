"""Find the match that makes a program fail, by runs in which only the first matches are applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.insight.watch.match_limit import AppliedMatch

ALL = 1 << 62
"""The limit that applies all matches."""
_CANNOT_JUDGE = 125
"""The exit code of a program that can be neither good nor bad, as for `git bisect run`."""


@dataclass(frozen=True)
class LimitedRun:
    """One run of a program."""

    code: int
    matches: list[AppliedMatch]
    last_line: str = ""
    """The last line that the program printed."""

    @property
    def is_good(self) -> bool | None:
        """Whether the program succeeded; None if it cannot judge."""
        return None if self.code == _CANNOT_JUDGE else self.code == 0


@dataclass(frozen=True)
class BadMatches:
    """The program is good with the first `good` matches and bad with the first `bad`, of `total`."""

    good: int
    bad: int
    total: int
    runs: int
    matches: tuple[AppliedMatch, ...]
    """The matches in between: one of each process, unless some runs could not be judged."""


def find_bad_match(run: Callable[[int], LimitedRun]) -> BadMatches | None:
    """Run a program with limits until the first bad match is known; None if it is good with all matches."""
    if not run(0).is_good:
        raise UsageError(
            "The program is not good when no match is applied, so that no match is the cause.",
            "Run it with TORCH_COMPILE_DISABLE=1 to see whether the compiler is.",
        )
    every = run(ALL)
    if every.is_good:
        return None
    total = bad = max((each.number for each in every.matches), default=0)
    if every.is_good is None or not total:
        why = f"exits with {_CANNOT_JUDGE} when" if total else "is bad in one of two runs, although"
        raise UsageError(
            f"The program {why} {'all matches are' if total else 'no match was'} applied.",
            "It must give the same result each time: exit code 0 is good, 125 cannot judge, another one is bad.",
        )
    good, runs, at_bad, unknown = 0, 2, every, set[int]()
    while left := [each for each in range(good + 1, bad) if each not in unknown]:
        middle = left[len(left) // 2]
        made, runs = run(middle), runs + 1
        if made.is_good is None:
            unknown.add(middle)
        elif made.is_good:
            good = middle
        else:
            bad, at_bad = middle, made
    found = dict.fromkeys(each for each in at_bad.matches if good < each.number <= bad)
    return BadMatches(good, bad, total, runs, tuple(found))
