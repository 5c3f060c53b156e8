"""What masks mean: random ones judged by computing them, stock ones captured, and what attention makes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import linear, scaled_dot_product_attention

from inlay.analysis.masks import inequalities
from inlay.analysis.masks.classification import MaskAnalysis, MaskKind, find_alibi_slopes
from inlay.program.call_arguments import normalize_args
from inlay.testing import program_of
from inlay.transforms.base import find_transform
from tests.analysis.random_masks import Judged
from tests.decoders import captured, with_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program

aten = torch.ops.aten
LENGTH = 200
"""Beyond every constant in a mask below, and beyond what constants add up to."""
INF = float("-inf")


def _judge(first: int, count: int, largest: int = 40) -> Judged:
    judged = Judged()
    for seed in range(first, first + count):
        judged.judge(seed, largest)
    assert not judged.wrong, judged.wrong[:5]
    assert judged.understood >= 0.99, judged.missed[:5]
    return judged


@pytest.mark.fast
def test_random_masks() -> None:
    judged = _judge(0, 600)
    assert min(judged.counts[kind] for kind in ("causal", "windows", "everything", "meaningful, not plain")) >= 10


@pytest.mark.fast
def test_random_masks_with_large_constants() -> None:
    _judge(0, 60, 2**20)


@pytest.mark.nightly
def test_many_random_masks() -> None:
    """`tests/analysis/random_masks.py` runs more of them."""
    _judge(10_000, 10_000)
    _judge(10_000, 2_000, 2**20)


def _row_and_column(x: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.arange(x.shape[2])
    return positions[:, None], positions[None, :]


def _packed(r: Tensor, c: Tensor) -> Tensor:
    """As transformers tell packed sequences apart by their positions."""
    positions = r.transpose(0, 1)
    starts = torch.diff(positions, prepend=torch.full((1, 1), -1), dim=-1) != 1
    sequence = starts.cumsum(-1)
    return (c <= r) & (sequence[0, r] == sequence[0, c])


UNDERSTOOD: dict[str, tuple[MaskKind, Callable[[Tensor, Tensor], Tensor]]] = {
    "causal": (MaskKind(True), lambda r, c: c <= r),
    "a float constant": (MaskKind(True, 64), lambda r, c: (c <= r) & (c > r - 64.0)),
    "constants that add up": (MaskKind(True, 80), lambda r, c: (c <= r) & (c > r - 20 - 20 - 20 - 20)),
    "constants that cancel": (MaskKind(True, 4), lambda r, c: (c + 40 <= r + 40) & (c - 100 > r - 104)),
    "a window beyond 2048": (MaskKind(True, 262144), lambda r, c: (c <= r) & (c > r - 262144)),
    "a difference": (MaskKind(True, 5), lambda r, c: (r - c >= 0) & (r - c < 5)),
    "doubled": (MaskKind(True, 3), lambda r, c: (2 * r - 2 * c > -1) & (2 * (r - c) <= 5)),
    "not later": (MaskKind(True), lambda r, c: ~(c > r)),
    "32 bits": (MaskKind(True, 7), lambda r, c: (c.int() <= r.int()) & (c > (r - 7).int())),
    "never beyond the end": (MaskKind(True), lambda r, c: (c <= r) & (c < c.shape[1]) | (r >= c.shape[1])),
    "absorbed": (MaskKind(True, 9), lambda r, c: (c <= r) & (r - c < 9) & ((c < 3) | (c <= r + 2))),
    "one of two": (MaskKind(True), lambda r, c: torch.where(r >= 4, c <= r, c < r + 1)),
    "a triangle": (MaskKind(True), lambda r, c: torch.ones(r.shape[0], r.shape[0], dtype=torch.bool).tril()),
    "a band": (MaskKind(True, 6), lambda r, c: torch.ones(r.shape[0], r.shape[0]).tril().triu(-5) > 0),
    "added": (MaskKind(True), lambda r, c: torch.where(c <= r, 0.0, INF)),
    "filled": (MaskKind(True, 3), lambda r, c: ((c > r) | (c <= r - 3)).float() * torch.finfo(torch.float32).min),
    "masked fill": (MaskKind(True), lambda r, c: torch.zeros(r.shape[0], r.shape[0]).masked_fill(c > r, INF)),
    "packed": (MaskKind(True), _packed),
    "everything": (MaskKind(False), lambda r, c: r + c >= 0),
    "one block": (MaskKind(True), lambda r, c: (c <= r) & (r // 2**40 == c // 2**40)),
    "below 0": (MaskKind(True), lambda r, c: (c <= r) & ((r - c.shape[1]) // 2**40 == -1)),
    "the largest": (MaskKind(True), lambda r, c: (c <= r) & (c <= r.max())),
    "the smallest": (MaskKind(True), lambda r, c: (c <= r) & (c >= (-c).amax())),
    "of both": (MaskKind(True), lambda r, c: (c <= r) & (r - c >= (c - r).min())),
}
_ALONE = "and not on row - column alone"
REFUSED: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "a fraction": ("is not an integer", lambda r, c: (c <= r) & (c > r - 64.5)),
    "8 bits": ("int8 cannot represent row exactly", lambda r, c: (c <= r) & (r.to(torch.int8) - c < 100)),
    "half precision": ("float16 cannot represent row exactly", lambda r, c: c <= r.half()),
    "a prefix": ("-column + 3 >= 0, " + _ALONE, lambda r, c: (c <= r) | (c < 4)),
    "a first token": (_ALONE, lambda r, c: (c <= r) & (c > r - 8) | (c == 0)),
    "from a position on": (_ALONE, lambda r, c: (c <= r) & ((r < 150) | (c > r - 3))),
    "of the length": (_ALONE, lambda r, c: (c <= r) & (c > r - r.shape[0] + 3)),
    "both ways": ("shows -3 <= row - column < 5, which is neither", lambda r, c: (c <= r + 3) & (c > r - 5)),
    "a gap": (
        "shows 0 <= row - column < 2 or 5 <= row - column, which",
        lambda r, c: (c <= r) & ((r - c < 2) | (c <= r - 5)),
    ),
    "later only": ("shows row - column < 0", lambda r, c: c > r),
    "blocks": (
        "row // 8 differs between positions, and sizes may be larger than 8",
        lambda r, c: (c <= r) & (r // 8 == c // 8),
    ),
    "truncated": ("not a floor division", lambda r, c: torch.div(r - c, 9, rounding_mode="trunc") * 0 <= r - c),
    "divided by less than 0": ("not a floor division", lambda r, c: (r // -8) * 0 <= r - c),
    "a number that its dtype does not hold": (
        "float32 cannot represent 1e-50 exactly",
        lambda r, c: torch.full((r.shape[0], r.shape[0]), 1e-50).bool(),
    ),
    "too little": ("it adds -10000, which is neither 0 nor", lambda r, c: torch.where(c <= r, 0.0, -10000.0)),
}


def _attention(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.target is torch.ops.inlay.attention.default]


def _attend(x: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x.roll(1, -1), x.roll(2, -1), attn_mask=mask)


def _inputs(length: int) -> list[Tensor]:
    return [torch.randn(1, 2, length, 4, generator=torch.Generator().manual_seed(0))]


def _captured(function: Callable[..., Any]) -> Program:
    return program_of(function, _inputs(8), {"x": {2: "length"}})


def _assert_same_numbers(one: Program, two: Program) -> None:
    """Operator by operator: what is written in place cannot be exported."""
    modules = [fx.GraphModule(torch.nn.Module(), program.graph) for program in (one, two)]
    first, second = (fx.Interpreter(module).run(*_inputs(LENGTH)) for module in modules)
    for left, right in zip(first, second, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_captured_masks() -> None:
    """Attention is the same beyond all constants; masks that are understood are flags, others stay."""
    masks = [mask for _, mask in [*UNDERSTOOD.values(), *REFUSED.values()]]

    def attend(x: Tensor) -> list[Tensor]:
        row_and_column = _row_and_column(x)
        return [_attend(x, mask(*row_and_column)) for mask in masks]

    program = _captured(attend)
    applied = find_transform("match_attention")().apply(program.copy())
    calls = _attention(applied.program)
    given: list[dict[str, Any]] = [dict(normalize_args(call)) for call in calls]
    for (name, (meaning, _)), each in zip(UNDERSTOOD.items(), given, strict=False):
        assert (each["mask"], each["causal"], each["window"]) == (None, meaning.is_causal, meaning.window), name
    after = MaskAnalysis(applied.program.graph)
    for (name, (reason, _)), each, call in zip(
        REFUSED.items(), given[len(UNDERSTOOD) :], calls[len(UNDERSTOOD) :], strict=True
    ):
        assert reason in after.classify(each["mask"], call).reason, name
    _assert_same_numbers(program, applied.program)


@cache
def _two_layers() -> Program:
    def layers(x: Tensor) -> tuple[Tensor, Tensor]:
        row, column = _row_and_column(x)
        mask = column <= row
        first = _attend(x, mask)
        return first, _attend(first, mask)

    return _captured(layers)


@pytest.mark.fast
@pytest.mark.parametrize("written", ["mask", "view", "positions", "other"])
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_a_mask_is_written(place: str, written: str) -> None:
    """The mask of two layers is written before the first, between them, after both: what is read is what counts."""

    program = _two_layers().copy()
    attention = [node for node in program.graph.nodes if node.target is aten.scaled_dot_product_attention.default]
    mask: Any = dict(normalize_args(attention[0]))["attn_mask"]
    anchor = {"before": attention[0], "between": attention[1], "after": program.graph.output_node()}[place]
    target: Any = {"positions": mask.args[1]}.get(written, mask)
    with program.graph.inserting_before(mask.next):
        view = program.graph.call_function(aten.transpose.int, (target, 0, 1))
        copy = program.graph.call_function(aten.clone.default, (target,))
    with program.graph.inserting_before(anchor):
        target = {"view": view, "other": copy}.get(written, target)
        write = program.graph.call_function(aten.fill_.Scalar, (target, 1))
    for node in (view, copy, write):
        node.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]
    applied = find_transform("match_attention")().apply(program.copy())
    flags = [bool(dict(normalize_args(call))["causal"]) for call in _attention(applied.program)]
    assert flags == {"before": [False, False], "between": [True, False], "after": [True, True]}[place]
    _assert_same_numbers(program, applied.program)


@pytest.mark.fast
def test_a_mask_of_one_value_for_all() -> None:
    """A mask of size 1 is seen by every row and column: it is not causal."""

    def attend(x: Tensor) -> tuple[Tensor]:
        places = torch.arange(1)
        return (_attend(x, places[None, :] <= places[:, None]),)

    program = _captured(attend)
    applied = find_transform("match_attention")().apply(program.copy())
    _assert_same_numbers(program, applied.program)


def _windowed(window: int) -> Callable[[Tensor, Tensor], Tensor]:
    def decoder(x: Tensor, w: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        mask = (places[None, :] <= places[:, None]) & (places[None, :] > places[:, None] - window)
        heads = linear(x, w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        result = scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return result.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8)

    return decoder


@pytest.mark.fast
@pytest.mark.parametrize(("window", "kept"), [(15, 15), (16, 0), (262144, 0)])
def test_windows_of_a_cache(window: int, kept: int) -> None:
    """A window as long as the cache is none: no row is so far back."""
    applied = with_cache(captured(_windowed(window)))
    assert applied.sites == 1, applied.misses
    (call,) = [node for node in applied.program.graph.nodes if "cached_attention" in str(node.target)]
    assert dict(normalize_args(call))["window"] == kept


@pytest.mark.fast
@pytest.mark.parametrize(("room", "is_causal"), [(8, True), (9, False)])
def test_blocks_of_a_program_that_takes_no_more(room: int, is_causal: bool) -> None:
    """Chunked attention is causal attention if the program accepts no more positions than a chunk has."""

    def attend(x: Tensor) -> tuple[Tensor]:
        rows, columns = _row_and_column(x)
        return (_attend(x, (columns <= rows) & (rows // 8 == columns // 8)),)

    program = _captured(attend)
    symbols = {raw: replace(each, high=room) for raw, each in program.symbols.items()}
    applied = find_transform("match_attention")().apply(replace(program, symbols=symbols))
    assert [dict(normalize_args(call))["causal"] for call in _attention(applied.program)] == [is_causal]


@pytest.mark.fast
def test_the_reason_reaches_the_cache() -> None:
    applied = with_cache(captured(lambda x, w: _windowed(8)(x, w) + _prefixed(x, w)))
    assert "its mask is not known to be causal: the mask depends on" in applied.misses[0].reason


def _prefixed(x: Tensor, w: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    mask = (places[None, :] <= places[:, None]) | (places[None, :] < 3)
    heads = linear(x, w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    result = scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    return result.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8)


def _returned(function: Callable[[Tensor], Tensor], *shape: int) -> tuple[fx.Node, MaskAnalysis, fx.Node]:
    graph = program_of(function, [torch.randn(*shape)]).graph
    (value,) = graph.output_node().all_input_nodes
    return value, MaskAnalysis(graph), graph.output_node()


def _rows(count: int = 5) -> Tensor:
    return torch.arange(count)[:, None]


def _columns(count: int = 5) -> Tensor:
    return torch.arange(count)[None, :]


def _many_cases(x: Tensor) -> Tensor:
    mask = _columns(99) <= _rows(99)
    for each in range(10):
        mask = mask ^ (_columns(99) == _rows(99) + 7 * each)
    return mask


def _an_unknown_number(x: Tensor) -> Tensor:
    number = x.sum().to(torch.int64).item()
    torch._check(number >= 0)
    return _rows() + number >= _columns()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (
            lambda x: torch.where(_columns() <= _rows(), 0.0, INF).to(torch.int64) == 0,
            "_to_copy: -inf is not an integer",
        ),
        (lambda x: torch.arange(4.5)[None, :] <= _rows(), "arange: 4.5 is not an integer"),
        (_an_unknown_number, "add: the range of u0 is unknown"),
        (_many_cases, "xor_8: it has too many cases"),
        (lambda x: (x + 1).expand(2, 2) > 0, "the mask is not recognized: it depends on the values of values_0"),
        (lambda x: torch.arange(5) < 3, "the mask has no rows and columns"),
        (lambda x: torch.arange(3)[:, None] >= torch.arange(5)[None, :], "the mask has 3 rows and 5 columns"),
        (lambda x: torch.arange(5)[:, None] - torch.arange(5)[None, :], "not recognized: its dtype is torch.int64"),
    ],
)
def test_what_is_no_mask(mask: Callable[[Tensor], Tensor], reason: str) -> None:
    value, masks, output = _returned(mask, 2)
    found = masks.classify(value, output)
    assert (found.is_causal, reason in str(found.reason)) == (False, True), found


@pytest.mark.fast
def test_a_mask_made_like_a_tensor() -> None:
    """Its sizes are read, and not its values."""
    value, masks, output = _returned(lambda x: (torch.ones_like(x) > 0) & (_columns() <= _rows()), 5, 5)
    assert masks.classify(value, output) == MaskKind(True)


def _numbers(count: Any = 5) -> Tensor:
    return torch.arange(count)


NOT_UNDERSTOOD: dict[str, Callable[[Tensor], Tensor]] = {
    "arange: its step is not a constant": lambda x: torch.arange(0, 5 * x.shape[0], x.shape[0]),
    "view: it merges or splits axes": lambda x: _numbers(25).view(5, 5),
    "slice_1: its start or step depends on a size": lambda x: _numbers(x.shape[0])[x.shape[0] - 5 :],
    "select: its index depends on a size": lambda x: _numbers(2 * x.shape[0])[x.shape[0]],
    "index: its index column - 1 may be negative": lambda x: _numbers()[_numbers() - 1],
    "index: it indexes with a mask": lambda x: _numbers()[_numbers() > 2][0],
    "cat: it concatenates tensors of different ranks": lambda x: torch.cat(
        [torch.zeros(0, dtype=torch.int64), _columns()]
    ),
    "diff: it computes differences of higher order": lambda x: _numbers(7).diff(2),
    "diff: it computes differences of booleans": lambda x: (_numbers(6) > 2).diff().to(torch.int64),
    "cumsum: it is a cumulative sum of a scalar": lambda x: torch.ones((), dtype=torch.int64).cumsum(0),
    "cumsum: it is a cumulative sum of values that differ": lambda x: _numbers().cumsum(0),
    "and_1: it is a bitwise operation on numbers": lambda x: _columns() & _rows(),
    "bitwise_not: it is a bitwise operation on numbers": lambda x: ~_numbers(),
    "lt: 0.5 is not an integer": lambda x: (torch.where(_columns() <= _rows(), 0.5, INF) < 0.25).to(torch.int64),
}


@pytest.mark.fast
@pytest.mark.parametrize("reason", NOT_UNDERSTOOD)
def test_operators_that_are_not_understood(reason: str) -> None:
    def mask(x: Tensor) -> Tensor:
        return NOT_UNDERSTOOD[reason](x) <= _rows() + 0 * _columns()

    graph = program_of(mask, [torch.randn(6)], {"x": {0: "length"}}).graph
    (value,) = graph.output_node().all_input_nodes
    found = MaskAnalysis(graph).classify(value, graph.output_node()).reason
    assert found.startswith(f"the mask is not recognized: {reason}")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("most", "found"), [(4096, MaskKind(True)), (9, MaskKind(False, 0, "the mask has too many cases"))]
)
def test_a_proof_that_takes_long(most: int, found: MaskKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is above the diagonal is hidden one by one."""
    monkeypatch.setattr(inequalities, "_MAX_SYSTEMS", most)

    def written(x: Tensor) -> Tensor:
        mask = _columns() < _rows() + 5
        for each in (3, 1, 4, 2):
            mask = mask & (_columns() != _rows() + each)
        return mask

    value, masks, output = _returned(written, 2)
    assert masks.classify(value, output) == found


@pytest.mark.fast
def test_sizes_that_do_not_fit() -> None:
    """As in a graph whose values are stated wrongly."""
    graph = fx.Graph()
    three, five = (graph.call_function(aten.arange.default, (count,)) for count in (3, 5))
    total = graph.call_function(aten.add.Tensor, (three, five))
    for node, size in ((three, 3), (five, 5), (total, 5)):
        node.meta["val"] = torch.arange(size)
    output = graph.output(total)
    assert "a size of 3 is broadcast to 5" in MaskAnalysis(graph).classify(total, output).reason


def _slopes(x: Tensor, *, add: bool = False, batch: int = 2, times: int = 1) -> Tensor:
    """`x` is one number a head; seven keys."""
    positions = torch.arange(7)[None, None, :]
    product = x + positions if add else x * positions
    bias = product if batch == 1 else product.repeat(batch, 1, times)
    return bias.view(batch, 3, 1, 7 * times)


@pytest.mark.fast
def test_slopes_of_positions() -> None:
    value, masks, output = _returned(_slopes, 3, 1, 1)
    found = find_alibi_slopes(value, masks, output)
    assert found is not None
    assert found.op == "placeholder"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("bias", "shape"),
    [
        (lambda x: x.relu(), (2, 3, 1, 7)),
        (lambda x: (x * torch.arange(7)).view(2, 3, 7), (2, 3, 1)),
        (lambda x: _slopes(x, add=True), (3, 1, 1)),
        (lambda x: _slopes(x, batch=1), (3, 1, 1)),
        (lambda x: (x * torch.arange(7)).exp().view(1, 3, 1, 7), (3, 1, 1)),
        (lambda x: _slopes(x, times=2), (3, 1, 1)),
        (lambda x: (x * torch.arange(7)).repeat(1, 1, 1).view(2, 3, 1, 7), (6, 1, 1)),
        (lambda x: (x * torch.arange(7).flip(0)).repeat(2, 1, 1).view(2, 3, 1, 7), (3, 1, 1)),
        (lambda x: (x.view(1, 1, 7) * torch.arange(7)).repeat(6, 1, 1).view(2, 3, 1, 7), (7,)),
    ],
)
def test_no_slopes_of_positions(bias: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    value, masks, output = _returned(bias, *shape)
    assert find_alibi_slopes(value, masks, output) is None


@pytest.mark.fast
def test_an_input_is_no_slopes_of_positions() -> None:
    value, masks, output = _returned(lambda x: x + 1, 2, 3, 1, 7)
    assert find_alibi_slopes(value.all_input_nodes[0], masks, output) is None


@pytest.mark.parametrize("added", ["infinite", "boolean"])
def test_a_mask_added_to_slopes(added: str) -> None:
    """What adds -inf hides; what is true or false adds 1 or 0, and hides nothing."""

    def attend(x: Tensor) -> list[Tensor]:
        row, column = _row_and_column(x)
        slopes = 0.5 / (1 + torch.arange(2)).view(2, 1, 1)
        bias = (slopes * column.view(1, 1, -1)).repeat(1, 1, 1).view(1, 2, 1, x.shape[2])
        seen = column <= row
        return [_attend(x, bias + (seen if added == "boolean" else torch.where(seen, 0.0, float("-inf"))))]

    program = _captured(attend)
    applied = find_transform("match_attention")().apply(program.copy())
    (call,) = _attention(applied.program)
    given = dict(normalize_args(call))
    assert (given["slopes"] is not None, given["causal"]) == ((added == "infinite"),) * 2
    _assert_same_numbers(program, applied.program)


@pytest.mark.fast
def test_a_mask_beside_the_causal_flag() -> None:
    """The operator does not look at it then; it must not become a window, or the flag be lost to it."""

    def attend(x: Tensor, seen: Tensor) -> Tensor:
        rows, columns = _row_and_column(x)
        masks = (columns >= 0, (columns - rows).abs() < 3, seen)
        return sum(torch.ops.inlay.attention(x, x, x, mask, 0.5, True, 0, 0.0) for mask in masks)

    inputs = [*_inputs(9), torch.rand(9, 9) > 0.5]
    program = program_of(attend, inputs)
    applied = find_transform("match_attention")().apply(program.copy())
    flags = [dict(normalize_args(node)) for node in _attention(applied.program)]
    assert [(each["mask"], each["causal"], each["window"]) for each in flags] == [(None, True, 0)] * 3
    torch.testing.assert_close(applied.program.module()(*inputs), attend(*inputs))
