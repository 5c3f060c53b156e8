"""Rules whose replacement is not what it says: a fake kernel that is wrong, another dtype, a swapped operand, a kernel
that is right only for small numbers or the captured sizes, or that destroys what it reads.

`python tests/testing/wrong_replacements.py --seed 1 --count 100` draws that many, and says which of `assert_rewrites`,
`verify` and `review` noticed each.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parents[2])]

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.insight.verify import FAILURES, NumericsCheck
from inlay.program.graphs import TypeFormatter
from inlay.program.type_checks import type_mismatch
from inlay.rewrite.pattern_search import find_matches, trace_alternatives
from inlay.testing import assert_rewrites, program_of
from inlay.testing.review import review
from inlay.transforms import Numerics, Stage, run
from inlay.transforms.base import PatternTransform, Transform, TransformResult
from inlay.transforms.pass_manager import TransformStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from inlay.program import Program

    Change = Callable[[Tensor], Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ({"m": 3, "n": 4, "k": 5}, {"m": 4, "n": 4, "k": 4}, {"m": 2, "n": 7, "k": 3})
_EXAMPLE = {"m": 3, "n": 5, "k": 7}


class Fused(PatternTransform):
    """A pattern that becomes one operator of its own."""

    stage, numerics = Stage.CLEAN, Numerics.ROUNDING
    shapes: ClassVar[Mapping[str, str]]
    pattern: Callable[..., Tensor]
    operator: ClassVar[Any]
    swapped: ClassVar[bool] = False
    cast: ClassVar[torch.dtype | None] = None

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return {
            name: torch.ones([_EXAMPLE[size] for size in shape], dtype=dtype) for name, shape in self.shapes.items()
        }

    def replacement(self, **values: Tensor) -> Tensor:
        made: Tensor = self.operator(*self.operands(values))
        return made if self.cast is None else made.to(self.cast)

    def operands(self, values: Mapping[str, Any]) -> list[Any]:
        given = [values[name] for name in self.shapes]
        return given[::-1] if self.swapped else given


class ByHand(Transform):
    """The same replacement by a transform that writes the loop itself, and takes the type of what was there."""

    stage, numerics = Stage.CLEAN, Numerics.ROUNDING
    rule: ClassVar[type[Fused]]
    sound: ClassVar[type[Fused]]

    def apply(self, program: Program) -> TransformResult:
        rule, finder, graph = self.rule(), self.sound(), program.graph
        sites, _ = find_matches(program, graph, finder, trace_alternatives(program, finder))
        for match in sites:
            (old,) = match.outputs
            with graph.inserting_before(old):
                made = graph.call_function(rule.operator, tuple(rule.operands(match.values)))
                if rule.cast is not None:
                    made.meta = dict(old.meta)
                    made = graph.call_function(torch.ops.aten._to_copy.default, (made,), {"dtype": rule.cast})
            made.meta = dict(old.meta)
            old.replace_all_uses_with(made)
            for node in reversed(match.nodes):
                graph.erase_node(node)
        return TransformResult(program, len(sites))


class ReluTransposed(Fused):
    shapes: ClassVar[Mapping[str, str]] = {"x": "mn"}

    def pattern(self, x: Tensor) -> Tensor:
        return x.relu().transpose(0, 1)


class HeadsFirst(Fused):
    shapes: ClassVar[Mapping[str, str]] = {"x": "mnk"}

    def pattern(self, x: Tensor) -> Tensor:
        return x.tanh().transpose(0, 1)


class RowMeans(Fused):
    shapes: ClassVar[Mapping[str, str]] = {"x": "mn"}

    def pattern(self, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True).tanh()


class Gated(Fused):
    shapes: ClassVar[Mapping[str, str]] = {"x": "mn", "y": "mn"}

    def pattern(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sigmoid() * y


class Difference(Fused):
    shapes: ClassVar[Mapping[str, str]] = {"x": "mnk", "y": "mnk"}

    def pattern(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).tanh()


class Quotient(Fused):
    shapes: ClassVar[Mapping[str, str]] = {"x": "mn", "y": "mn"}

    def pattern(self, x: Tensor, y: Tensor) -> Tensor:
        return x / (y.exp() + 1)


class Weighted(Fused):
    shapes: ClassVar[Mapping[str, str]] = {"x": "mn", "y": "mn"}

    def pattern(self, x: Tensor, y: Tensor) -> Tensor:
        return x.softmax(-1) * y


class Product(Fused):
    shapes: ClassVar[Mapping[str, str]] = {"x": "mk", "y": "kn"}

    def pattern(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).relu()


RULES: tuple[type[Fused], ...] = (ReluTransposed, HeadsFirst, RowMeans, Gated, Difference, Quotient, Weighted, Product)
READERS: Mapping[str, Callable[[Tensor], Any]] = {
    "returned": lambda made: made,
    "elementwise": lambda made: made.tanh(),
    "in float": lambda made: made.float().tanh(),
    "summed": lambda made: made.sum(-1),
    "flat": lambda made: made.reshape(-1) * 2,
    "in one piece": lambda made: made.contiguous().view(-1) + 1,
    "twice": lambda made: (made.exp(), made + 1),
}
TYPES = ("fake shape", "fake dtype", "fake strides", "real dtype", "real strides", "another dtype", "swapped operand")
CORNERS = ("large numbers", "another size", "a destroyed operand")
KINDS = (*TYPES, *CORNERS)


@dataclass(frozen=True)
class Place:
    """A rule, and a program with one site of it."""

    rule: type[Fused]
    dtype: torch.dtype
    sizes: int
    reader: str
    dynamic: bool

    @property
    def args(self) -> list[Tensor]:
        sizes, generator = SIZES[self.sizes], torch.Generator().manual_seed(0)
        shapes = [[sizes[size] for size in shape] for shape in self.rule.shapes.values()]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]

    def __str__(self) -> str:
        sizes = "dynamic" if self.dynamic else "×".join(map(str, SIZES[self.sizes].values()))
        return f"{self.rule.__name__} {str(self.dtype).removeprefix('torch.')} {sizes}, {self.reader}"


@cache
def captured(place: Place) -> Program:
    """The program of a place."""
    rule, read = place.rule(), READERS[place.reader]
    one = lambda x: read(rule.pattern(x))  # noqa: E731 - axes are told by the names of arguments
    two = lambda x, y: read(rule.pattern(x, y))  # noqa: E731
    axes = {name: {at: size for at, size in enumerate(shape) if size == "m"} for name, shape in rule.shapes.items()}
    rows = {name: dict.fromkeys(found, "rows") for name, found in axes.items() if found}
    return program_of(one if len(rule.shapes) == 1 else two, place.args, rows if place.dynamic else None)


@dataclass(frozen=True)
class Fault:
    """A transform with a fault in its replacement, and a place where it shows."""

    kind: str
    place: Place
    transform: type[Transform]
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail}), {self.transform.__name__}, {self.place}"


_NUMBER = itertools.count()


def _operator(
    place: Place,
    fake: Change = lambda made: made,
    real: Change = lambda made: made,
    corner: Callable[[Tensor, Tensor], Tensor] = lambda made, operand: made,
) -> Any:
    """An operator that computes the pattern, with changes to what it gives and to what its fake kernel says."""
    number, compute = next(_NUMBER), place.rule().pattern
    arguments = ", ".join(f"Tensor {name}" for name in place.rule.shapes)
    made = torch.library.custom_op(
        f"inlay_wrong::op{number}",
        lambda *values: corner(real(compute(*values)), values[0]),
        mutates_args=(),
        schema=f"({arguments}) -> Tensor",
    )
    made.register_fake(lambda *values: fake(compute(*values)))
    return getattr(torch.ops.inlay_wrong, f"op{number}").default


def sound(place: Place, **attributes: Any) -> type[Fused]:
    """The rule of a place, without a fault unless attributes bring one."""
    named = {"name": f"fused_{next(_NUMBER)}", "__module__": __name__}
    return type(place.rule.__name__, (place.rule,), {"operator": _operator(place), **named, **attributes})


def by_hand(rule: type[Fused], place: Place) -> type[Transform]:
    """What a rule does, by a transform that is none."""
    named = {"name": f"by_hand_{next(_NUMBER)}", "__module__": __name__}
    return type("ByHand", (ByHand,), {"rule": rule, "sound": sound(place), **named})


def _shapes(made: Tensor) -> Iterator[tuple[str, Change]]:
    yield "one more row", lambda made: made.new_empty((made.shape[0] + 1, *made.shape[1:]))
    yield "sizes reversed", lambda made: made.new_empty(tuple(reversed(made.shape)))
    yield "an axis more", lambda made: made.new_empty((*made.shape, 1))
    yield "flat", lambda made: made.new_empty((made.numel(),))
    yield "like its input", lambda made: made.new_empty(made.transpose(0, 1).shape)


def _dtypes(made: Tensor) -> Iterator[tuple[str, Change]]:
    for dtype in (torch.float64, *DTYPES):
        yield str(dtype).removeprefix("torch."), methodcaller("to", dtype)


def _strides(made: Tensor) -> Iterator[tuple[str, Change]]:
    """The same values elsewhere in memory."""
    axes = tuple(reversed(range(made.dim())))
    yield "transposed", lambda made: made.permute(axes).contiguous().permute(axes)
    yield "in one piece", lambda made: made.contiguous()
    yield "padded rows", lambda made: torch.cat([made, made[..., :1]], -1)[..., :-1]


def _corner(kind: str, result: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Wrong where nobody looks who draws a few small numbers of the captured sizes."""

    def wrong(made: Tensor, operand: Tensor) -> Tensor:
        if kind == "a destroyed operand":
            made = made.clone()
            operand.zero_()
        elif made.numel() > result.numel() if kind == "another size" else bool(operand.abs().max() > 20):
            made = made * 0.5 + 1
        return made

    return wrong


WAYS = {"shape": _shapes, "dtype": _dtypes, "strides": _strides}


def draw(generator: random.Random, kind: str) -> Fault:
    """A fault of this kind that changes something, in a random rule and place."""
    while True:
        place = Place(
            generator.choice(RULES),
            generator.choice(DTYPES),
            generator.randrange(len(SIZES)),
            generator.choice(list(READERS)),
            generator.random() < 0.25,
        )
        result = place.rule().pattern(*place.args)
        if kind == "swapped operand":
            if len({each.shape for each in place.args}) != 1 or len(place.args) != 2:
                continue
            detail, rule = "x for y", sound(place, swapped=True)
        elif kind == "another dtype":
            dtype = generator.choice([each for each in (torch.float64, *DTYPES) if each != place.dtype])
            detail, rule = str(dtype).removeprefix("torch."), sound(place, cast=dtype)
        elif kind in CORNERS:
            if kind == "another size" and not place.dynamic:
                continue
            detail, rule = "wrong there", sound(place, operator=_operator(place, corner=_corner(kind, result)))
        else:
            which, _, what = kind.partition(" ")
            detail, change = generator.choice(list(WAYS[what](result)))
            if type_mismatch(change(result), result, TypeFormatter({})) == ("", ""):
                continue
            changes: dict[str, Any] = {which: change}
            rule = sound(place, operator=_operator(place, **changes))
        transform = by_hand(rule, place) if generator.random() < 0.3 else rule
        return Fault(kind, place, transform, detail)


def by_assert_rewrites(rule: type[Transform], place: Place) -> str:
    """What `assert_rewrites` says against a rule; nothing if it passes."""
    try:
        assert_rewrites(captured(place), rule(), args=place.args, sites=1)
    except (AssertionError, InlayError) as error:
        return str(error) or "an assertion"
    return ""


def by_verify(rule: type[Transform], place: Place) -> str:
    """What `inlay verify` says."""
    seen = NumericsCheck(rounds=2)
    try:
        run(captured(place), [TransformStep(rule.name, rule())], [seen])
    except InlayError as error:
        return str(error)
    return "; ".join(f"{each.change}: {each.reason}" for each in seen.verdicts if each.change in FAILURES)


def by_review(rule: type[Transform], place: Place) -> str:
    """What `inlay review` says in its line about outputs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = review(rule, {"program": captured(place)}, folder=Path(folder))
        except InlayError as error:
            return str(error)
    (outputs,) = [each for each in done.checks if each.title.startswith("Outputs")]
    return "" if outputs.passed else "; ".join(outputs.evidence)


CHECKS = {"assert_rewrites": by_assert_rewrites, "verify": by_verify, "review": by_review}


def unnoticed(seed: int, count: int, told: Callable[[str], None] = lambda line: None) -> list[str]:
    """Draw faults, as many of each kind; the checks that did not notice one, and sound rules that one is against."""
    generator = random.Random(seed)
    found = []
    for index in range(count):
        fault = draw(generator, KINDS[index % len(KINDS)])
        for name, check in CHECKS.items():
            said = check(fault.transform, fault.place)
            told(f"{index:3} {fault}: {name}: {said or 'NOTHING'}")
            if not said:
                found.append(f"{name}: {fault}")
        if index % 4 == 0:
            for rule in (sound(fault.place), by_hand(sound(fault.place), fault.place)):
                against = {name: said for name, check in CHECKS.items() if (said := check(rule, fault.place))}
                found += [f"{name} is against a sound rule: {fault.place}: {said}" for name, said in against.items()]
    return found


def main() -> int:
    """Draw, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    lines: list[str] = []

    def told(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    found = unnoticed(given.seed, given.count, told)
    kinds = Counter(line.split(maxsplit=1)[1].partition(" (")[0] for line in lines)
    print({kind: number // len(CHECKS) for kind, number in kinds.items()})
    print("\n".join(found) or f"{given.count} faults, seed {given.seed}: all noticed by {', '.join(CHECKS)}")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
