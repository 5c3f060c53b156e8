"""torch.compile(model, backend="inlay"): same numbers, matches counted, state kept, every reason said."""

from __future__ import annotations

import logging
import os
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.integrations.torch_compile import CompiledGraph, inlay
from tests.integrations.torch_compile_helpers import compiled, fresh, matches  # noqa: F401
from tests.models import LLAMA, random_model

F = torch.nn.functional


def gate(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * (x + 1)


def test_dumps_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph has a folder; without the variable nothing is written."""
    compiled(gate)[0](torch.ones(2))
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("INLAY_DUMP_GRAPHS_DIR", str(tmp_path))
    torch._dynamo.reset()
    fast, _ = compiled(gate, dynamic=False)
    for size in (3, 4):
        fast(torch.ones(size))
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert any("match_swiglu" in file.name for file in folder.iterdir())
        assert "inlay.swiglu" in (folder / "001_canonicalize_match_swiglu.py").read_text()


# --- a stock model


@pytest.mark.parametrize("below", ["eager", "inductor"])
def test_a_stock_model(below: str) -> None:
    model = random_model(LLAMA)
    fast, seen = compiled(model, inner_backend=below)
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        got, want = (each(ids, use_cache=False).logits for each in (fast, model))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    (made,) = seen
    assert made.notes == ()
    found = matches(made)
    assert {key: found[key] for key in found if key != "clean_noops"} == {
        "match_rms_norm": 5,
        "match_attention": 2,
        "match_rope": 4,
        "match_swiglu": 2,
        "fuse_add_rms_norm": 4,
    }
    assert made.program is not None
    assert made.program.op_counts()["aten.linear.default"] == 15, "linear layers stay whole"


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.nightly)])
def test_other_sizes(dynamic: bool | None) -> None:
    """Static first and then dynamic, or dynamic at once: sizes 1 included, never another's numbers."""
    model = random_model(LLAMA)
    fast, seen = compiled(model, dynamic)
    shapes = [(2, 7), (3, 9), (1, 5), (4, 1), (5, 11)]
    for rows, length in shapes:
        ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            got, want = (each(ids, use_cache=False).logits for each in (fast, model))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert len(seen) < len(shapes), "one program serves several sizes"
    assert all(made.program is not None and matches(made)["match_rms_norm"] == 5 for made in seen)
    if dynamic:
        program = seen[0].program
        assert program is not None
        assert program.symbols, "sizes are symbols"


# --- pieces


def test_a_graph_break() -> None:
    """A norm cut in two: neither piece has a whole one, which is said and is no error."""

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        torch._dynamo.graph_break()
        normed = weight * (x * scale)
        return F.silu(normed) * (normed + 1)

    fast, seen = compiled(model)
    x, weight = torch.randn(2, 8), torch.rand(8)
    assert torch.equal(fast(x, weight), model(x, weight))
    first, second = seen
    assert "match_rms_norm matched nothing although there is aten.rsqrt.default" in first.notes[0]
    assert second.notes == ()
    assert matches(second) == {"match_swiglu": 1}


def test_a_stated_count_is_still_a_promise() -> None:
    fast, _ = compiled(lambda x: F.silu(x) * (x + 1), set=["match_swiglu.expect=2"])
    with pytest.raises(Exception, match="match_swiglu matched 1 sites, expected 2"):
        fast(torch.ones(3))


def test_constants_and_nested_graphs() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + torch.tensor([1.0, 2.0, 3.0])
        return torch.cond(x.sum() > 0, lambda v: F.silu(v) * (v + 1), lambda v: v - 1, (y,))

    fast, seen = compiled(model)
    for x in (torch.ones(3), -torch.ones(3)):
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
    assert seen[0].program is not None, seen[0].notes
    assert matches(seen[0]) == {"match_swiglu": 1}


def test_numbers_are_guarded() -> None:
    """With dynamic shapes Dynamo passes floats as inputs; a match that fixes one must not outlive its value."""

    class Norm(torch.nn.Module):
        eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * torch.ones(8)

    model = Norm()
    fast, seen = compiled(model, dynamic=True)
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

    fast, seen = compiled(model)
    with torch.inference_mode():
        assert torch.equal(fast(torch.ones(3)), model(torch.ones(3)))
    assert matches(seen[0]) == {"match_swiglu": 1}


def test_autocast_runs_as_it_came() -> None:
    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, weight)

    fast, seen = compiled(model)
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
    fast, seen = compiled(_twice, config=[file])
    fast(torch.ones(3))
    assert matches(seen[0]) == {}
    torch._dynamo.reset()
    fast, seen = compiled(_twice, config=[file], set=["match_swiglu.enabled=true"])
    fast(torch.ones(3))
    assert matches(seen[0]) == {"match_swiglu": 1}


@pytest.mark.parametrize("below", ["eager", "aot_eager"])
def test_training_runs_as_it_came(below: str) -> None:
    model = torch.nn.Linear(3, 3)
    fast, seen = compiled(model, inner_backend=below)
    fast(torch.ones(3)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(3, 3))
    assert "gradients are on, but transforms are for inference" in seen[0].notes[0]
    with torch.no_grad():
        assert torch.equal(fast(torch.ones(3)), model(torch.ones(3)))
    assert seen[1].program is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"inner_backen": "eager"}, "The backend has no option inner_backen. Did you mean inner_backend?"),
        ({"inner_backend": "tensorrt"}, "There is no inner backend tensorrt. Choose eager or aot_eager or inductor."),
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
    seen: list[CompiledGraph] = []
    fast = torch.compile(_twice, backend="inlay", options={"on_compiled": seen.append})
    assert torch.equal(fast(torch.ones(3)), _twice(torch.ones(3)))
    assert matches(seen[0]) == {"match_swiglu": 1}
