"""Models of several architectures with one place spoiled, and whether the explanation is right.

Where a rule still matches although something was changed, there is nothing to explain, and numbers are compared: what
the spoiled model computes must be what it computes after the rule.

`python tests/insight/mutated_models.py --seed 1 --count 200` prints a table by kind of mutation and by rule.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[2])]

from inlay.config import resolve_config
from inlay.frontend import capture
from inlay.frontend.huggingface.checkpoint import HFOptions
from inlay.insight import Finding, explain
from inlay.insight.explanation import drop_contract
from inlay.insight.findings import layer_of
from inlay.program.graphs import all_graphs
from inlay.program.weights import InMemoryTensor
from inlay.rewrite.matcher import Matcher, PatternMatch
from inlay.rewrite.pattern_cache import PATTERNS
from inlay.rewrite.pattern_search import find_matches, trace_alternatives
from inlay.testing.fuzz.checker import check
from inlay.transforms import PatternTransform, configure, run, steps_through
from tests.architectures import without_weights
from tests.insight.mutations import KEEPING, KINDS, Impossible, Place, Right

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from inlay.program import Program
    from inlay.program.bindings import Binding
    from inlay.transforms.pass_manager import TransformStep

LAYERS = 4
SIZES = {"batch": 2, "length": 5}
HALF = ("qwen3", "gemma")
SOME = ("llama", "qwen3", "gemma2", "olmo2", "granite", "gpt_neox")
ALL = (*SOME, "gemma", "phi3", "cohere", "gpt_oss", "stablelm", "smollm3")
RULES = (
    *("match_rms_norm", "match_rope", "match_swiglu", "match_geglu", "match_softmax_attention"),
    *("match_layer_norm", "match_clamped_swiglu", "match_rope_interleaved"),
)


@cache
def captured(architecture: str) -> Program:
    """A small model of this architecture, without weights; some in half precision."""
    with tempfile.TemporaryDirectory() as folder:
        model = without_weights(Path(folder), architecture, LAYERS)
        return capture(model, HFOptions(torch.bfloat16 if architecture in HALF else torch.float32))


@cache
def sites(architecture: str, rule: str) -> tuple[tuple[PatternMatch, fx.Node], ...]:
    """Where a rule matches in the unspoiled model."""
    steps = steps_for(rule)
    program, _ = run(captured(architecture), _any(steps[:-1]))
    transform = steps[-1].transform
    assert isinstance(transform, PatternTransform)
    found = []
    for _, graph in all_graphs(program.graph):
        accepted, _ = find_matches(program, graph, transform, trace_alternatives(program, transform))
        for match in accepted:
            assert match.alternative is not None
            tree = PATTERNS.get(match.alternative.function, match.alternative.example)
            again = Matcher(tree, transform.ignored_args).match(match.root)
            assert isinstance(again, PatternMatch)
            found.append((again, match.root))
    return tuple(found)


@cache
def steps_for(rule: str) -> list[TransformStep]:
    return steps_through(rule, configure(resolve_config()))


def _any(steps: list[TransformStep]) -> list[TransformStep]:
    return [drop_contract(step) for step in steps]


@dataclass(frozen=True)
class Verdict:
    """What was spoiled and what the explanation said first."""

    kind: str
    architecture: str
    rule: str
    output: str
    layer: int | None
    right: Right
    first: Finding | None

    @property
    def ok(self) -> bool:
        """Right node, right reason, right layer, ranked first."""
        layers = () if self.layer is None else (self.layer,)
        first = self.first
        if first is None or first.layers != layers:
            return False
        return first.node in self.right.nodes and first.kind in self.right.reasons

    def __str__(self) -> str:
        wanted = f"{sorted(self.right.nodes)} {[each.value for each in self.right.reasons]} layer {self.layer}"
        told = f"{self.first.node}: {self.first.text}" if self.first else "nothing"
        return f"{self.kind} {self.architecture} {self.rule} at {self.output}: wanted {wanted}; told {told}"


def verdicts(
    seed: int, count: int, architectures: tuple[str, ...], drawn: Counter[str] | None = None
) -> Iterator[Verdict]:
    """Spoil and explain, `count` times; kinds take turns, what cannot be spoiled is drawn again."""
    rng, tally = random.Random(seed), Counter() if drawn is None else drawn
    made = 0
    while made < count:
        kind = KINDS[made % len(KINDS)]
        verdict = _draw(rng, kind, architectures, tally)
        if verdict is not None:
            made += 1
            yield verdict


def compared(seed: int, count: int, architectures: tuple[str, ...]) -> Iterator[tuple[bool, str]]:
    """Change places so that rules may still match, `count` times: whether all do, and how numbers differ if they do."""
    rng, made = random.Random(seed), 0
    while made < count:
        kind = KEEPING[made % len(KEEPING)]
        rule, architecture, found, output, program = _place(rng, architectures)
        try:
            kind(Place.of(program, found, output, rng))
        except Impossible:
            continue
        program.graph.lint()
        problem = numbers_after(program, rule)
        matches = run(program.copy(), _any(steps_for(rule)))[1][-1].sites
        made += 1
        where = f"{kind.__name__} {architecture} {rule} at {output.name}"
        yield matches == len(sites(architecture, rule)), f"{where}: {problem}" if problem else ""


def _place(rng: random.Random, architectures: tuple[str, ...]) -> tuple[str, str, PatternMatch, fx.Node, Program]:
    pairs = {rule: [each for each in architectures if sites(each, rule)] for rule in RULES}
    rule = rng.choice([each for each in RULES if pairs[each]])
    architecture = rng.choice(pairs[rule])
    found, output = rng.choice(sites(architecture, rule))
    return rule, architecture, found, output, captured(architecture).copy()


def _draw(rng: random.Random, kind: Any, architectures: tuple[str, ...], tally: Counter[str]) -> Verdict | None:
    rule, architecture, found, output, program = _place(rng, architectures)
    try:
        right = kind(Place.of(program, found, output, rng))
    except Impossible:
        tally["impossible"] += 1
        return None
    program.graph.lint()
    explained = explain(program, steps_for(rule), rule)[0]
    before = len(sites(architecture, rule))
    if explained.sites != before - 1:
        if explained.sites:
            problem = numbers_after(program, rule)
            assert problem is None, f"{kind.__name__} {architecture} {rule} at {output.name}: {problem}"
        tally["still matches" if explained.sites == before else "spoils other places too"] += 1
        return None
    first = explained.findings[0] if explained.findings else None
    layer = layer_of(output, dict)
    return Verdict(kind.__name__, architecture, rule, output.name, layer, right, first)


def numbers_after(program: Program, rule: str) -> str | None:
    """How numbers differ after the transforms up to a rule, if they do; weights and inputs are random."""
    generator = torch.Generator().manual_seed(0)
    inputs = {row.name: _value(program, row, generator) for row in program.bindings.ins}
    found = check(program, [inputs], [step.transform.name for step in steps_for(rule)])
    return f"{found.transform}: {found.problem}" if found is not None else None


def _value(program: Program, row: Binding, generator: torch.Generator) -> torch.Tensor:
    ref = program.tensors.get(row.name)
    if isinstance(ref, InMemoryTensor):
        return ref.read()
    shape = [size if isinstance(size, int) else SIZES[size] for size in row.shape]
    dtype = getattr(torch, row.dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)).to(dtype)


def main() -> None:
    """Print wrong explanations and two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--some", action="store_true", help="six architectures instead of all")
    arguments = parser.parse_args()
    for seed in arguments.seed:
        _print_tables(seed, arguments.count, SOME if arguments.some else ALL)
        kept = list(compared(seed, arguments.count // 4, SOME if arguments.some else ALL))
        print(*(problem for _, problem in kept if problem), sep="\n")
        print(f"{sum(matches for matches, _ in kept)} of {len(kept)} changed places still match and were compared")


def _print_tables(seed: int, count: int, architectures: tuple[str, ...]) -> None:
    tally: Counter[str] = Counter()
    tables: tuple[dict[str, list[bool]], ...] = ({}, {}, {})
    right = 0
    for verdict in verdicts(seed, count, architectures, tally):
        right += verdict.ok
        for table, key in zip(tables, (verdict.kind, verdict.rule, verdict.architecture), strict=True):
            table.setdefault(key, []).append(verdict.ok)
        if not verdict.ok:
            print("WRONG", verdict, flush=True)
    for table in tables:
        print()
        for key, oks in sorted(table.items()):
            print(f"{key:28} {sum(oks):4} of {len(oks)}")
    print(f"\nseed {seed}: {right} of {count} = {100 * right / count:.1f} %; drawn again: {dict(tally)}", flush=True)


if __name__ == "__main__":
    main()
