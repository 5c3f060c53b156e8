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
        count = self._first_bad(len(names), lambda some: dict.fromkeys(names[:some]))
        before, last = names[: count - 1], names[count - 1]
        culprit = self._site(dict.fromkeys(before), last)
        if culprit.site is None:
            return [culprit]
        if self.good({**dict.fromkeys(before), last: frozenset([culprit.site])}):
            other = self._other_site(before, last, culprit.site)
            return [Culprit(last, other, self._places(before, last)[other]), culprit]
        partner = self._partner(before, culprit)
        return [partner, culprit] if partner else [culprit]

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

    def _site(self, others: Mapping[str, frozenset[int] | None], name: str) -> Culprit:
        """The site of `name` that makes it bad, with the others as they are."""
        places = self._places(list(others), name, others)
        if not places:
            return Culprit(name, None)
        number = self._first_bad(len(places), lambda some: {**others, name: frozenset(range(some))}) - 1
        return Culprit(name, number, places[number])

    def _partner(self, before: list[str], culprit: Culprit) -> Culprit | None:
        """A site of an earlier transform without which the culprit's is good.

        A transform that only prepares the place, so that the culprit does not match without it, is no partner.
        """
        chosen = {culprit.transform: frozenset([culprit.site or 0])}
        if not before or not self.good(chosen):
            return None
        count = self._first_bad(len(before), lambda some: {**dict.fromkeys(before[:some]), **chosen})
        if self._places(before[: count - 1], culprit.transform)[: (culprit.site or 0) + 1][-1:] != [culprit.place]:
            return None
        return self._site({**dict.fromkeys(before[: count - 1]), **chosen}, before[count - 1])

    def _other_site(self, before: list[str], name: str, site: int) -> int:
        """An earlier site of the same transform that is needed as well."""
        others = dict.fromkeys(before)
        return self._first_bad(site, lambda some: {**others, name: frozenset((*range(some), site))}) - 1

    def _places(
        self, others: Sequence[str], name: str, sites: Mapping[str, frozenset[int] | None] | None = None
    ) -> list[str]:
        """Where a transform finds its sites when these others run; asks the oracle nothing."""
        self._made(Choice({**dict.fromkeys(others), **(sites or {}), name: None}))
        return list(self._records[name].places)


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


def reproduce(model: str, culprits: Mapping[str, set[int] | None], *, oracle: str = "logits", dtype: str = "") -> bool:
    """Run a model with all transforms up to the culprits, and these only on the named sites; whether it is bad."""
    import torch

    from inlay.capture import capture
    from inlay.capture.hf import HFOptions
    from inlay.config import resolve
    from inlay.insight.oracles import find_oracle
    from inlay.transforms import configure, foreign
    from inlay.transforms.pipeline import Step

    program = capture(model, HFOptions(getattr(torch, dtype) if dtype else None))
    resolved = resolve(architecture=program.facts.architecture, model=program.name)
    steps = [*configure(resolved), *(Step(name, foreign(name)) for name in culprits if ":" in name)]
    keys = [step.key for step in steps]
    last = max(keys.index(name) for name in culprits)
    chosen = {step.key: culprits.get(step.key) for step in steps[: last + 1] if step.transform.options.enabled}
    sites = {key: None if numbers is None else frozenset(numbers) for key, numbers in chosen.items()}
    bisection = Bisection(program, steps, find_oracle(oracle, program))
    bad = not bisection.good(sites)
    print(f"{model} with {Choice(sites).text}: {'bad' if bad else 'good'}")
    return bad
