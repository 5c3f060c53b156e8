"""torch.compile(model, backend="inlay"): same numbers, matches counted, state kept, every reason said."""

from __future__ import annotations

import logging
import os
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx

from inlay.compile import Compiled, inlay
from inlay.compile.below import runnable
from inlay.compile.pieces import piece_of
from inlay.errors import CaptureError
from inlay.program.symbols import FakeValues
from inlay.testing import program_of
from models import LLAMA, random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F = torch.nn.functional


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(function: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> tuple[Any, list[Compiled]]:
    seen: list[Compiled] = []
    options |= {"on_compiled": seen.append}
    return torch.compile(function, backend=inlay, dynamic=dynamic, options=options), seen


def _matches(made: Compiled) -> dict[str, int]:
    return {record.key: record.sites for record in made.records if record.sites}


# --- a stock model


@pytest.mark.parametrize("below", ["eager", "inductor"])
def test_a_stock_model(below: str) -> None:
    model = random_model(LLAMA)
    fast, seen = _compiled(model, below=below)
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        got, want = (each(ids, use_cache=False).logits for each in (fast, model))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    (made,) = seen
    assert made.notes == ()
    found = _matches(made)
    assert {key: found[key] for key in found if key != "clean_noops"} == {
        "match_rms_norm": 5,
        "match_attention": 2,
        "match_rope": 4,
        "match_swiglu": 2,
        "fuse_add_rms_norm": 4,
    }
    assert made.program is not None
    assert made.program.op_counts()["aten.linear.default"] == 15, "linear layers stay whole"


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_sizes(dynamic: bool | None) -> None:
    """Static first and then dynamic, or dynamic at once: sizes 1 included, never another's numbers."""
    model = random_model(LLAMA)
    fast, seen = _compiled(model, dynamic)
    shapes = [(2, 7), (3, 9), (1, 5), (4, 1), (5, 11)]
    for rows, length in shapes:
        ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            got, want = (each(ids, use_cache=False).logits for each in (fast, model))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert len(seen) < len(shapes), "one program serves several sizes"
    assert all(made.program is not None and _matches(made)["match_rms_norm"] == 5 for made in seen)
    if dynamic:
        program = seen[0].program
        assert program is not None
        assert program.symbols, "sizes are symbols"


# --- state


class Cached(torch.nn.Module):
    """A cache that is a buffer and one that is an argument, both written in place, and read after."""

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
    fast, seen = _compiled(model, below=below)
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
    assert _matches(made)["match_swiglu"] == 1


def test_values_returned_are_those_from_before_a_write() -> None:
    """Swapping two inputs: each copy must read what was there before the other."""

    def swap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a + b

    fast, seen = _compiled(swap)
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
    assert [row.alias.of for row in program.bindings.outs if row.alias] == [a.name, b.name]
    output.args = ((b, a, b),)
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    (returned,) = runnable(program, [None])(one, two)
    assert (one.tolist(), two.tolist(), returned.tolist()) == ([3.0, 4.0], [1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize("below", ["eager", "inductor"])
def test_a_written_input_that_is_returned(below: str) -> None:
    """It is the input itself, not a copy: whoever writes to it later writes to both."""

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            counted = self.count.add_(1)
            return F.silu(x) * (counted + x), counted

    plain, model = Counts(), Counts()
    fast, seen = _compiled(model, below=below)
    for _ in range(3):
        with torch.no_grad():
            (got, held), (want, _) = fast(torch.ones(3)), plain(torch.ones(3))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(model.count, plain.count, rtol=0, atol=0)
    held.add_(10)
    assert model.count.tolist() == [13.0] * 3
    assert _matches(seen[0]) == {"match_swiglu": 1}


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
    fast, seen = _compiled(_overlapping)
    other = base.clone()
    assert torch.equal(fast(base[:2], base), _overlapping(other[:2], other))
    assert torch.equal(base, other)
    assert seen[0].program is None
    assert "share memory that is written to" in seen[0].notes[0]


def test_a_view_of_what_is_written_runs_as_it_came() -> None:
    a = torch.zeros(2)
    fast, seen = _compiled(_returns_a_view)
    view = fast(a, a.clone())
    view.add_(5)
    assert a.tolist() == [6.0, 1.0], "the result still is a part of the input"
    assert "is a part of an input that is written to" in seen[0].notes[0]


def test_outputs_that_share_memory() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = x * 2
        part = whole[0]
        part.add_(1)
        return whole, part

    fast, seen = _compiled(model)
    whole, part = fast(torch.ones(2))
    part.add_(5)
    assert whole.tolist() == [8.0, 2.0]
    assert "share memory written to" in seen[0].notes[0]


def test_changing_a_shape_in_place() -> None:
    """Dynamo cuts the graph there; were it to hand such a piece over, it would run as it came."""
    a = torch.ones(2)
    fast, _ = _compiled(_transposes)
    assert torch.equal(fast(a, torch.ones(2)), torch.full((1, 2), 2.0))
    assert a.shape == (1, 2)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = FakeValues([]).tensor(torch.float32, (2, 3))
    graph.output((graph.call_method("relu", (graph.call_method("t_", (x,)),)),))
    with pytest.raises(CaptureError, match=r"aten.t_.default changes the shape of an input in place"):
        piece_of(fx.GraphModule(torch.nn.Module(), graph))


# --- pieces


def test_a_graph_break() -> None:
    """A norm cut in two: neither piece has a whole one, which is said and is no error."""

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        torch._dynamo.graph_break()
        normed = weight * (x * scale)
        return F.silu(normed) * (normed + 1)

    fast, seen = _compiled(model)
    x, weight = torch.randn(2, 8), torch.rand(8)
    assert torch.equal(fast(x, weight), model(x, weight))
    first, second = seen
    assert "match_rms_norm matched nothing although there is aten.rsqrt.default" in first.notes[0]
    assert second.notes == ()
    assert _matches(second) == {"match_swiglu": 1}


def test_a_stated_count_is_still_a_promise() -> None:
    fast, _ = _compiled(lambda x: F.silu(x) * (x + 1), set=["match_swiglu.expect=2"])
    with pytest.raises(Exception, match="match_swiglu matched 1 sites, and 2 are expected"):
        fast(torch.ones(3))


def test_constants_and_nested_graphs() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + torch.tensor([1.0, 2.0, 3.0])
        return torch.cond(x.sum() > 0, lambda v: F.silu(v) * (v + 1), lambda v: v - 1, (y,))

    fast, seen = _compiled(model)
    for x in (torch.ones(3), -torch.ones(3)):
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
    assert seen[0].program is not None, seen[0].notes
    assert _matches(seen[0]) == {"match_swiglu": 1}


def test_numbers_are_guarded() -> None:
    """With dynamic shapes Dynamo passes floats as inputs; a match that fixes one must not outlive its value."""

    class Norm(torch.nn.Module):
        eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * torch.ones(8)

    model = Norm()
    fast, seen = _compiled(model, dynamic=True)
    x = torch.randn(3, 8)
    for eps in (1e-6, 0.5, 2.0):
        model.eps = eps
        with torch.no_grad():
            assert torch.equal(fast(x), model(x)), eps
    assert all(made.program is not None for made in seen)


def test_inference_mode_and_modes_inside() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = x.relu()
        return F.silu(y) * (y + 1)

    fast, seen = _compiled(model)
    with torch.inference_mode():
        assert torch.equal(fast(torch.ones(3)), model(torch.ones(3)))
    assert _matches(seen[0]) == {"match_swiglu": 1}


def test_autocast_runs_as_it_came() -> None:
    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, weight)

    fast, seen = _compiled(model)
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    assert torch.equal(fast(x, weight), model(x, weight))
    assert fast(x, weight).dtype is torch.bfloat16
    assert "autocast" in seen[0].notes[0]
    assert seen[0].program is None


# --- options and errors


def _twice(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * (x + 1)


def test_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("transforms: {match_swiglu: {enabled: false}}")
    fast, seen = _compiled(_twice, config=[file])
    fast(torch.ones(3))
    assert _matches(seen[0]) == {}
    torch._dynamo.reset()
    fast, seen = _compiled(_twice, config=[file], set=["match_swiglu.enabled=true"])
    fast(torch.ones(3))
    assert _matches(seen[0]) == {"match_swiglu": 1}


def test_training_is_refused() -> None:
    model = torch.nn.Linear(3, 3)
    fast, _ = _compiled(model)
    with pytest.raises(Exception, match=r"Call the compiled model within torch.no_grad\(\)"):
        fast(torch.ones(3))
    with torch.no_grad():
        assert torch.equal(fast(torch.ones(3)), model(torch.ones(3)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"belo": "eager"}, "The backend has no option belo. Did you mean below?"),
        ({"below": "tensorrt"}, "Nothing called tensorrt runs below. Choose eager or inductor."),
        ({"set": ["match_swigl.enabled=false"]}, "Did you mean match_swiglu?"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Exception, match="backend='inlay' raised") as error:
        torch.compile(_twice, backend=inlay, options=options)(torch.ones(3))
    assert sentence in str(error.value)


def test_log() -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, handler = logging.getLogger("inlay"), Keep()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        torch.compile(_twice, backend=inlay)(torch.ones(3))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert any(line.startswith("inlay: match_swiglu: [SUMMARY] matches=1") for line in lines)


# --- the name


def test_entry_point_is_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["torch_dynamo_backends"]["inlay"]
    assert EntryPoint("inlay", value, "torch_dynamo_backends").load() is inlay


def test_by_name() -> None:
    """What users write. It needs an installation that knows the entry point."""
    if not entry_points(group="torch_dynamo_backends", name="inlay"):
        if os.environ.get("CI"):
            pytest.fail("the installed inlay has no entry point torch_dynamo_backends")
        pytest.skip("this installation is older than the entry point: pip install -e . --no-deps")
    seen: list[Compiled] = []
    fast = torch.compile(_twice, backend="inlay", options={"on_compiled": seen.append})
    assert torch.equal(fast(torch.ones(3)), _twice(torch.ones(3)))
    assert _matches(seen[0]) == {"match_swiglu": 1}
