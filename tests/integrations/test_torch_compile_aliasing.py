"""torch.compile(model, backend="inlay"): state, writes and shared memory are as they are without it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from inlay.errors import CaptureError
from inlay.integrations.dynamo_graph import capture_dynamo_graph
from inlay.lowering.inner_backend import build_inner_module
from inlay.program.symbols import FakeValues
from inlay.testing import program_of
from tests.integrations.torch_compile_helpers import compiled, fresh, matches  # noqa: F401

F = torch.nn.functional


# --- state


class Cached(torch.nn.Module):
    """A cache that is a buffer and one that is an argument, both written in place, and read after."""

    own: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.own.index_copy_(0, place, x)
        cache.index_copy_(0, place, x * 2)
        cache[0].add_(1)
        scratch = x.clone()
        scratch.mul_(3)
        return F.silu(self.own.sum(0)) * cache.sum(0) + scratch


@pytest.mark.parametrize("below", ["eager", "inductor"])
def test_state_is_written_in_place(below: str) -> None:
    plain, model = Cached(), Cached()
    fast, seen = compiled(model, inner_backend=below)
    caches = torch.zeros(6, 4), torch.zeros(6, 4)
    address = caches[0].data_ptr(), model.own.data_ptr()
    for step in range(3):
        x, place = torch.full((1, 4), float(step + 1)), torch.tensor([step])
        with torch.no_grad():
            got, want = fast(x, caches[0], place), plain(x, caches[1], place)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(caches[0], caches[1], rtol=0, atol=0)
        torch.testing.assert_close(model.own, plain.own, rtol=0, atol=0)
    assert (caches[0].data_ptr(), model.own.data_ptr()) == address
    (made,) = seen
    assert made.program is not None
    assert len(made.program.bindings.state) == 2
    assert matches(made)["match_swiglu"] == 1


def test_values_returned_are_those_from_before_a_write() -> None:
    """Swapping two inputs: each copy must read what was there before the other."""

    def swap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a + b

    fast, seen = compiled(swap)
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert torch.equal(fast(a, b), torch.tensor([4.0, 6.0]))
    assert (a.tolist(), b.tolist()) == ([3.0, 4.0], [1.0, 2.0])
    assert seen[0].program is not None


def test_writes_read_what_was_there_before() -> None:
    """A program whose new values are its inputs, the other way round: no write may be seen by the next."""

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        b.add_(1)
        return a * b

    program = program_of(both, [torch.ones(2), torch.ones(2)])
    a, b = (node for node in program.graph.nodes if node.op == "placeholder")
    output = next(iter(reversed(program.graph.nodes)))
    assert [row.alias.binding for row in program.bindings.outs if row.alias] == [a.name, b.name]
    output.args = ((b, a, b),)
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    (returned,) = build_inner_module(program, [None]).module(one, two)
    assert (one.tolist(), two.tolist(), returned.tolist()) == ([3.0, 4.0], [1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize("below", ["eager", "inductor"])
def test_a_written_input_that_is_returned(below: str) -> None:
    """It is the input itself, not a copy: whoever writes to it later writes to both."""

    class Counts(torch.nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            counted = self.count.add_(1)
            return F.silu(x) * (counted + x), counted

    plain, model = Counts(), Counts()
    fast, seen = compiled(model, inner_backend=below)
    for _ in range(3):
        with torch.no_grad():
            (got, held), (want, _) = fast(torch.ones(3)), plain(torch.ones(3))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(model.count, plain.count, rtol=0, atol=0)
    held.add_(10)
    assert model.count.tolist() == [13.0] * 3
    assert matches(seen[0]) == {"match_swiglu": 1}


def _overlapping(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return F.silu(b) * b


def _returns_a_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a[:1]


def _transposes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.unsqueeze_(0)
    return a + b


def test_shared_memory_runs_as_it_came() -> None:
    base = torch.arange(4.0)
    fast, seen = compiled(_overlapping)
    other = base.clone()
    assert torch.equal(fast(base[:2], base), _overlapping(other[:2], other))
    assert torch.equal(base, other)
    assert seen[0].program is None
    assert "share memory that is written to" in seen[0].notes[0]


def test_a_view_of_what_is_written_runs_as_it_came() -> None:
    a = torch.zeros(2)
    fast, seen = compiled(_returns_a_view)
    view = fast(a, a.clone())
    view.add_(5)
    assert a.tolist() == [6.0, 1.0], "the result still is a part of the input"
    assert "is a view of an input that is written to" in seen[0].notes[0]


def test_outputs_that_share_memory() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = x * 2
        part = whole[0]
        part.add_(1)
        return whole, part

    fast, seen = compiled(model)
    whole, part = fast(torch.ones(2))
    part.add_(5)
    assert whole.tolist() == [8.0, 2.0]
    assert "share memory written to" in seen[0].notes[0]


def test_changing_a_shape_in_place() -> None:
    """Dynamo cuts the graph there; were it to hand such a piece over, it would run as it came."""
    a = torch.ones(2)
    fast, _ = compiled(_transposes)
    assert torch.equal(fast(a, torch.ones(2)), torch.full((1, 2), 2.0))
    assert a.shape == (1, 2)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = FakeValues([]).tensor(torch.float32, (2, 3))
    graph.output((graph.call_method("relu", (graph.call_method("t_", (x,)),)),))
    with pytest.raises(CaptureError, match=r"aten.t_.default changes the shape of an input in place"):
        capture_dynamo_graph(fx.GraphModule(torch.nn.Module(), graph))
