"""torch.compile(model, backend="inlay"): what fails in Inlay never fails the model, and is said."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from inlay.errors import CaptureError
from inlay.integrations.dynamo_graph import capture_dynamo_graph
from inlay.rewrite.pattern_trees import trace_pattern
from inlay.transforms.base import Numerics, Stage, Transform, TransformResult, transform
from tests.integrations.torch_compile_helpers import compiled, fresh, matches  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inlay.program import Program

F = torch.nn.functional


@torch.library.custom_op("inlay_test::not_traced", mutates_args=())
def not_traced(x: torch.Tensor) -> torch.Tensor:
    """Runs, says what it gives, and cannot be compiled."""
    return x.clone()


@not_traced.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@not_traced.register_torch_dispatch(ProxyTorchDispatchMode)
def _(*given: Any) -> Any:
    raise RuntimeError("this cannot be traced")


@pytest.fixture
def failing() -> None:
    """Transforms that change the program and then fail, or make of it what no compiler takes."""

    @transform("test_fails", stage=Stage.CLEAN, numerics=Numerics.EXACT)
    class Fails(Transform):
        """Fails halfway."""

        def apply(self, program: Program) -> TransformResult:
            for node in program.graph.nodes:
                if node.target is torch.ops.aten.silu.default:
                    node.target = torch.ops.aten.neg.default
            raise KeyError("nothing here")

    @transform("test_cannot_be_compiled", stage=Stage.CLEAN, numerics=Numerics.EXACT)
    class CannotBeCompiled(Transform):
        """Every silu is followed by an operator that no compiler can trace."""

        def apply(self, program: Program) -> TransformResult:
            for node in list(program.graph.nodes):
                if node.target is torch.ops.aten.silu.default:
                    with program.graph.inserting_after(node):
                        made = program.graph.call_function(torch.ops.inlay_test.not_traced.default, (node,))
                    made.meta = dict(node.meta)
                    node.replace_all_uses_with(made, lambda user, made=made: user is not made)
            return TransformResult(program, 1)

    return


def gated(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * (x + 1)


def _with(tmp_path: Path, name: str) -> list[Path]:
    file = tmp_path / "mine.yaml"
    file.write_text(f"transforms: {{{name}: {{expect: any, reason: a test}}}}")
    return [file]


@pytest.mark.usefixtures("failing")
def test_a_transform_that_fails_is_left_out(tmp_path: Path) -> None:
    fast, seen = compiled(gated, config=_with(tmp_path, "test_fails"))
    x = torch.randn(5)
    assert torch.equal(fast(x), gated(x))
    (made,) = seen
    assert matches(made) == {"match_swiglu": 1}, "the others run on the program as it was"
    (record,) = [each for each in made.records if each.status == "failed"]
    assert record.key == "test_fails"
    assert "KeyError: 'nothing here'" in record.remarks[0].reason
    assert made.notes[0].startswith("test_fails is not applied: The transform test_fails failed: KeyError")


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("below", ["aot_eager", "inductor"])
def test_what_cannot_be_compiled_runs_as_it_came(tmp_path: Path, below: str) -> None:
    fast, seen = compiled(gated, config=_with(tmp_path, "test_cannot_be_compiled"), inner_backend=below)
    x = torch.randn(5)
    torch.testing.assert_close(fast(x), gated(x))
    (made,) = seen
    assert made.program is None
    assert made.notes[0].startswith(f"A graph runs unmodified: {below} cannot run the transformed graph: ")


def test_patterns_are_not_traced_with_the_sizes_of_the_model() -> None:
    """While a backend runs, Dynamo's sizes and guards are there for everybody who asks torch for them."""
    found = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(trace_pattern(gated, {"x": torch.randn(3, 4)}))
        return module.forward

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2) * x.shape[1] if x.shape[1] > 3 else x

    x = torch.randn(2, 6)
    assert torch.equal(torch.compile(model, backend=backend, dynamic=True)(x), model(x))
    assert found[0].num_calls == 3


class Attends(torch.nn.Module):
    """A mask that is made of positions, and a rotation by them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (each.view(batch, length, 2, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        places = torch.arange(length)
        angles = places[:, None] * 10.0 ** -torch.arange(4)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        q, k = (each * cos + torch.cat([-each[..., 4:], each[..., :4]], -1) * sin for each in (q, k))
        made = F.scaled_dot_product_attention(q, k, v, places[None, :] <= places[:, None])
        return made.transpose(1, 2).reshape(batch, length, 16)


@pytest.mark.parametrize("below", ["eager", "aot_eager"])
def test_dynamic_attention(below: str) -> None:
    model = Attends()
    fast, seen = compiled(model, dynamic=True, inner_backend=below)
    for shape in ((2, 5), (3, 9), (1, 4), (2, 1)):
        x = torch.randn(*shape, 16)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
    for made in seen:
        assert {record.status for record in made.records} <= {"ran", "disabled", "skipped"}, made.notes
    assert matches(seen[0])["match_attention"] == 1
    assert matches(seen[0])["match_rope"] == 2


@pytest.mark.parametrize(
    "off",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0, training=True),
        lambda x: F.dropout(input=x, training=False),
        lambda x: torch.dropout(x, 0.5, False),
    ],
    ids=["not training", "none dropped", "by name", "the operator"],
)
def test_dropout_that_is_off_hands_on_its_operand(off: Callable[[torch.Tensor], torch.Tensor]) -> None:
    fast, seen = compiled(off)
    x = torch.ones(3)
    assert fast(x).data_ptr() == x.data_ptr()
    assert seen[0].program is not None


def test_what_no_compiler_takes_runs_eagerly() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.inlay_test.not_traced(x)
        return made + 1

    fast, seen = compiled(model, inner_backend="aot_eager")
    assert torch.equal(fast(torch.ones(3)), torch.full((3,), 2.0))
    assert seen[0].notes[-1].startswith("A graph runs eagerly: aot_eager cannot run it: ")


def test_gradients_that_the_model_switches_on() -> None:
    weight = torch.ones(3, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return F.silu(x) * weight

    fast, seen = compiled(model)
    with torch.no_grad():
        assert fast(torch.ones(3)).requires_grad
    assert "switches gradients on" in seen[0].notes[0]


def test_gradients_that_stay_switched_on() -> None:
    """Tracing must not leave them on, nor take them for having been on."""

    def model(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(True)
        return F.silu(x) * x

    fast, seen = compiled(model)
    with torch.no_grad():
        assert fast(torch.ones(3, requires_grad=True)).requires_grad
    assert "switches gradients on" in seen[0].notes[0]


@pytest.mark.parametrize(
    ("written", "itself"),
    [
        (lambda x: x.mul_(3), True),
        (lambda x: x.mul_(3).add_(1), True),
        (lambda x: x.view(3, 4).mul_(3), False),
        (lambda x: x.detach().mul_(3), False),
        (lambda x: x.mul_(3).view(3, 4), False),
    ],
)
def test_an_input_that_is_written_to_and_returned(
    written: Callable[[torch.Tensor], torch.Tensor], itself: bool
) -> None:
    """It is returned as the object it is; a view of it is another one."""
    fast, _ = compiled(written)
    x, other = torch.ones(3, 4), torch.ones(3, 4)
    with torch.no_grad():
        made, wanted = fast(x), written(other)
    assert (made is x) == (wanted is other) == itself
    assert torch.equal(made, wanted)
    assert torch.equal(x, other)
    assert made.data_ptr() == x.data_ptr()


def test_state_that_is_copied_is_said() -> None:
    def model(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.copy_(torch.cat([cache[1:], x]))
        return cache.sum(0)

    for below, reason in (("eager", "out of place: cat"), ("aot_eager", "functionalized: ")):
        torch._dynamo.reset()
        fast, seen = compiled(model, inner_backend=below)
        one, two = torch.arange(32.0).view(8, 4), torch.arange(32.0).view(8, 4)
        torch.testing.assert_close(fast(one, torch.ones(1, 4)), model(two, torch.ones(1, 4)))
        assert torch.equal(one, two)
        (note,) = seen[0].notes
        assert reason in note
        assert "f32[8, 4], 128 bytes" in note


def test_two_threads_compile_at_once() -> None:
    """Registries, traced patterns and what is switched for a moment belong to everybody, or to one thread."""
    start, failed = threading.Barrier(2), list[BaseException]()

    def work(seed: int) -> None:
        try:
            start.wait()
            for width in (seed, seed + 4):
                model, x = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.SiLU()), torch.randn(3, width)
                fast, seen = compiled(lambda x, model=model: model(x) * (x + 1), dynamic=True)
                with torch.no_grad():
                    torch.testing.assert_close(fast(x), model(x) * (x + 1))
                assert matches(seen[0]) == {"match_swiglu": 1}, seen[0].notes
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (3, 4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed, failed


def test_a_trace_that_fails_is_a_reason() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(CaptureError, match="Dynamo gave no type for an input"):
        capture_dynamo_graph(torch.fx.GraphModule(torch.nn.Module(), graph))
