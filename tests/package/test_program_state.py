"""State that a package or program owns: in place, saved in mid-stream, restored elsewhere, reset to where it began."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

import inlay
from inlay.errors import InlayError, UsageError
from inlay.flow import build
from inlay.frontend import Example, capture
from inlay.lowering.compiled_program import CompiledProgram, compile_program
from inlay.lowering.lower import compile_lowered, lower
from inlay.lowering.state.buffers import lift_mutated_buffers
from inlay.package import load_package
from inlay.package.memory_profiler import record_torch_allocations
from inlay.runtime import Session
from inlay.testing import program_of
from tests.package.stateful_models import RingConvolution, ring_convolution, stock_cache
from tests.shared_cache import once_a_run
from tests.small_packages import in_new_process

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.lowering.executable import Executable
    from inlay.program import Program

FRAMES = torch.randn(24, 1, 4, generator=torch.Generator().manual_seed(1))
BEFORE = 11


@pytest.fixture(scope="module")
def ring_package() -> Path:
    return once_a_run("ring", lambda path: build(ring_convolution(), path / "package")) / "package"


@cache
def _captured() -> Program:
    return capture(ring_convolution())


def _compiled() -> CompiledProgram:
    return compile_program(_captured(), "eager")


def _executable() -> Executable:
    return compile_lowered(lower(lift_mutated_buffers(_captured())), "eager")


def _run(program: Any, frames: torch.Tensor) -> torch.Tensor:
    if isinstance(program, CompiledProgram):
        return torch.stack([program(frame) for frame in frames])
    return torch.stack([program({"frame": frame})["output"] for frame in frames])


GO_ON = """
import sys, torch, inlay
from inlay.package import load_package
package = load_package(sys.argv[1])
inlay.load_state(package, sys.argv[2])
frames = torch.load(sys.argv[3])
torch.save(torch.stack([package({"frame": frame})["output"] for frame in frames]), sys.argv[4])
print([name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo", "inlay.streams"))])
"""


def test_a_package_owns_its_state(ring_package: Path, tmp_path: Path) -> None:
    """N steps, saved, M more; the same M steps from the file in a new process are equal to the bit."""
    package, model = load_package(ring_package), RingConvolution()
    assert list(package.state) == ["frames", "at", "peak"]
    assert (package.state["at"].tolist(), package.state["peak"][0].item()) == ([3], 0.25)
    places = {name: value.data_ptr() for name, value in package.state.items()}
    with torch.no_grad():
        wanted = torch.stack([model(frame) for frame in FRAMES])
    first = _run(package, FRAMES[:BEFORE])
    file = tmp_path / "stream.safetensors"
    inlay.save_state(package, file)
    assert [each.name for each in tmp_path.iterdir()] == [file.name], "nothing else is left in the folder"
    rest = _run(package, FRAMES[BEFORE:])
    torch.testing.assert_close(torch.cat([first, rest]), wanted)
    mine = package.new_state()
    passed = [package({"frame": frame, **mine})["output"] for frame in FRAMES[:BEFORE]]
    assert torch.equal(torch.stack(passed), first)
    for name, value in model.named_buffers():
        torch.testing.assert_close(package.state[name], value)

    torch.save(FRAMES[BEFORE:].clone(), tmp_path / "frames.pt")
    made = in_new_process(GO_ON, ring_package, file, tmp_path / "frames.pt", tmp_path / "rest.pt")
    assert made.stdout.strip() == "[]", "no compiler and no replay is imported"
    assert torch.equal(torch.load(tmp_path / "rest.pt"), rest)
    inlay.load_state(package, file)
    assert torch.equal(_run(package, FRAMES[BEFORE:]), rest)
    inlay.reset_state(package)
    assert torch.equal(_run(package, FRAMES[:BEFORE]), first)
    assert {name: value.data_ptr() for name, value in package.state.items()} == places

    sizes = record_torch_allocations(lambda: package({"frame": FRAMES[0]}))
    assert package.state["frames"].nbytes not in sizes
    assert package.state["peak"].nbytes not in sizes
    assert not package.remarks


@pytest.mark.fast
def test_state_that_is_passed_is_used() -> None:
    """The executable's own state is for calls that pass none; passing only a part of the state is an error."""
    program = _executable()
    mine = program.new_state()
    made = program({"frame": FRAMES[0], **mine})["output"]
    assert (mine["b_at"].item(), program.state["at"].item()) == (4, 3)
    assert torch.equal(program({"frame": FRAMES[0]})["output"], made)
    with pytest.raises(UsageError, match=r"frames must be f32\[16, 4\]"):
        program({"frame": FRAMES[0], "b_at": mine["b_at"]})
    assert program.state["at"].item() == 4


@pytest.mark.fast
@pytest.mark.parametrize("make", [_executable, _compiled])
def test_reset_and_files_of_executables_and_compiled_programs(make: Any, tmp_path: Path) -> None:
    program = make()
    first = _run(program, FRAMES[:BEFORE])
    inlay.save_state(program, tmp_path / "s")
    rest = _run(program, FRAMES[BEFORE:])
    inlay.reset_state(program)
    assert (program.state["at"].item(), program.state["peak"].max().item()) == (3, 0.25)
    assert not program.state["frames"].any()
    assert torch.equal(_run(program, FRAMES[:BEFORE]), first)
    other = make()
    inlay.load_state(other, tmp_path / "s")
    assert torch.equal(_run(other, FRAMES[BEFORE:]), rest)


@pytest.mark.fast
def test_initial_values_are_not_those_of_a_model_that_runs_on() -> None:
    model = RingConvolution()
    step = compile_program(capture(Example(model, (FRAMES[0],))), "eager")
    step(FRAMES[0])
    model(FRAMES[0])
    inlay.reset_state(step)
    assert (model.at.item(), step.state["at"].item()) == (4, 3)


def _another_file(folder: Path, change: Any) -> Path:
    from safetensors.torch import save_file

    values = {"frames": torch.ones(16, 4), "at": torch.tensor([9]), "peak": torch.ones(40)}
    change(values)
    save_file(values, folder / "wrong")
    return folder / "wrong"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda values: values.pop("peak"), r"peak is missing in the file, and f32\[40\] here"),
        (lambda values: values.update(more=torch.ones(1)), r"more is f32\[1\] in the file, and missing here"),
        (lambda values: values.update(at=torch.tensor([9], dtype=torch.int32)), r"at is i32\[1\] in the file, and i64"),
        (lambda values: values.update(frames=torch.ones(4, 16)), r"frames is f32\[4, 16\] in the file, and f32\[16, 4"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(change: Any, sentence: str, tmp_path: Path) -> None:
    program = _compiled()
    with pytest.raises(UsageError, match=sentence + r".*\. Load a file that save_state wrote"):
        inlay.load_state(program, _another_file(tmp_path, change))
    assert not program.state["frames"].any()
    inlay.load_state(program, _another_file(tmp_path, lambda values: None))
    assert program.state["at"].item() == 9


@pytest.mark.fast
def test_files_that_are_none(tmp_path: Path) -> None:
    program = _compiled()
    _run(program, FRAMES[:2])
    inlay.save_state(program, tmp_path / "s")
    (tmp_path / "half").write_bytes((tmp_path / "s").read_bytes()[:-8])
    (tmp_path / "text").write_text("state")
    for name in ("half", "text", "missing", "."):
        with pytest.raises(UsageError, match="is not a state file"):
            inlay.load_state(program, tmp_path / name)
    assert program.state["at"].item() == 5
    with pytest.raises(InlayError, match=r"cannot be written to .*\. Choose another file"):
        inlay.save_state(program, tmp_path / "no folder" / "s")
    before = (tmp_path / "s").read_bytes()
    (tmp_path / "s").chmod(0o400)
    _run(program, FRAMES[:1])
    inlay.save_state(program, tmp_path / "s")
    assert (tmp_path / "s").read_bytes() != before, "the file is replaced, not written to"


@pytest.mark.fast
def test_what_has_no_state() -> None:
    plain = compile_program(program_of(lambda x: x + 1, [torch.ones(2)]), "eager")
    for owner in (plain, torch.ones(2), {"cache": torch.ones(2)}, None):
        with pytest.raises(UsageError, match=r"owns no state\. Pass a package, program or session"):
            inlay.reset_state(owner)
    with pytest.raises(UsageError, match="owns no state"):
        inlay.save_state(plain, "nowhere")


@pytest.mark.fast
def test_reset_of_tensors_of_the_caller() -> None:
    """Lifted buffers get the values that they have in the model, arguments get zeros, where they are."""
    step = compile_program(_captured(), "eager", lift_mutable_buffers=True)
    state = {"frames": torch.ones(16, 4), "at": torch.tensor([7]), "peak": torch.ones(40)}
    places = [value.data_ptr() for value in state.values()]
    step(FRAMES[0], **state)
    inlay.reset_state(step, state)
    assert (state["at"].item(), state["peak"].max().item(), state["frames"].any().item()) == (3, 0.25, False)
    assert [value.data_ptr() for value in state.values()] == places
    with pytest.raises(UsageError, match=r"The program has no state frame\. Did you mean frames\?"):
        inlay.reset_state(step, {"frame": torch.ones(1)})


_STARTED, _MAY_GO_ON = threading.Event(), threading.Event()


@torch.library.custom_op("inlay_test::wait_in_a_step", mutates_args=())
def _wait(x: torch.Tensor) -> torch.Tensor:
    _STARTED.set()
    assert _MAY_GO_ON.wait(60)
    return x.clone()


@_wait.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Slow(torch.nn.Module):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(_wait(x))
        return x + 1


@pytest.mark.fast
def test_a_running_step_is_not_disturbed(tmp_path: Path) -> None:
    """While a step runs in another thread: no reset, no file, no second step; afterwards all of them."""
    _MAY_GO_ON.set()
    example = Example(Slow(), (torch.ones(2),))
    compiled: CompiledProgram = compile_program(capture(example), "eager")
    executable = compile_lowered(lower(lift_mutated_buffers(capture(example))), "eager")
    for program, call in (
        (compiled, lambda: compiled(torch.ones(2))),
        (executable, lambda: executable({"x": torch.ones(2)})),
    ):
        inlay.save_state(program, tmp_path / "s")
        _STARTED.clear()
        _MAY_GO_ON.clear()
        other = threading.Thread(target=call)
        other.start()
        assert _STARTED.wait(60)
        for use in (
            lambda: inlay.reset_state(program),  # noqa: B023
            lambda: inlay.load_state(program, tmp_path / "s"),  # noqa: B023
            lambda: inlay.save_state(program, tmp_path / "s"),  # noqa: B023
            call,
        ):
            with pytest.raises(UsageError, match="Another thread is using this state"):
                use()
        _MAY_GO_ON.set()
        other.join()
        assert program.state["total"].tolist() == [1, 1]
        inlay.reset_state(program)
        assert program.state["total"].tolist() == [0, 0]


class SlowOutput(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _wait(x) * 2


@pytest.mark.fast
def test_preallocated_outputs_are_for_one_call_at_a_time() -> None:
    """Two calls at once would write to the same memory. Outputs that are not preallocated have their own."""
    _MAY_GO_ON.set()
    program = capture(Example(SlowOutput(), (torch.ones(2),)))
    for preallocate in (True, False):
        step, results = compile_program(program, "eager", preallocate=preallocate), list[Any]()

        def call(step: Any = step, results: list[Any] = results) -> None:
            try:
                results.append(step(torch.ones(2)).tolist())
            except UsageError as error:
                results.append(str(error))
                _STARTED.set()

        _MAY_GO_ON.clear()
        threads = [threading.Thread(target=call) for _ in range(2)]
        for each in threads:
            _STARTED.clear()
            each.start()
            assert _STARTED.wait(60)
        _MAY_GO_ON.set()
        for each in threads:
            each.join()
        first = "Another thread is using this state" if preallocate else "[2.0, 2.0]"
        assert str(results[0]).startswith(first)
        assert results[1] == [2, 2]


@pytest.mark.fast
def test_state_whose_size_the_caller_chooses() -> None:
    """Memory of any size would be the wrong one; state of a fixed size is allocated."""
    fixed = program_of(lambda x, state: state.add_(x), [torch.ones(3), torch.ones(3)])
    axes = {"x": {0: "rows"}, "state": {0: "rows"}}
    free = program_of(lambda x, state: state.add_(x), [torch.ones(3), torch.ones(3)], axes)
    (held,) = compile_lowered(lower(fixed), "eager").new_state().values()
    assert held.shape == (3,)
    for use in (lambda made: made.new_state(), lambda made: made.state):
        with pytest.raises(UsageError, match=r"state is f32\[rows\]: the caller chooses its size\. Pass it"):
            use(compile_lowered(lower(free), "eager"))


def test_sessions(package: Path, tmp_path: Path) -> None:
    """Saved after a prompt; another session goes on with it, and one that is reset begins anew."""
    loaded = load_package(package)
    session, other = Session(loaded), Session(loaded)
    first = session.advance([[5, 6, 7]])
    inlay.save_state(session, tmp_path / "s")
    wanted = session.advance([[9]])
    inlay.load_state(other, tmp_path / "s")
    assert other.lengths == [3]
    assert torch.equal(other.advance([[9]]), wanted)
    inlay.reset_state(other)
    assert other.lengths == [0]
    assert torch.equal(other.advance([[5, 6, 7]]), first)
    with pytest.raises(UsageError, match=r"lengths is i64\[1\] in the file, and i64\[2\] here"):
        inlay.load_state(Session(loaded, 2), tmp_path / "s")


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["StaticCache", "DynamicCache"])
def test_stock_caches(kind: str) -> None:
    """A cache that a stock model filled, reset: the model answers as with a new one, and static tensors stay."""
    import transformers

    from tests.greedy_tokens import stock_model

    model = stock_model("llama")
    more: dict[str, Any] = {"max_cache_len": 16} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **more)
    ids = torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        keys = cache.layers[0].keys
        second = model(ids, past_key_values=cache).logits
        inlay.reset_state(cache)
        assert cache.get_seq_length() == 0
        assert torch.equal(model(ids, past_key_values=cache).logits, first)
    assert not torch.equal(first, second)
    if kind == "StaticCache":
        assert cache.layers[0].keys is keys


@pytest.mark.nightly
def test_a_stock_cache_in_a_package(tmp_path: Path) -> None:
    """A stock decoder whose static cache is buffers: built by the command, saved in mid-stream, reset."""
    from typer.testing import CliRunner

    from inlay.cli.main import app

    made = CliRunner().invoke(app, ["build", "tests.package.stateful_models:stock_cache", "-o", str(tmp_path / "p")])
    assert made.exit_code == 0, made.output
    package, model = load_package(tmp_path / "p"), stock_cache().module

    def advance(count: int) -> list[torch.Tensor]:
        return [package({"input_ids": torch.tensor([[3 + step]])})["output"] for step in range(count)]

    first = advance(4)
    with torch.no_grad():
        for step, scores in enumerate(first):
            torch.testing.assert_close(scores, model(torch.tensor([[3 + step]])), rtol=0, atol=2e-4)
    inlay.save_state(package, tmp_path / "s")
    rest = advance(4)
    inlay.reset_state(package)
    assert all(torch.equal(*each) for each in zip(advance(4), first, strict=True))
    other = load_package(tmp_path / "p")
    inlay.load_state(other, tmp_path / "s")
    package = other
    assert all(torch.equal(*each) for each in zip(advance(4), rest, strict=True))
    assert other.state["count_0"].item() == 8
