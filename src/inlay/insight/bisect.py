"""Bisection: which transform, and which of its sites, makes a model's results wrong; or which two together.

Each question is a run with some transforms and some of their sites left out. Answers are kept, so a bisection that was
interrupted goes on where it was, and the same question is never asked twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.transforms.pipeline import run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from inlay.program.program import Program
    from inlay.transforms.pipeline import Step

    Oracle = Callable[[Program], bool]


@dataclass(frozen=True)
class Choice:
    """Which transforms run, and which of their sites: None is all of them."""

    sites: Mapping[str, frozenset[int] | None]

    @property
    def text(self) -> str:
        """The same choice is the same text, in every process."""
        parts = [f"{key}:{'all' if chosen is None else sorted(chosen)}" for key, chosen in sorted(self.sites.items())]
        return "; ".join(parts)


@dataclass(frozen=True)
class Culprit:
    """A transform and the number of the site that makes the difference, in the order it finds them."""

    transform: str
    site: int | None
    """None for a pass that does not tell its sites."""
    place: str = ""
    """The node it rewrote, as it was called before."""


@dataclass
class Bisection:
    """Asks an oracle about programs: True is good. `answers` can be saved and given again."""

    program: Program
    steps: Sequence[Step]
    oracle: Oracle
    answers: dict[str, bool] = field(default_factory=dict)
    on_run: Callable[[str, bool], None] = lambda text, good: None
    runs: int = 0
    """How often a program was made and asked about."""

    def find(self) -> list[Culprit]:
        """One culprit, or two that are wrong only together; none when the result is good."""
        names = [step.key for step in self.steps if step.transform.options.enabled]
        if self.good(dict.fromkeys(names)):
            return []
        if not self.good({}):
            raise UsageError("The model is not good before any transform ran.", "The oracle must accept it.")
        last = names[self._first_bad(len(names), lambda count: dict.fromkeys(names[:count])) - 1]
        partner = self._partner(names, last)
        both: dict[str, frozenset[int] | None] = dict.fromkeys((partner, last) if partner else (last,))
        found = [self._site(both, last)]
        both[last] = None if found[0].site is None else frozenset([found[0].site])
        if partner:
            found.insert(0, self._site(both, partner))
            return found
        if found[0].site is not None and self.good(both):
            other = self._other_site(last, found[0].site)
            found.insert(0, Culprit(last, other, self._place(last, other)))
        return found

    def good(self, sites: Mapping[str, frozenset[int] | None]) -> bool:
        """Whether the program is good when only these transforms run, on these sites."""
        choice = Choice(dict(sites))
        if choice.text not in self.answers:
            self.runs += 1
            self.answers[choice.text] = self.oracle(self._made(choice))
            self.on_run(choice.text, self.answers[choice.text])
        return self.answers[choice.text]

    def _made(self, choice: Choice) -> Program:
        made, records = run(self.program, [_limited(step, choice) for step in self.steps if step.key in choice.sites])
        self._records = {record.key: record for record in records}
        return made

    def _first_bad(self, count: int, choose: Callable[[int], Mapping[str, frozenset[int] | None]]) -> int:
        """The smallest number that is bad, when 0 is good and `count` is bad."""
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            if self.good(choose(middle)):
                low = middle
            else:
                high = middle
        return high

    def _partner(self, names: list[str], last: str) -> str:
        """A transform that must have run before, if there is one."""
        if not self.good({last: None}):
            return ""
        before = names[: names.index(last)]
        count = self._first_bad(len(before), lambda number: dict.fromkeys((*before[:number], last)))
        return before[count - 1]

    def _site(self, both: Mapping[str, frozenset[int] | None], name: str) -> Culprit:
        """The site of `name` that makes it bad, with the others as they are."""
        self._made(Choice({**both, name: None}))
        count = self._records[name].sites
        places = self._records[name].places
        if not places:
            return Culprit(name, None)
        number = self._first_bad(count, lambda some: {**both, name: frozenset(range(some))}) - 1
        return Culprit(name, number, places[number])

    def _other_site(self, name: str, site: int) -> int:
        """An earlier site of the same transform that is needed as well."""
        return self._first_bad(site, lambda some: {name: frozenset((*range(some), site))}) - 1

    def _place(self, name: str, site: int) -> str:
        self._made(Choice({name: None}))
        return self._records[name].places[site]


def _limited(step: Step, choice: Choice) -> Step:
    """The step, anew, with the sites it may rewrite; whatever it then matches is as it should be."""
    transform = step.transform
    made: Any = object.__new__(type(transform))
    made.__dict__.update(transform.__dict__)
    made.options = transform.options.model_copy(update={"expect": "any", "reason": "some sites are left out"})
    made.chosen, made.found = choice.sites[step.key], 0
    return type(step)(step.key, made)


def load_answers(file: Path) -> dict[str, bool]:
    """Answers of an earlier run; none when there was none."""
    return dict(json.loads(file.read_text())) if file.exists() else {}
