"""Random masks made of positions, and what a derivation says of them judged by computing them.

    python tests/analysis/random_masks.py --count 100000             # constants to 40, the whole square
    python tests/analysis/random_masks.py --count 2000 --large       # constants to 2**20, every breakpoint and ± 1

A mask is drawn as a graph of torch operators and run by torch, operator by operator: nothing is shared with the
derivation. A claim that differs from what was computed anywhere is an error. Masks that are causal, windowed or show
everything, at every length that was computed, and are not understood are counted; refused on purpose are
fractions, positions in dtypes that do not hold them, and what is read after something was written in place.
"""

from __future__ import annotations

import argparse
import operator
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import fx

from inlay.analysis.masks.classification import MaskAnalysis, MaskKind
from inlay.program.program import Symbol
from inlay.program.symbols import FakeValues

aten = torch.ops.aten
_CAPTURED = 101
"""The length at which types are found: no constant in a shape comes near it."""
_FAKES = FakeValues([Symbol("length", 1, None, _CAPTURED)])
_COMPARE = ("le", "lt", "ge", "gt")


@cache
def _fake(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A type: sizes near the captured length are that length and a constant more or less."""
    return _FAKES.tensor(dtype, [_expression(size) if size > _CAPTURED // 2 else size for size in shape])


@cache
def _size(size: int) -> Any:
    return _FAKES.size(_expression(size))


def _expression(size: int) -> str:
    more = size - _CAPTURED
    return f"length {'-' if more < 0 else '+'} {abs(more)}" if more else "length"


@dataclass
class Drawn:
    """A graph, what reads masks in it, and how far the constants in it reach."""

    graph: fx.Graph
    size: fx.Node
    readers: list[fx.Node] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    plain: bool = True
    """No constant is a fraction, no position in a dtype that is too small, nothing is written in place."""

    def masks(self) -> list[fx.Node]:
        return [reader.args[0] for reader in self.readers]  # type: ignore[misc]

    def computed(self, length: int) -> list[torch.Tensor]:
        """What each reader reads at this length: every row and column, computed by torch."""
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            elif node.op == "placeholder":
                values[node] = torch.empty(length, device="meta")
        return [values[reader].reshape(values[reader].shape[-2:]) for reader in self.readers]

    def computed_at(self, rows: torch.Tensor, columns: torch.Tensor, length: int) -> dict[fx.Node, Any]:
        """What each node is at these rows and columns: element by element, so views are left out."""
        values: dict[fx.Node, Any] = {}
        both = torch.stack([rows, columns])
        for node in self.graph.nodes:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.get)
            if node.op == "placeholder" or node.target is aten.sym_size.int:
                values[node] = length
            elif node.target is aten.arange.start:
                values[node] = (both + args[0]).to(kwargs.get("dtype", torch.int64))
            elif node.target is aten.unsqueeze.default:
                values[node] = args[0][1 - args[1]] if args[0].dim() == 2 else args[0]
            elif node.target is aten.expand.default:
                values[node] = args[0].expand(len(rows))
            elif node.target is aten.ones.default:
                values[node] = torch.ones(len(rows), dtype=kwargs["dtype"])
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
        return values


class Drawing:
    """Draws one mask."""

    def __init__(self, rng: random.Random, largest: int, *, in_shapes: bool) -> None:
        self.rng, self.largest, self.in_shapes = rng, largest, in_shapes
        graph = fx.Graph()
        given = graph.placeholder("x")
        given.meta["val"] = _fake(torch.float32, (_CAPTURED,))
        self.drawn = Drawn(graph, graph.call_function(aten.sym_size.int, (given, 0)))
        self.drawn.size.meta["val"] = _FAKES.size("length")
        self.small: dict[fx.Node, Any] = {self.drawn.size: _CAPTURED}
        self.made: dict[str, list[fx.Node]] = {"number": [], "boolean": []}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, with its type: the operator is run once."""
        node = self.drawn.graph.call_function(target, args, kwargs)
        small_args, small_kwargs = fx.map_arg((args, kwargs), self.small.__getitem__)
        value = target(*small_args, **small_kwargs)
        self.small[node] = value
        tensor = isinstance(value, torch.Tensor)
        node.meta["val"] = _fake(value.dtype, tuple(value.shape)) if tensor else _size(value)
        return node

    def constant(self, *, sizes: bool = False) -> Any:
        """An integer; now and then written as a fraction, or a fraction."""
        self.drawn.constants.append(self.rng.randint(0, self.rng.choice((3, self.largest))))
        value: Any = self.drawn.constants[-1] * self.rng.choice((1, 1, 1, -1))
        if not sizes and self.rng.random() < 0.15:
            value = float(value)
            if self.rng.random() < 0.1:
                self.drawn.plain = False
                return value + self.rng.choice((0.5, 0.25, 1e-9, -0.3))
        return value

    # Positions

    def positions(self, axis: int) -> fx.Node:
        """Counted along an axis: `[length, 1]` or `[1, length]`, from 0 or from a constant that is taken off again."""
        offset = self.constant(sizes=True) if self.rng.random() < 0.2 else 0
        end = self.call(operator.add, self.drawn.size, offset) if offset else self.drawn.size
        dtype = self.rng.choice([torch.int64] * 12 + [torch.int32, torch.float32, torch.float64])
        node = self.call(aten.arange.start, offset, end, dtype=dtype)
        if self.rng.random() < 0.08:
            node = self.narrowed(node)
        if self.in_shapes and offset >= 0 and self.rng.random() < 0.3:  # the same positions as the end of more
            more = self.call(aten.arange.start, 0, self.call(operator.add, self.drawn.size, offset))
            node = self.call(aten.slice.Tensor, more, 0, offset, self.rng.choice((2**63 - 1,)))
        node = self.call(aten.unsqueeze.default, node, axis)
        if offset and self.rng.random() < 0.9:
            node = self.call(aten.sub.Tensor, node, offset)
        return self.shifted(node)

    def narrowed(self, node: fx.Node) -> fx.Node:
        self.drawn.plain = False
        dtype = self.rng.choice((torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16))
        return self.call(aten._to_copy.default, node, dtype=dtype)

    def shifted(self, node: fx.Node, chance: float = 0.5) -> fx.Node:
        """Constants added up, the length added and taken off, doubled."""
        while self.rng.random() < chance:
            way = self.rng.randrange(9)
            if way < 5:
                node = self.call(self.rng.choice((aten.add.Tensor, aten.sub.Tensor)), node, self.constant())
            elif way == 8:
                node = self.call(aten.add.Tensor, node, self.divided(self.exact(self.rng.choice((0, 1)))))
            elif way == 5:
                one, two = self.rng.sample((aten.add.Tensor, aten.sub.Tensor), 2)
                node = self.call(two, self.call(one, node, self.drawn.size), self.drawn.size)
            elif way == 6:
                node = self.call(aten.sub.Tensor, self.call(aten.mul.Tensor, node, 2), node)
            elif way == 7:
                node = self.call(aten.neg.default, self.call(aten.rsub.Scalar, node, self.constant()))
        return node

    def divided(self, node: fx.Node) -> fx.Node:
        """Divided by more than it can be, which is 0; now and then by less."""
        few = self.rng.random() < 0.1
        self.drawn.plain &= not few
        if few:
            self.drawn.constants.append(self.rng.randint(1, self.largest))
        return self.call(aten.floor_divide.Scalar, node, self.drawn.constants[-1] if few else 2**30)

    def comparison(self) -> fx.Node:
        """Any comparison of positions, constants, the length."""
        rng = self.rng
        left = self.positions(rng.choice((0, 1))) if rng.random() < 0.7 or not self.made["number"] else self.old()
        way = rng.randrange(6)
        name = rng.choice((*_COMPARE, *_COMPARE, "eq", "ne"))
        if way == 0:
            return self.boolean(getattr(aten, name).Scalar, left, self.constant())
        if way == 1:
            return self.boolean(getattr(aten, name).Scalar, self.number(aten.sub.Tensor, left, self.drawn.size), 0)
        right = self.positions(rng.choice((0, 1)))
        if rng.random() < 0.1:
            right = self.extreme(rng.choice((1, -1)), right)
        if way == 2:
            left = self.number(rng.choice((aten.add.Tensor, aten.sub.Tensor)), left, right)
            return self.boolean(getattr(aten, name).Scalar, self.shifted(left), self.constant())
        return self.boolean(getattr(aten, name).Tensor, left, right)

    def number(self, target: Any, *args: Any) -> fx.Node:
        self.made["number"].append(self.call(target, *args))
        return self.made["number"][-1]

    def boolean(self, target: Any, *args: Any) -> fx.Node:
        self.made["boolean"].append(self.call(target, *args))
        return self.made["boolean"][-1]

    def old(self) -> fx.Node:
        return self.rng.choice(self.made["number"])

    # Masks

    def causal(self) -> fx.Node:
        """`column <= row`, written in one of many ways."""
        row, column = self.exact(1), self.exact(0)
        return self.rng.choice(
            (
                lambda: self.boolean(aten.le.Tensor, column, row),
                lambda: self.boolean(aten.ge.Tensor, row, column),
                lambda: self.boolean(aten.gt.Tensor, self.call(aten.add.Tensor, row, 1), column),
                lambda: self.boolean(aten.ge.Scalar, self.call(aten.sub.Tensor, row, column), 0),
                lambda: self.boolean(aten.bitwise_not.default, self.boolean(aten.gt.Tensor, column, row)),
                lambda: self.triangle(),
            )
        )()

    def triangle(self) -> fx.Node:
        if not self.in_shapes:
            return self.causal()
        ones = self.call(aten.ones.default, [self.drawn.size, self.drawn.size], dtype=torch.bool)
        return self.boolean(aten.tril.default, ones)

    def window(self) -> fx.Node:
        """`column > row - window`, the window one constant or the sum of several."""
        row, column = self.exact(1), self.exact(0)
        steps = [abs(self.constant()) for _ in range(self.rng.choice((1, 1, 2, 4)))]
        if self.rng.random() < 0.5:
            for step in steps:
                row = self.call(aten.sub.Tensor, row, step)
            return self.boolean(aten.gt.Tensor, column, row)
        gap = self.call(aten.sub.Tensor, column, row)
        for step in steps:
            gap = self.call(aten.add.Tensor, gap, step)
        return self.boolean(aten.gt.Scalar, gap, 0)

    def exact(self, axis: int) -> fx.Node:
        """Positions from 0, whatever is added taken off again."""
        rng, offset = self.rng, 0
        if rng.random() < 0.2:
            self.drawn.constants.append(offset := rng.randint(1, self.largest))
        end = self.call(operator.add, self.drawn.size, offset) if offset else self.drawn.size
        kind = {"dtype": rng.choice((torch.int32, torch.float32))} if rng.random() < 0.1 else {}
        node = self.call(aten.unsqueeze.default, self.call(aten.arange.start, offset, end, **kind), axis)
        return self.call(aten.sub.Tensor, node, offset) if offset else node

    def neutral(self, mask: fx.Node) -> fx.Node:
        """The same mask: with something that always holds, or with something that it implies."""
        rng = self.rng
        row, column = self.exact(1), self.exact(0)
        length, constant = self.drawn.size, abs(self.constant(sizes=True))
        always = rng.choice(
            (
                lambda: self.boolean(aten.lt.Scalar, self.call(aten.sub.Tensor, column, length), 0),
                lambda: self.boolean(aten.ge.Scalar, row, -constant),
                lambda: self.boolean(aten.ge.Scalar, self.call(aten.add.Tensor, row, column), 0),
                lambda: self.boolean(aten.gt.Tensor, self.call(aten.add.Tensor, row, length), column),
                lambda: self.call(aten.ones.default, [1, length], dtype=torch.bool),
                *(
                    lambda: self.boolean(aten.le.Tensor, column, self.extreme(1)),
                    lambda: self.boolean(aten.ge.Tensor, row, self.extreme(-1)),
                )[: 2 * self.in_shapes],
            )
        )
        implied = rng.choice(
            (
                lambda: self.boolean(aten.le.Tensor, column, self.call(aten.add.Tensor, row, constant)),
                lambda: self.boolean(aten.bitwise_or.Tensor, mask, self.comparison()),
            )
        )
        return rng.choice(
            (
                lambda: self.boolean(aten.bitwise_and.Tensor, mask, always()),
                lambda: self.boolean(aten.__and__.Tensor, implied(), mask),
                lambda: self.boolean(aten.logical_or.default, mask, self.call(aten.logical_not.default, always())),
                lambda: self.boolean(aten.where.self, always(), mask, self.comparison()),
                lambda: self.boolean(aten.ne.Scalar, self.call(aten._to_copy.default, mask, dtype=torch.int64), 0),
                lambda: self.boolean(aten.bitwise_not.default, self.call(aten.bitwise_not.default, mask)),
                lambda: self.moved(mask),
            )
        )()

    def extreme(self, sign: int, node: fx.Node | None = None) -> fx.Node:
        """The largest or smallest position, or of what else is given."""
        node = node or self.call(aten.mul.Tensor, self.exact(self.rng.choice((0, 1))), self.rng.choice((1, 2)))
        if not self.in_shapes:
            return node
        largest, smallest = (aten.max.default, aten.amax.default), (aten.min.default, aten.amin.default)
        return self.call(self.rng.choice(largest if sign > 0 else smallest), node)

    def moved(self, mask: fx.Node) -> fx.Node:
        """The same mask through its indexes."""
        if not self.in_shapes:
            return mask
        whole = self.whole(mask)
        if self.rng.random() < 0.5:
            return self.boolean(aten.transpose.int, self.call(aten.permute.default, whole, [1, 0]), 0, 1)
        return self.boolean(aten.index.Tensor, whole, [self.exact_index(1), self.exact_index(0)])

    def exact_index(self, axis: int) -> fx.Node:
        return self.call(aten.unsqueeze.default, self.call(aten.arange.start, 0, self.drawn.size), axis)

    def whole(self, mask: fx.Node) -> fx.Node:
        return self.call(aten.expand.default, mask, [self.drawn.size, self.drawn.size])

    def logic(self, depth: int) -> fx.Node:
        """Any formula."""
        rng = self.rng
        if depth == 0 or rng.random() < 0.2:
            if rng.random() < 0.15 and self.made["boolean"]:
                return rng.choice(self.made["boolean"])
            return rng.choice((self.comparison, self.comparison, self.causal, self.window))()
        way = rng.randrange(8)
        one, two = self.logic(depth - 1), self.logic(depth - 1)
        if way == 0:
            return self.boolean(aten.bitwise_not.default, one)
        if way == 1:
            return self.boolean(aten.where.self, self.logic(depth - 1), one, two)
        if way == 2:
            return self.boolean(rng.choice((aten.bitwise_xor.Tensor, aten.eq.Tensor, aten.mul.Tensor)), one, two)
        way_out = rng.choice((aten.bitwise_and.Tensor, aten.logical_and.default, aten.bitwise_or.Tensor))
        return self.boolean(way_out, one, two)

    def read(self, mask: fx.Node) -> None:
        """Somebody reads the mask, as booleans or as what is added to scores."""
        node = self.whole(mask)
        if self.rng.random() < 0.3:
            hidden = self.rng.choice((float("-inf"), torch.finfo(torch.float32).min, -1e9 if self.in_shapes else -1.0))
            zero = self.call(aten.full.default, [], 0.0, dtype=torch.float32)
            node = self.call(aten.where.ScalarOther, node, zero, hidden)
        for _ in range(self.rng.choice((0, 2))):
            node = self.call(aten.unsqueeze.default, node, 0)
        self.drawn.readers.append(self.call(aten.clone.default, node))

    def written(self, mask: fx.Node) -> None:
        """Something is written in place, and the mask is read again."""
        rng, self.drawn.plain = self.rng, False
        target = self.call(aten.clone.default, self.whole(mask)) if rng.random() < 0.7 else None
        if target is not None:
            self.read(target)
            seen = self.call(aten.permute.default, target, [1, 0]) if self.in_shapes and rng.random() < 0.5 else target
            other = self.whole(self.logic(1))
            self.call(rng.choice((aten.bitwise_or_.Tensor, aten.bitwise_and_.Tensor, aten.copy_.default)), seen, other)
            self.read(target)
        else:  # positions themselves are written
            row, column = self.call(aten.clone.default, self.exact(1)), self.exact(0)
            early = self.boolean(aten.le.Tensor, column, row)
            self.call(aten.sub_.Tensor, row, self.rng.choice((1, 0, 2)))
            self.read(early if rng.random() < 0.5 else self.boolean(aten.le.Tensor, column, row))


def draw(seed: int, largest: int = 40, *, in_shapes: bool = True) -> Drawn:
    """One random mask, or several that share values."""
    rng = random.Random(seed)
    drawing = Drawing(rng, largest, in_shapes=in_shapes)
    way = rng.random()
    if way < 0.4:
        mask = drawing.causal()
        if rng.random() < 0.7:
            mask = drawing.boolean(aten.bitwise_and.Tensor, *rng.sample((mask, drawing.window()), 2))
        while rng.random() < 0.5:
            mask = drawing.neutral(mask)
    else:
        mask = drawing.logic(rng.choice((1, 2, 3)))
    drawing.read(mask)
    if way > 0.9:
        drawing.written(mask)
    return drawing.drawn


def shown(meaning: MaskKind, back: torch.Tensor) -> torch.Tensor:
    """What a meaning says the mask shows, `back` being row less column."""
    if not meaning.is_causal:
        return torch.ones_like(back, dtype=torch.bool)
    return (back >= 0) & (back < meaning.window) if meaning.window else back >= 0


def seen(mask: torch.Tensor) -> torch.Tensor | None:
    """What a mask that was computed shows; None if it adds something that neither shows nor hides."""
    if mask.dtype == torch.bool:
        return mask
    known = (mask == 0) | (mask == torch.finfo(mask.dtype).min) | (mask == float("-inf"))
    return mask == 0 if bool(known.all()) else None


def truth(shows: torch.Tensor | None, rows: torch.Tensor, columns: torch.Tensor) -> MaskKind | None:
    """What a mask is at these places: causal, a window, or showing everything; if it is."""
    if shows is None:
        return None
    back = rows - columns
    last = back[shows & (rows == rows.max())]
    candidates = (MaskKind(False), MaskKind(True), MaskKind(True, int(last.max() + 1) if len(last) else 0))
    return next((each for each in candidates if torch.equal(shows, shown(each, back))), None)


@dataclass
class Judged:
    """How masks were judged."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    @property
    def understood(self) -> float:
        """The part of the masks with a meaning that were understood."""
        return 1 - self.counts["missed"] / max(1, self.counts["meaningful"])

    def judge(self, seed: int, largest: int) -> None:
        """Draw a mask, derive it, compute it, compare: everywhere, or at breakpoints where constants are large."""
        drawn = draw(seed, largest, in_shapes=largest <= 40)
        masks = MaskAnalysis(drawn.graph)
        claims = [masks.classify(mask, reader) for mask, reader in zip(drawn.masks(), drawn.readers, strict=True)]
        reach = 2 * sum(drawn.constants) + 9
        truths = self._compared(f"seed {seed}", drawn, claims, reach, largest)
        if any(claim.is_known for claim in claims):
            self._compared(f"seed {seed}", drawn, claims, 6, largest)
        if any(not claim.is_known and truth is not None for claim, truth in zip(claims, truths, strict=True)):
            again = self._compared(f"seed {seed}", drawn, claims, reach + 11, largest)
            truths = [one if one == two else None for one, two in zip(truths, again, strict=True)]
        for index, (claim, found) in enumerate(zip(claims, truths, strict=True)):
            self._count(f"seed {seed}, reader {index}", drawn, claim, found)

    def _compared(
        self, name: str, drawn: Drawn, claims: list[MaskKind], length: int, largest: int
    ) -> list[MaskKind | None]:
        """What the masks are at this length; claims that differ are wrong."""
        if largest <= 40:
            rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
            masks = drawn.computed(length)
        else:
            rows, columns = breakpoints(drawn, length)
            values = drawn.computed_at(rows, columns, length)
            masks = [values[reader] for reader in drawn.readers]
        truths = []
        for index, (mask, claim) in enumerate(zip(masks, claims, strict=True)):
            shows = seen(mask)
            same = shows is not None and claim.is_known and torch.equal(shows, shown(claim, rows - columns))
            if claim.is_known and not same:
                self.wrong.append(f"{name}, reader {index}, length {length}: {claim}")
            truths.append(claim if same else truth(shows, rows, columns))
        return truths

    def _count(self, name: str, drawn: Drawn, claim: MaskKind, meaning: MaskKind | None) -> None:
        self.counts["masks"] += 1
        self.counts["claimed"] += claim.is_known
        if meaning is None:
            return
        if not drawn.plain:
            self.counts["meaningful, not plain"] += 1
            self.counts["missed, not plain"] += not claim.is_known
            return
        self.counts["meaningful"] += 1
        self.counts["windows" if meaning.window else "causal" if meaning.is_causal else "everything"] += 1
        if not claim.is_known:
            self.counts["missed"] += 1
            self.missed.append(f"{name}: {meaning} is not understood: {claim.reason}")


def breakpoints(drawn: Drawn, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns at which any comparison changes, ± 1.

    A comparison is a line `a * row + b * column + c = 0`. The rows are those where two lines meet, or a line an edge of
    the square, ± 1, and one between each two of them; the columns those of every line in that row, ± 1.
    """
    rows, columns = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])
    values = drawn.computed_at(rows, columns, length)
    lines = {(0, 1, 0), (0, 1, 1 - length), (1, -1, 0)}
    for node in drawn.graph.nodes:
        if getattr(node.target, "_opname", "") in (*_COMPARE, "eq", "ne"):
            left, right = (values[each] if isinstance(each, fx.Node) else each for each in node.args)
            if left.dtype != torch.bool:
                gap = (left.double() - right).nan_to_num(0, 0, 0).expand(3).tolist()
                lines.add((round(gap[1] - gap[0]), round(gap[2] - gap[0]), round(gap[0])))
    found = {0, length - 1}
    for one, two in combinations(lines, 2):
        cross = one[0] * two[1] - two[0] * one[1]
        if cross:
            found |= _near((one[1] * two[2] - two[1] * one[2]) // cross, length)
    found |= {(low + high) // 2 for low, high in pairwise(sorted(found))}
    points = set()
    for row in found:
        points |= {(row, 0), (row, length - 1)}
        for a, b, c in lines:
            if b:
                points |= {(row, column) for column in _near(-(a * row + c) // b, length)}
    rows, columns = torch.tensor(sorted(points)).unbind(1)
    return rows, columns


def _near(position: int, length: int) -> set[int]:
    return {each for each in range(position - 1, position + 3) if 0 <= each < length}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    judged = Judged()
    for seed in range(options.seed, options.seed + options.count):
        judged.judge(seed, 2**20 if options.large else 40)
    print(*judged.missed[:20], sep="\n")
    print(*judged.wrong[:20], sep="\n")
    print(dict(judged.counts), f"understood {judged.understood:.4f}, wrong {len(judged.wrong)}")
    return int(bool(judged.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
