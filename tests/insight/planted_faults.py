"""Models of several architectures, transforms that get a site wrong, and whether bisection names it.

`python tests/insight/planted_faults.py --seed 1 --count 60` prints every fault and tables by kind, transform and
architecture.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[2])]

import torch

from inlay.config import resolve_config
from inlay.errors import TransformError
from inlay.frontend import capture
from inlay.insight.bisect import Bisection, Culprit
from inlay.insight.explanation import drop_contract
from inlay.insight.oracles import make_oracle
from inlay.integrations.external_pass import ExternalPass
from inlay.transforms import configure, run
from inlay.transforms.pass_manager import TransformStep
from tests.architectures import config_of
from tests.insight.faults import EXTERNAL, KINDS, PAIRS, Fault, Impossible, broken, by_external, forgetting, owing
from tests.models import random_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program import Program

SOME = ("llama", "qwen3")
ALL = (*SOME, "gemma2", "olmo2", "granite", "gpt_neox", "phi3", "cohere", "gpt_oss", "starcoder2", "mixtral")
SINGLE = {kind.__name__: kind for kind in KINDS}
ALL_KINDS = (*SINGLE, *PAIRS, "external")
_FOLDER = tempfile.TemporaryDirectory()


@cache
def captured(architecture: str) -> Program:
    """A small model of this architecture with random weights, those of its norms too."""
    model = random_model(config_of(architecture))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    folder = Path(_FOLDER.name, architecture)
    model.save_pretrained(folder)
    return capture(str(folder))


@cache
def oracle(architecture: str) -> Any:
    return make_oracle("logits", captured(architecture))


@cache
def sites(architecture: str) -> list[tuple[str, str]]:
    """Every site of the sound transforms: transform, and the captured node it stands for."""
    sound = Bisection(captured(architecture), configure(resolve_config()), lambda made: True)
    return [(rule, site) for rule, site in sound.site_index if site and "#" not in site]


@dataclass(frozen=True)
class Verdict:
    """What was planted and what bisection said."""

    kind: str
    architecture: str
    wanted: list[Culprit]
    found: list[Culprit]
    runs: int
    sites: int

    @property
    def bound(self) -> float:
        return 2 * math.log2(self.sites) + 10

    @property
    def ok(self) -> bool:
        same = [(each.transform, each.root) for each in self.found] == [
            (one.transform, one.root) for one in self.wanted
        ]
        return same and self.runs <= self.bound

    def __str__(self) -> str:
        wanted, found = (", ".join(f"{one.transform} {one.root}" for one in some) for some in (self.wanted, self.found))
        told = "named" if self.ok else f"NOT NAMED, but {found or 'nothing'}"
        cost = f"{self.runs} of {self.bound:.1f} runs, {self.sites} sites"
        return f"{self.kind}; {self.architecture}; {wanted}: {told}; {cost}"


def verdicts(
    seed: int,
    count: int,
    architectures: tuple[str, ...] = ALL,
    drawn: Counter[str] | None = None,
    kinds: tuple[str, ...] = ALL_KINDS,
) -> Iterator[Verdict]:
    """Plant and bisect, `count` times; kinds take turns, what cannot be planted or changes nothing is drawn again."""
    rng, tally = random.Random(seed), Counter() if drawn is None else drawn
    made = 0
    while made < count:
        kind, architecture = kinds[made % len(kinds)], rng.choice(architectures)
        try:
            yield _judged(kind, architecture, *_planted(rng, kind, architecture))
            made += 1
        except Impossible as reason:
            tally[str(reason)] += 1
        except TransformError as error:
            if not isinstance(error.__cause__, Impossible):
                raise
            tally[str(error.__cause__)] += 1


def _planted(rng: random.Random, kind: str, architecture: str) -> tuple[list[TransformStep], list[tuple[str, str]]]:
    """Steps with a fault in them, and where it is."""
    if kind == "external":
        spoil = by_external(rng.choice(EXTERNAL), rng.random())
        return [*configure(resolve_config()), TransformStep(kind, ExternalPass(spoil))], [(kind, "")]
    changes = [owing(kind), forgetting(kind)] if kind in PAIRS else [SINGLE[kind]]
    able = sites(architecture)
    rules = rng.choices(sorted({rule for rule, _ in able}), k=len(changes))
    places = [rng.choice([site for site in able if site[0] == rule]) for rule in rules]
    if len(set(places)) < len(changes):
        raise Impossible("twice the same site")
    places.sort(key=able.index)
    faults = [(rule, Fault(site, change, rng.random())) for (rule, site), change in zip(places, changes, strict=True)]
    if kind in PAIRS and _is_bad(architecture, _with(faults[:1])):
        raise Impossible("the first of the two is wrong alone")
    return _with(faults), places


def _with(faults: list[tuple[str, Fault]]) -> list[TransformStep]:
    return [broken(step, [fault for rule, fault in faults if rule == step.key]) for step in configure(resolve_config())]


def _is_bad(architecture: str, steps: list[TransformStep]) -> bool:
    made, _ = run(captured(architecture), [drop_contract(step) for step in steps])
    return not oracle(architecture)(made)


def _judged(kind: str, architecture: str, steps: list[TransformStep], places: list[tuple[str, str]]) -> Verdict:
    bisection = Bisection(captured(architecture), steps, oracle(architecture))
    if any(place not in bisection.site_index for place in places):
        raise Impossible("the first of the two hides the second")
    if not _is_bad(architecture, steps):
        raise Impossible("changes nothing")
    wanted = [bisection.site_index[place] for place in places]
    return Verdict(
        kind, architecture, wanted, bisection.find_all(1).culprits, bisection.runs, len(bisection.site_index)
    )


def main() -> None:
    """Print every fault and three tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=60)
    arguments = parser.parse_args()
    for seed in arguments.seed:
        _print_tables(seed, arguments.count)


def _print_tables(seed: int, count: int) -> None:
    tally: Counter[str] = Counter()
    tables: tuple[dict[str, list[Verdict]], ...] = ({}, {}, {})
    for verdict in verdicts(seed, count, ALL, tally):
        print(verdict, flush=True)
        rules = [each.transform for each in verdict.wanted]
        for table, keys in zip(tables, ([verdict.kind], rules, [verdict.architecture]), strict=True):
            for key in dict.fromkeys(keys):
                table.setdefault(key, []).append(verdict)
    for table in tables:
        print()
        for key, some in sorted(table.items()):
            most = max(some, key=lambda each: each.runs)
            right = sum(each.ok for each in some)
            print(f"{key:24} {right:3} of {len(some):2}; at most {most.runs} runs of {most.bound:.1f}")
    everything = [verdict for some in tables[0].values() for verdict in some]
    right = sum(verdict.ok for verdict in everything)
    print(f"\nseed {seed}: {right} of {count}; drawn again: {dict(tally)}", flush=True)


if __name__ == "__main__":
    main()
