"""What no example of a library transform can state: refusals and rewrites of programs that are written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, fx, nn

from inlay.errors import UsageError
from inlay.program.bindings import Role
from inlay.program.text.printer import dump
from inlay.program.weights import DerivedTensor
from inlay.rewrite import Reason
from inlay.testing import program_of
from inlay.transforms.base import find_transform
from inlay.transforms.pass_manager import check_metadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program

aten = torch.ops.aten
pytestmark = pytest.mark.fast


class Gated(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.randn(*sizes)), nn.Parameter(torch.randn(*sizes))

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return linear(x, self.gate).relu() * linear(x, self.up)


def derived_weights() -> Program:
    program = program_of(Gated(4, 8), [torch.randn(2, 8)])
    rows = program.bindings.with_role(Role.PARAMETER)
    made = {row.name: DerivedTensor({row.target: program.tensors[row.name]}, "concat") for row in rows}
    return replace(program, tensors={**program.tensors, **made})


def vectors_as_weights() -> Program:
    return program_of(Gated(8), [torch.randn(2, 8)])


def written_result() -> Program:
    """The result of a linear layer is written in place after all of them, as graphs of other compilers have it."""
    program = program_of(Gated(4, 8), [torch.randn(2, 8)])
    linear, last = (node for node in program.graph.nodes if node.target is aten.linear.default)
    with program.graph.inserting_before(last.next):
        written = program.graph.call_function(aten.mul_.Tensor, (linear, 2.0))
    written.meta = {"val": linear.meta["val"]}
    return program


def _short_conv(x: Tensor, weight: Tensor) -> Tensor:
    before, after, value, *_ = torch.split(x.transpose(-1, -2), 8, -2)
    convolved = nn.functional.conv1d(before * value, weight, None, 1, 3, 1, 8)
    return (after * convolved[..., : x.shape[-2]]).transpose(-1, -2)


def no_batch() -> Program:
    return program_of(_short_conv, [torch.randn(24, 24), torch.randn(8, 1, 4)])


def cut_in_four() -> Program:
    return program_of(_short_conv, [torch.randn(2, 5, 32), torch.randn(8, 1, 4)])


REFUSED: list[tuple[str, Callable[[], Program], str]] = [
    ("match_gated_short_conv", no_batch, "shape: x is not [batch, length, channels]"),
    ("match_gated_short_conv", cut_in_four, "shape: x is not split into three parts"),
    ("fuse_gemms", derived_weights, "refused: p_gate was created by another transform"),
    ("fuse_gemms", vectors_as_weights, "shape: p_gate is not a matrix"),
    ("fuse_gemms", written_result, "mutation between: mul__tensor writes to linear"),
]


@pytest.mark.parametrize(
    ("name", "made", "reason"), REFUSED, ids=lambda each: getattr(each, "__name__", each).replace(" ", "_")
)
def test_refused(name: str, made: Callable[[], Program], reason: str) -> None:
    program = made()
    before = dump(program)
    applied = find_transform(name)().apply(program)
    assert not applied.sites
    assert dump(applied.program) == before
    assert applied.misses[0].reason == reason


@pytest.mark.parametrize("name", ["match_attention-"])
def test_attention_that_is_canonical_already(name: str) -> None:
    """Its mask becomes a flag where it is causal; a second run finds nothing to do."""
    attention, transform = torch.ops.inlay.attention.default, find_transform("match_attention")()

    def attend(q: Tensor) -> Any:
        places = torch.arange(5)
        return attention(q, q, q, places[None, :] <= places[:, None], 0.5, False, 0, 0.0)

    program = program_of(attend, [torch.randn(2, 4, 5, 8)])
    applied = transform.apply(program.copy())
    assert (applied.sites, applied.misses) == (1, [])
    (call,) = (node for node in applied.program.graph.nodes if node.target is attention)
    assert call.args[3:] == (None, 0.5, True, 0, 0.0)
    again = transform.apply(applied.program)
    assert (again.sites, again.misses) == (0, [])


@pytest.mark.parametrize("name", ["match_attention-"])
def test_any_number_of_heads_that_are_repeated(name: str) -> None:
    """How many heads there are is not taken to be what it was at capture, and nothing is given as it was before."""
    attention = torch.ops.inlay.attention.default

    def attend(q: Tensor, k: Tensor) -> Any:
        heads = k[:, :, None].expand(2, k.shape[1], 2, 5, 8).reshape(2, 2 * k.shape[1], 5, 8)
        return attention(q, heads, heads, None, 0.5, False, 0, 0.0)

    axes = {"q": {1: "heads"}, "k": {1: "groups"}}
    program = program_of(attend, [torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8)], axes=axes)
    before = dump(program)
    applied = find_transform("match_attention")().apply(program)
    assert (applied.sites, applied.misses, dump(applied.program)) == (0, [], before)


@pytest.mark.parametrize("name", ["match_attention-"])
@pytest.mark.parametrize("sequences", [1, 2])
def test_keys_of_one_sequence_that_are_repeated(name: str, sequences: int) -> None:
    """Kernels read as many sequences of keys as there are of queries: heads are given as they were where that holds."""

    def attend(q: Tensor, k: Tensor) -> Tensor:
        heads = k[:, :, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8)
        return nn.functional.scaled_dot_product_attention(q, heads, heads)

    program = program_of(attend, [torch.randn(2, 4, 5, 8), torch.randn(sequences, 2, 5, 8)])
    applied = find_transform("match_attention")().apply(program)
    (call,) = (node for node in applied.program.graph.nodes if node.target is torch.ops.inlay.attention.default)
    key = call.args[1]
    assert isinstance(key, fx.Node)
    assert list(key.meta["val"].shape) == [2, 4 if sequences == 1 else 2, 5, 8]


def _last_row(output: str, program: Program) -> Any:
    cls = find_transform("gather_last_logits")
    return cls(cls.Options(output=output)).apply(program)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["gather_last_logits-"])
def test_an_output_that_cannot_be_cut(name: str) -> None:
    linear = nn.functional.linear
    three = program_of(lambda x, w: {"scores": linear(x, w)}, [torch.randn(2, 3, 8), torch.randn(5, 8)])
    assert _last_row("scores", three.copy()).sites == 1
    with pytest.raises(UsageError, match="The program has no output score"):
        _last_row("score", three)
    two = program_of(lambda x, w: {"scores": linear(x, w)}, [torch.randn(3, 8), torch.randn(5, 8)])
    with pytest.raises(UsageError, match=r"The output scores is .*, not \[batch, length, scores\]"):
        _last_row("scores", two)


def test_a_branch_that_refuses_after_the_output_was_cut() -> None:
    """What the option `output` inserted stays when a match in a nested graph is taken back."""
    linear = nn.functional.linear

    def branched(x: Tensor, w: Tensor) -> dict[str, Tensor]:
        def one(x: Tensor, w: Tensor) -> Tensor:
            return linear(x, w)[:, 1:3].sum(1)

        def two(x: Tensor, w: Tensor) -> Tensor:
            return linear(x + 1, w)[:, 1:3].sum(1)

        return {"scores": torch.cond(x.sum() > 0, one, two, (x, w)).unsqueeze(1).tanh()}

    program = program_of(branched, [torch.randn(2, 5, 8), torch.randn(16, 8)])
    applied = _last_row("scores", program.copy())
    assert applied.sites == 1
    assert [each.kind for each in applied.misses] == [Reason.SHAPE, Reason.SHAPE]
    check_metadata(applied.program, program)


def _cached(function: Callable[..., Any]) -> tuple[Program, Any]:
    axes = {"q": {0: "batch", 2: "length"}}
    program = program_of(function, (torch.randn(2, 3, 5, 8),), axes, ("clean_noops", "match_attention"))
    applied = find_transform("insert_kv_cache")().apply(program.copy())
    assert (applied.sites, applied.misses) == (1, [])
    check_metadata(applied.program, program)
    return program, applied.program


def test_positions_that_are_read_after_attention() -> None:
    """What they were computed from goes, and nothing is inserted beside it."""

    def late(q: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])[None, :]
        out = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return out + torch.cos(places.to(q.dtype))[:, None, :, None]

    _, made = _cached(late)
    assert list(made.graph.nodes) == list(reversed(made.graph.nodes))[::-1]


@pytest.mark.parametrize("more", [0.0, 0.5])
def test_what_is_returned_lies_in_memory_as_before(more: float) -> None:
    def returned(q: Tensor) -> Tensor:
        out = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return out + more if more else out

    before, after = _cached(returned)
    results: list[Any] = [program.graph.output_node().args[0] for program in (before, after)]
    strides = [returned[-1].meta["val"].stride() for returned in results]
    assert str(strides[0]) == str(strides[1])


def test_the_graph_is_one_that_is_refused_for_the_write_alone() -> None:
    program = written_result()
    (written,) = (node for node in program.graph.nodes if node.target is aten.mul_.Tensor)
    program.graph.erase_node(written)
    assert isinstance(written, fx.Node)
    assert find_transform("fuse_gemms")().apply(program).sites == 1


@pytest.mark.parametrize("name", ["insert_kv_cache-"])
def test_neither_attention_nor_a_length(name: str) -> None:
    """Every size is a number: nothing can be said about positions, and nothing is refused."""
    applied = find_transform("insert_kv_cache")().apply(program_of(lambda x: x.sum(1), [torch.randn(2, 5, 8)]))
    assert (applied.sites, applied.misses) == (0, [])
