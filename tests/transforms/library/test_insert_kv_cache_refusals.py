"""Where no cache may be inserted, each with its reason; and random decoders, run whole and in parts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from inlay.config import resolve_config
from inlay.errors import UsageError
from inlay.program.bindings import Role
from inlay.program.call_arguments import normalize_args
from inlay.program.text.printer import dump
from inlay.testing import program_of
from inlay.transforms import configure
from tests.decoders import Parts, attend, captured, with_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from inlay.program import Program


def _batch_and_length(h: Tensor) -> tuple[int, int]:
    return h.shape[0], h.shape[1]


def _places(h: Tensor, **how: Any) -> Tensor:
    return torch.arange(h.shape[1], **how).unsqueeze(0)


def _zero() -> Tensor:
    return torch.zeros(1, 1, 1, dtype=torch.long)


def _merged(h: Tensor, w: Tensor) -> Tensor:
    batch, length = _batch_and_length(h)
    return functional.linear(h.reshape(batch * length, 8), w).view(batch, length, 8)


def _in_halves(h: Tensor, w: Tensor) -> Tensor:
    batch, length = _batch_and_length(h)
    halves = h.reshape(batch, length, 2, 4)
    return (halves - halves.mean(-1, keepdim=True)).view(batch, length, 8)


def _squares(h: Tensor) -> Tensor:
    """Each token times itself, as a product of matrices."""
    batch, length = _batch_and_length(h)
    return torch.bmm(h.reshape(-1, 1, 8), h.reshape(-1, 8, 1)).view(batch, length, 1)


def _filled_in_part(h: Tensor, w: Tensor) -> Tensor:
    """As transformers' MLA writes queries: an empty tensor whose parts are filled along the last axis."""
    made = h.new_empty(h.shape[0], h.shape[1], 8)
    made[..., :3] = h[..., 5:]
    made[..., 3:] = h[..., :5]
    return made


def _as_complex(h: Tensor, w: Tensor) -> Tensor:
    """As Llama 4 rotates: pairs of values are complex numbers."""
    angles = _places(h)[..., None].float() * w[0, :4].abs()
    turned = torch.view_as_complex(h.float().reshape(*h.shape[:2], 4, 2).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(2)


def _shared_positions(h: Tensor, w: Tensor) -> Tensor:
    """As Llama 4 scales queries: numbers of the positions without an axis of sequences."""
    scales = torch.log1p(torch.floor((torch.arange(h.shape[1]).float() + 1.0) / 4)) * 0.1 + 1.0
    return h * scales.view(1, -1, 1) + torch.arange(h.shape[1]).unsqueeze(0).unsqueeze(2) * 0.01


APART: dict[str, Any] = {
    "pointwise": lambda h, w: torch.tanh(h * 0.5 + 1),
    "linear": functional.linear,
    "attention": attend,
    "layer_norm": lambda h, w: functional.layer_norm(h, (8,)),
    "softmax": lambda h, w: h.softmax(-1),
    "cumsum": lambda h, w: h.cumsum(2) * 0.3,
    "tokens in a row": _merged,
    "halves": _in_halves,
    "the largest": lambda h, w: h.gather(2, h.topk(2, -1)[1]).sum(-1, keepdim=True) - h,
    "a mask of the largest": lambda h, w: h * torch.zeros_like(h).scatter(2, h.topk(3, -1)[1], 1.0),
    "length last": lambda h, w: (w @ h.transpose(1, 2)).transpose(1, 2) * 0.3,
    "length first": lambda h, w: h.permute(1, 0, 2).contiguous().softmax(2).transpose(0, 1),
    "cat": lambda h, w: torch.cat([h, w[0].expand(h.shape[0], h.shape[1], 8)], -1)[..., 3:11],
    "split": lambda h, w: torch.cat(h.split(4, -1)[::-1], -1),
    "largest": lambda h, w: h - h.amax(-1, keepdim=True),
    "topk": lambda h, w: h.topk(8, -1).values,
    "indexed": lambda h, w: h[:, :, torch.arange(7, -1, -1)],
    "positions": lambda h, w: h + torch.cos(_places(h).unsqueeze(2).to(h.dtype) * w[0]),
    "positions as numbers": lambda h, w: h * torch.sin(_places(h, dtype=torch.float32).unsqueeze(2) / 3),
    "positions in a table": lambda h, w: h + functional.embedding(_places(h), w.repeat(4, 1)),
    "counted positions": lambda h, w: h + 0.1 * torch.ones(h.shape[:2], dtype=torch.int64).cumsum(1).unsqueeze(2),
    "where": lambda h, w: torch.where(_places(h).unsqueeze(2) > 4, h, -h),
    "ones": lambda h, w: h + torch.ones(h.shape[1], 8),
    "ones of a batch": lambda h, w: h + torch.ones(h.shape[0], 1, 8),
    "sequences last": lambda h, w: h.permute(1, 2, 0).contiguous().softmax(1).permute(2, 0, 1),
    "halves in a row": lambda h, w: h.reshape(-1, 4).softmax(1).view(h.shape),
    "a row of sequences": lambda h, w: (h.reshape(h.shape[0], -1) * 2).view(h.shape),
    "tokens against themselves": lambda h, w: h * _squares(h),
    "a product a sequence": lambda h, w: h @ w[:, 0].diag().expand(h.shape[0], 8, 8),
    "repeated": lambda h, w: h.repeat(1, 1, 2)[..., 4:12],
    "where, by a number": lambda h, w: torch.where(h > 0, h, -1.0),
    "type_as": lambda h, w: h.double().type_as(h),
    "new zeros": lambda h, w: torch.cat([h.new_zeros(h.shape[0], h.shape[1], 2), h[..., 2:]], -1),
    "new full": lambda h, w: h + h.new_full((h.shape[0], h.shape[1], 1), 0.5),
    "full like": lambda h, w: h + torch.full_like(h, 0.5),
    "filled in part": _filled_in_part,
    "complex numbers": _as_complex,
    "shared positions": lambda h, w: h + torch.cos(torch.arange(h.shape[1]).to(h.dtype) / 3)[None, :, None],
    "shared positions, twice": _shared_positions,
}
"""Keeps positions and sequences apart: a cache may be inserted."""

_AS_A_NUMBER = "the length is used as a number"
_ALONG = "works along the axis of positions"
_UNKNOWN = "is not known to keep positions independent"
_OF_SIZES = "it is computed from sizes alone, and is neither a position nor the same at every position"
_SAME = "it reads positions as if they were equal in all sequences"
_NO_AXIS = "its result or an operand has no axis of positions, or several"
_LAST = "the last position is combined with others"


def _scrambled(*order: int) -> Any:
    """A view with the same sizes in another order."""

    def view(h: Tensor, w: Tensor) -> Tensor:
        sizes = (*_batch_and_length(h), 8)
        flat = h.contiguous().view([sizes[axis] for axis in order])
        return (flat * 2).view(sizes)

    return view


def _convolved(h: Tensor, w: Tensor) -> Tensor:
    rows = functional.conv1d(functional.pad(h.transpose(1, 2), (2, 0)), w.view(8, 8, 1).expand(8, 8, 3))
    return rows.transpose(1, 2)


MIXING: dict[str, tuple[str, Any]] = {
    "cumsum": (f"aten.cumsum.default {_ALONG}", lambda h, w: h.cumsum(1)),
    "softmax": (f"aten.softmax.int {_ALONG}", lambda h, w: h.softmax(1)),
    "softmax of tokens in a row": (f"aten.softmax.int {_ALONG}", lambda h, w: h.reshape(-1, 8).softmax(0).view_as(h)),
    "sum": (_NO_AXIS, lambda h, w: h + h.sum(1, keepdim=True)),
    "mean": (_NO_AXIS, lambda h, w: h - h.mean(1, keepdim=True)),
    "all of it": (_NO_AXIS, lambda h, w: h / h.abs().max()),
    "flip": (f"aten.flip.default {_UNKNOWN}", lambda h, w: h.flip(1)),
    "roll": (f"aten.roll.default {_UNKNOWN}", lambda h, w: h.roll(1, 1)),
    "sort": (f"aten.sort.default {_UNKNOWN}", lambda h, w: h.sort(1).values),
    "convolution": (_UNKNOWN, _convolved),
    "shift": (f"aten.pad.default {_UNKNOWN}", lambda h, w: functional.pad(h, (0, 0, 1, 0))[:, :-1]),
    "matmul": (_NO_AXIS, lambda h, w: h @ (h.transpose(1, 2) @ h)),
    "scores": (_NO_AXIS, lambda h, w: (h @ h.transpose(1, 2)).softmax(-1) @ h),
    "view [length, batch, 8]": (f"aten.view.default {_ALONG}", _scrambled(1, 0, 2)),
    "view [batch, 8, length]": (f"aten.view.default {_ALONG}", _scrambled(0, 2, 1)),
    "view [8, batch, length]": (f"aten.view.default {_ALONG}", _scrambled(2, 0, 1)),
    "cat": (f"aten.cat.default {_ALONG}", lambda h, w: torch.cat([h, h], 1)[:, ::2]),
    "slice": (f"aten.slice.Tensor {_ALONG}", lambda h, w: torch.cat([h[:, 1:], h[:, :1]], 1)),
    "repeated": (f"aten.repeat.default {_ALONG}", lambda h, w: h.repeat(1, 2, 1)[:, ::2]),
    "first": (_NO_AXIS, lambda h, w: h + h[:, 0].unsqueeze(1)),
    "index": (_NO_AXIS, lambda h, w: h + h[:, torch.tensor([0])]),
    "rows of a table": (f"aten.index.Tensor {_ALONG}", lambda h, w: h + w[(h[..., 0] > 0).long()]),
    "index by positions": (f"aten.index.Tensor {_ALONG}", lambda h, w: h[:, _places(h).clamp(max=2)].squeeze(1)),
    "written at the first": (f"aten.scatter.value {_ALONG}", lambda h, w: h.scatter(2, _zero(), 0.0)),
    "read by the first": (f"aten.scatter.src {_ALONG}", lambda h, w: h.scatter(2, _zero(), h)),
    "last": (_LAST, lambda h, w: h - h[:, -1:]),
    "last, expanded": (_LAST, lambda h, w: h[:, -1:].expand(-1, h.shape[1], -1)),
    "times the length": (_AS_A_NUMBER, lambda h, w: h * h.shape[1]),
    "by the root of the length": (_AS_A_NUMBER, lambda h, w: h / h.shape[1] ** 0.5),
    "by the number of values": (_AS_A_NUMBER, lambda h, w: h / h.numel()),
    "the last by the length": (_AS_A_NUMBER, lambda h, w: h[:, -1] / h.shape[1]),
    "the last by its root": (_AS_A_NUMBER, lambda h, w: h[:, -1:] / h.shape[1] ** 0.5),
    "the last below the length": (_AS_A_NUMBER, lambda h, w: (h[:, -1] * 2).clamp(max=h.shape[1] * 0.1)),
    "the last to the length": (_AS_A_NUMBER, lambda h, w: h[:, -1].abs().pow(h.shape[1])),
    "the last rolled by the length": (_AS_A_NUMBER, lambda h, w: h[:, -1].roll(h.shape[1], 1)),
    "filled with the length": (_AS_A_NUMBER, lambda h, w: h + torch.full((8,), h.shape[1], dtype=h.dtype)),
    "new, filled with the length": (_AS_A_NUMBER, lambda h, w: h + h.new_full((8,), h.shape[1])),
    "like, filled with the length": (_AS_A_NUMBER, lambda h, w: h + torch.full_like(h, h.shape[1])),
    "new, twice as long": (_AS_A_NUMBER, lambda h, w: h + h.new_ones(2 * h.shape[1]).sum()),
    "chosen by the length": (
        "it chooses by the length, after rows were cached",
        lambda h, w: h * torch.where(_places(h).max() + 1 > 9, w[0], w[1]),
    ),
    "a column of the length": (_OF_SIZES, lambda h, w: h + torch.full((h.shape[1], 1), h.shape[1], dtype=h.dtype)),
    "from the length on": (_AS_A_NUMBER, lambda h, w: h + torch.arange(h.shape[1], h.shape[1] + 8)),
    "beginning of a table": (_AS_A_NUMBER, lambda h, w: h + w.repeat(4, 1)[: h.shape[1]]),
    "positions doubled": (_OF_SIZES, lambda h, w: h + torch.arange(0, 2 * h.shape[1], 2).unsqueeze(0).unsqueeze(2)),
    "half positions": (_OF_SIZES, lambda h, w: h + torch.arange(0.5, h.shape[1]).unsqueeze(0).unsqueeze(2)),
    "positions from the end": (_SAME, lambda h, w: h + torch.arange(h.shape[1]).flip(0).unsqueeze(0).unsqueeze(2)),
    "positions as a column": (_SAME, lambda h, w: h + torch.arange(h.shape[1]).unsqueeze(1)),
    "the largest position": (_NO_AXIS, lambda h, w: h + _places(h).amax(1).unsqueeze(1).unsqueeze(1)),
    "positions less the length": (_AS_A_NUMBER, lambda h, w: h + (_places(h) - h.shape[1]).unsqueeze(2)),
    "random": (_OF_SIZES, lambda h, w: h + torch.rand(h.shape[1], 1)),
    "a mask by hand": (_OF_SIZES, lambda h, w: torch.ones(h.shape[1], h.shape[1]).tril() @ h),
}
"""Brings positions together, or may: no cache may be inserted."""


_SEQUENCES = "works along the axis of sequences"
_NO_SEQUENCES = "its result or an operand has no axis of sequences, or several"


def _numbers(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])


def _over_sequences(h: Tensor, w: Tensor) -> Tensor:
    """Each position of a sequence attends to the same position of all others."""
    rows = h.transpose(0, 1)
    return ((rows @ rows.transpose(1, 2)).softmax(-1) @ rows).transpose(0, 1)


ACROSS: dict[str, tuple[str, Any]] = {
    "mean": (_NO_SEQUENCES, lambda h, w: h - h.mean(0)),
    "mean, kept": (_NO_SEQUENCES, lambda h, w: h - h.mean(0, keepdim=True)),
    "largest": (_NO_SEQUENCES, lambda h, w: h - h.amax((0, 2), keepdim=True)),
    "cumsum": (f"aten.cumsum.default {_SEQUENCES}", lambda h, w: h.cumsum(0)),
    "softmax": (f"aten.softmax.int {_SEQUENCES}", lambda h, w: h.softmax(0)),
    "softmax of a row": (_SEQUENCES, lambda h, w: h.permute(1, 0, 2).reshape(h.shape[1], -1).softmax(1)),
    "first": (_NO_SEQUENCES, lambda h, w: h + h[0]),
    "first, expanded": (_NO_SEQUENCES, lambda h, w: h[:1].expand(h.shape[0], -1, -1)),
    "index": (_NO_SEQUENCES, lambda h, w: h + h[torch.tensor([0])]),
    "flip": ("aten.flip.default", lambda h, w: h.flip(0)),
    "roll": ("aten.roll.default", lambda h, w: h.roll(1, 0)),
    "sort": ("aten.sort.default", lambda h, w: h.sort(0).values),
    "batch norm": ("batch_norm", lambda h, w: functional.batch_norm(h.transpose(1, 2), None, None, training=True)),
    "cat": (f"aten.cat.default {_SEQUENCES}", lambda h, w: torch.cat([h, h])[: h.shape[0]]),
    "slice": (_SEQUENCES, lambda h, w: torch.cat([h[1:], h[:1]])),
    "matmul": (_NO_SEQUENCES, _over_sequences),
    "mean of the last": (_NO_SEQUENCES, lambda h, w: h[:, -1].mean(0)),
    "last, softmax": (f"aten.softmax.int {_SEQUENCES}", lambda h, w: h[:, -1].softmax(0)),
    "sequences in another order": (_ALONG, lambda h, w: h.transpose(0, 1).reshape(-1, 8).view(h.shape)),
    "rows in another order": (
        "aten.view.default works along the axis of sequences",
        lambda h, w: h[:, -1].transpose(0, 1).reshape(-1).view(h.shape[0], 8) * 2,
    ),
    "times the batch": ("the size of the batch is used as a number", lambda h, w: h * h.shape[0]),
    "filled with the batch": ("the size of the batch is used", lambda h, w: h + torch.full((8,), h.shape[0] * 1.0)),
    "number of the sequence": ("not the same for every sequence", lambda h, w: h + _numbers(h).view(-1, 1, 1)),
    "batch returned": ("the size of the batch itself is returned", lambda h, w: (h, h.shape[0])),
}
"""Brings sequences together, or may: no cache may be inserted."""


def _by_reason(cases: dict[str, tuple[str, Any]]) -> list[Any]:
    """The first case of each reason runs for every change, the others nightly: a capture takes a second or two."""
    first = {reason.split(".default ")[-1]: name for name, (reason, _) in reversed(cases.items())}
    marks = {name: pytest.mark.fast if name in first.values() else pytest.mark.nightly for name in cases}
    return [pytest.param(name, marks=mark, id=name) for name, mark in marks.items()]


@pytest.mark.parametrize("name", _by_reason(ACROSS))
def test_sequences_are_mixed(name: str) -> None:
    reason, operation = ACROSS[name]
    assert reason in _reason(captured(lambda x, w: operation(attend(x, w), w)))


def _reason(program: Program) -> str:
    applied = with_cache(program)
    assert applied.sites == 0
    assert dump(applied.program) == dump(program), "refused, and yet changed"
    (miss,) = applied.misses
    assert not miss.is_mismatch
    return miss.reason


@pytest.mark.parametrize("name", _by_reason(MIXING))
def test_positions_are_mixed(name: str) -> None:
    reason, operation = MIXING[name]
    assert reason in _reason(captured(lambda x, w: operation(attend(x, w), w)))


@pytest.mark.fast
@pytest.mark.parametrize("name", APART)
def test_positions_are_kept_apart(name: str) -> None:
    _check(captured(lambda x, w: APART[name](attend(x, w), w) + x), random.Random(name))


def _turned(h: Tensor, over_heads: Tensor) -> Tensor:
    heads = h.reshape(h.shape[0], h.shape[1], 2, 4).transpose(1, 2) * over_heads
    return heads.transpose(1, 2).reshape(h.shape)


def _wave(h: Tensor) -> Tensor:
    return torch.cos(_places(h).unsqueeze(2).to(h.dtype) * torch.arange(4))


REFUSED: dict[str, tuple[str, Any]] = {
    "both ways": ("it is not causal: it has no mask", lambda x, w: attend(x, w, is_causal=False)),
    "a mask": (
        "its mask is not known to be causal",
        lambda x, w: attend(x, w, is_causal=False, attn_mask=(x[:, :, :1] > 0).unsqueeze(1)),
    ),
    "along the batch too": (
        "its batch or length differs from that of the first attention",
        lambda x, w: attend(attend(x, w).transpose(0, 1), w),
    ),
    "positions [length, 1]": (
        "the shape of its positions is not [length] or [batch, length]",
        lambda x, w: attend(x + torch.ones(x.shape[1], 1).cumsum(0), w),
    ),
    "no values": (
        "it is computed from sizes alone, and is neither a position nor the same at every position",
        lambda x, w: attend(x + torch.zeros(x.shape[1], 0).sum(), w),
    ),
    "positions for heads": ("shape: mul", lambda x, w: attend(_turned(x, _wave(x)), w)),
    "positions of the first sequence": (
        "aten.select.int: its result or an operand has no axis of sequences",
        lambda x, w: attend(x + _places(x)[0].unsqueeze(1), w),
    ),
    "positions of any sequence": (
        "aten.squeeze.dim works along the axis of sequences",
        lambda x, w: attend(x + _places(x).squeeze(0).unsqueeze(1), w),
    ),
    "positions returned": ("positions are returned", lambda x, w: (attend(x, w), _places(x) + 1)),
    "length returned": ("the length itself is returned", lambda x, w: (attend(x, w), x.shape[1])),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    reason, decoder = REFUSED[name]
    assert reason in _reason(captured(decoder))


@pytest.mark.fast
def test_positions_for_heads_lined_up() -> None:
    """What is refused for heads that meet sequences is right where an axis keeps them apart."""
    _check(captured(lambda x, w: attend(_turned(x, _wave(x).unsqueeze(1)), w)), random.Random(0))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"x": {0: "batch"}}, "its length is 5, not dynamic"),
        ({"x": {1: "length"}}, "its batch is 2, neither dynamic nor 1"),
    ],
)
def test_sizes_that_are_numbers(axes: Any, reason: str) -> None:
    assert reason in _reason(captured(attend, axes))


@pytest.mark.fast
def test_any_number_of_heads() -> None:
    def decoder(x: Tensor) -> Tensor:
        made: Tensor = torch.ops.inlay.attention(x, x, x, None, 0.5, True, 0, 0.0)
        return made

    axes = {"x": {0: "batch", 1: "heads", 2: "length"}}
    program = program_of(decoder, [torch.randn(2, 3, 5, 8)], axes=axes)
    assert "the number of heads or the head size is dynamic" in _reason(program)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (
            lambda x, w: attend(x if x.shape[1] < 9 else -x, w),
            "max_length is 16, but the captured length is at most 8",
        ),
        (lambda x, w: attend(x if x.shape[0] < 3 else -x, w), "max_batch is 4, but the captured batch is at most 2"),
    ],
)
def test_captured_for_less(decoder: Any, reason: str) -> None:
    assert reason in _reason(captured(decoder))


class _Counts(torch.nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        self.count.add_(1)
        return attend(x, w) + self.count


@pytest.mark.fast
def test_state_of_its_own() -> None:
    assert "the model already has state" in _reason(captured(_Counts()))


@pytest.mark.fast
def test_an_input_twice_as_long() -> None:
    program = captured(attend)
    x = next(node for node in program.graph.nodes if node.name == "x")
    value = x.meta["val"]
    with value.fake_mode:
        w = next(node for node in program.graph.nodes if node.name == "w")
        w.meta["val"] = torch.empty(2 * value.shape[1], 8)
    assert "w: the size of an axis is computed from the length" in _reason(program)


def _operand(program: Program, name: str, make: Callable[[fx.Graph, fx.Node], fx.Node]) -> Program:
    """The program with something else for an operand of its attention, made from the query."""
    call = next(node for node in program.graph.nodes if node.target is torch.ops.inlay.attention.default)
    with program.graph.inserting_before(call):
        made = make(program.graph, dict(normalize_args(call))["query"])
    if name == "scale":
        call.update_arg(4, made)
    else:
        call.update_kwarg(name, made)
    return program


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = [each.meta["val"] if hasattr(each, "meta") else each for each in args]
    node.meta["val"] = target(*values)
    return node


@pytest.mark.fast
def test_operands_of_attention() -> None:
    """Its scale is the length; a slope for each position; a sink that is the last position's."""
    aten = torch.ops.aten
    scaled = _operand(
        captured(attend), "scale", lambda graph, q: _call(graph, torch.sym_float, _call(graph, aten.sym_size.int, q, 2))
    )
    assert _AS_A_NUMBER in _reason(scaled)
    sloped = _operand(captured(attend), "slopes", lambda graph, q: q)
    sloped = _operand(sloped, "slopes", lambda graph, q: _call(graph, aten.neg.default, q))
    assert "has positions along another axis than attention expects" in _reason(sloped)
    sunk = _operand(captured(attend), "sinks", lambda graph, q: _call(graph, aten.select.int, q, 2, -1))
    assert _LAST in _reason(sunk)


@pytest.mark.fast
def test_attention_with_more_axes() -> None:
    """The operator takes them, a cache does not."""

    def attends(x: Tensor) -> Tensor:
        made: Tensor = torch.ops.inlay.attention(x, x, x, None, 0.5, True, 0, 0.0)
        return made

    program = program_of(attends, [torch.randn(1, 5, 2, 2, 4)])
    assert "its operands are not [batch, heads, length, head]" in _reason(program)


@pytest.mark.fast
def test_attention_on_inputs_themselves() -> None:
    """Nothing in the program asks for the length."""

    def attended(x: Tensor, w: Tensor) -> Tensor:
        heads = x.unsqueeze(1)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    program = captured(attended)
    assert not program.op_counts()["aten.sym_size.int"]
    applied = with_cache(program)
    assert applied.sites == 1
    x, parts = torch.randn(1, 6, 8), Parts(applied.program)
    found = torch.cat([parts([3], x=part, w=torch.zeros(8, 8)) for part in x.split([1, 3, 2], 1)], 2)
    torch.testing.assert_close(found, program.module()(x, torch.zeros(8, 8)))


@pytest.mark.fast
def test_the_table_of_bindings() -> None:
    applied = with_cache(captured(lambda x, w: attend(attend(x, w), w)))
    bindings = applied.program.bindings
    assert [row.name for row in bindings.with_role(Role.INPUT)] == (
        ["x", "w", "slots", "lengths", "keys_0", "values_0", "keys_1", "values_1"]
    )
    assert bindings["keys_1"].type_text == "f32[4, 2, 16, 4]"
    alias = bindings["keys_1.out"].alias
    assert alias is not None
    assert alias.kind == "kv_cache_update"
    assert {symbol.name: symbol.high for symbol in applied.program.symbols.values()} == {"batch": 4, "length": 16}


def _check(program: Program, rng: random.Random) -> None:
    """Two sequences, a part of each alone, then both together though one is ahead: as if computed whole."""
    applied = with_cache(program)
    assert applied.sites, [miss.reason for miss in applied.misses]
    made = torch.Generator().manual_seed(rng.randrange(1 << 30))
    x, w = torch.randn(2, 12, 8, generator=made), torch.randn(8, 8, generator=made)
    with torch.no_grad():
        whole = program.module()(x, w)
    parts, slots = Parts(applied.program), rng.sample(range(4), 2)
    found: list[list[Tensor]] = [[], []]

    def run(rows: list[int], count: int) -> None:
        begin = [parts.filled[slots[row]] for row in rows]
        tokens = torch.stack([x[row, at : at + count] for row, at in zip(rows, begin, strict=True)])
        for row, result in zip(rows, parts([slots[row] for row in rows], x=tokens, w=w), strict=True):
            found[row].append(result)

    run([0], rng.randint(1, 3))
    run([1], rng.randint(2, 6))
    while left := 12 - max(parts.filled[slot] for slot in slots):
        run(rng.sample([0, 1], 2), rng.choice([1, rng.randint(1, left)]))
    for row in (0, 1):
        result = torch.cat(found[row])
        torch.testing.assert_close(result, whole[row, : len(result)], rtol=1e-4, atol=1e-4)


def _grown(seed: int, mixing: bool) -> tuple[list[str], Any]:
    """Some operations after each other, attention among them; one of them brings positions together if asked."""
    rng = random.Random(seed)
    chain = [(name, APART[name]) for name in rng.choices(list(APART), k=rng.randint(2, 5))]
    chain.insert(rng.randrange(len(chain) + 1), ("attention", attend))
    if mixing:
        name = rng.choice(list(MIXING))
        place, operation = rng.randrange(len(chain) + 1), MIXING[name][1]
        is_whole = operation(torch.ones(2, 16, 8), torch.ones(8, 8)).ndim == 3
        chain.insert(place if is_whole else len(chain), (name, operation))

    def decoder(x: Tensor, w: Tensor) -> Tensor:
        for _, operation in chain:
            result = operation(x, w)
            x = x + result if result.shape == x.shape and rng.random() < 0.3 else result
        return x

    return [name for name, _ in chain], decoder


def _check_seed(seed: int) -> None:
    mixing = seed % 2 == 1
    names, decoder = _grown(seed, mixing)
    program = captured(decoder)
    if mixing:
        assert _reason(program), names
    else:
        _check(program, random.Random(seed))


@pytest.mark.parametrize("seed", range(8))
def test_random_decoders(seed: int) -> None:
    _check_seed(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(10))
def test_more_random_decoders(block: int) -> None:
    for seed in range(100 + 30 * block, 130 + 30 * block):
        _check_seed(seed)


def _moved(h: Tensor, axis: int) -> Tensor:
    return torch.cat([h.narrow(axis, 1, h.shape[axis] - 1), h.narrow(axis, 0, 1)], axis)


def _reordered(h: Tensor, axis: int) -> Tensor:
    """The same sizes after each other in another order."""
    sizes, order = list(h.shape), [(1, 0, 2), (0, 2, 1), (2, 1, 0)][axis]
    return h.permute(order).reshape(sizes) + 0.5 * h.reshape([sizes[each] for each in order]).reshape(sizes)


def _products(h: Tensor, axis: int) -> Tensor:
    rows = h.movedim(axis, 1)
    return (torch.tanh(rows @ rows.transpose(1, 2)) @ rows).movedim(1, axis)


ALONG_ANY: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": lambda h, axis: h.softmax(axis),
    "cumsum": lambda h, axis: h.cumsum(axis) * 0.3,
    "mean": lambda h, axis: h - h.mean(axis, keepdim=True),
    "largest": lambda h, axis: h - h.amax(axis, keepdim=True),
    "first": lambda h, axis: h + h.narrow(axis, 0, 1).expand(h.shape),
    "chosen": lambda h, axis: h + h.select(axis, 0).unsqueeze(axis),
    "flip": lambda h, axis: h.flip(axis),
    "roll": lambda h, axis: h.roll(1, axis),
    "sort": lambda h, axis: h.sort(axis).values,
    "ranks": lambda h, axis: h.gather(axis, h.argsort(axis)),
    "norm": lambda h, axis: h * torch.rsqrt(h.square().mean(axis, keepdim=True) + 1e-3),
    "moved": _moved,
    "order": _reordered,
    "products": _products,
    "one index": lambda h, axis: h + h.index_select(axis, torch.tensor([0])),
}
"""Operations along an axis that is drawn: of sequences, of positions, of neither."""


def _drawn(seed: int) -> tuple[list[str], Callable[[Tensor, Tensor], Tensor]]:
    """Operations that keep entries apart, attention, and one or two along an axis that is drawn, at any place."""
    rng = random.Random(seed)
    keeping = [name for name in APART if name not in ("cat", "attention")]
    chain: list[tuple[str, Any]] = [(name, APART[name]) for name in rng.choices(keeping, k=rng.randint(0, 2))]
    for _ in range(rng.randint(1, 2)):
        name, axis = rng.choice(list(ALONG_ANY)), rng.choice((0, 0, 1, 2))
        chain.append((f"{name} {axis}", lambda h, w, name=name, axis=axis: ALONG_ANY[name](h, axis)))
    rng.shuffle(chain)
    chain.insert(rng.randrange(len(chain) + 1), ("attention", attend))

    def decoder(x: Tensor, w: Tensor) -> Tensor:
        for _, operation in chain:
            x = operation(x, w)
        return x

    return [name for name, _ in chain], decoder


def _mixes_sequences(decoder: Callable[[Tensor, Tensor], Tensor], seed: int) -> bool:
    """Whether what comes out for one sequence changes with another one."""
    made = torch.Generator().manual_seed(seed)
    x, w = torch.randn(3, 7, 8, generator=made), torch.randn(8, 8, generator=made)
    other = x.clone()
    other[1] += torch.randn(7, 8, generator=made)
    before, after = decoder(x, w), decoder(other, w)
    return not torch.allclose(before[[0, 2]], after[[0, 2]], rtol=1e-5, atol=1e-6)


def _check_drawn(seed: int) -> str:
    names, decoder = _drawn(seed)
    program = captured(decoder)
    mixing = _mixes_sequences(decoder, seed)
    if with_cache(program).sites:
        assert not mixing, f"seed {seed}: {names} mixes sequences, and a cache was inserted"
        _check(program, random.Random(seed))
        return "accepted"
    return "mixing" if mixing else "refused"


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in range(1, 4))])
def test_operations_along_any_axis(block: int) -> None:
    """Whatever brings sequences or positions together is refused; what is accepted computes the same in parts."""
    found = [_check_drawn(seed) for seed in range(1000 + 6 * block, 1006 + 6 * block)]
    assert {"accepted", "mixing"} & {*found}


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(20))
def test_more_operations_along_any_axis(block: int) -> None:
    found = [_check_drawn(seed) for seed in range(2000 + 50 * block, 2050 + 50 * block)]
    assert {"accepted", "mixing"} <= {*found}


@pytest.mark.parametrize("setting", ["max_prefill=-1", "max_length=-5", "max_batch=0"])
def test_sizes_that_cannot_be(setting: str) -> None:
    with pytest.raises(UsageError, match=rf"insert_kv_cache.*{setting.partition('=')[0]}"):
        configure(resolve_config(settings=[f"insert_kv_cache.{setting}"]))
