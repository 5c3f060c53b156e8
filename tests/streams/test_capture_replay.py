"""Capture and replay on a CPU: addresses, allocations, shapes, held outputs, and state that is the caller's.

On a GPU the same is asked of graphs: tests/streams/test_gpu.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.flow import BuildOptions, compile_model
from inlay.lowering.compiled_program import compile_program
from inlay.package.memory_profiler import allocate_paged, profile_memory, record_torch_allocations
from inlay.streams import GraphReplayer
from inlay.testing import program_of
from tests.models import llama_folder
from tests.streams.decode_steps import CACHE, OwnCache, caller_owned, module_owned

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

pytestmark = pytest.mark.fast


def step(given: Mapping[str, Any]) -> dict[str, Any]:
    """Two results, one of them a view of the state."""
    given["state"].add_(given["x"])
    return {"sum": given["state"].sum(-1), "state too": given["state"][:1]}


def captured(rows: int = 2) -> tuple[GraphReplayer, torch.Tensor]:
    state = torch.zeros(rows, 3)
    replays = GraphReplayer(step, {"state": state})
    replays.capture({"x": torch.ones(rows, 3)})
    return replays, state


def test_parity_with_plain_runs() -> None:
    """Many steps, replayed and called: the same numbers and the same state, bit for bit."""
    torch.manual_seed(0)
    replays, state = captured()
    plain = torch.zeros(2, 3)
    for _ in range(20):
        x = torch.randn(2, 3)
        wanted = step({"x": x, "state": plain})
        made = replays({"x": x})
        assert torch.equal(made["sum"], wanted["sum"])
        assert torch.equal(made["state too"], wanted["state too"])
        assert torch.equal(state, plain)
        del made


def test_addresses_stay() -> None:
    replays, state = captured()
    inputs = replays.bucket({"x": torch.ones(2, 3)}).inputs
    places, seen = (inputs["x"].data_ptr(), state.data_ptr()), set()
    for value in range(5):
        made = replays({"x": torch.full((2, 3), float(value))})
        seen.add((made["sum"].data_ptr(), made["state too"].data_ptr()))
        del made
    assert len(seen) == 1
    assert (inputs["x"].data_ptr(), state.data_ptr()) == places
    assert seen.isdisjoint({places})
    assert not seen & {(state.data_ptr(), state.data_ptr())}


def test_capture_leaves_the_state_as_it_was() -> None:
    _, state = captured()
    assert not state.any()


def test_inputs_can_be_written_where_they_are_read() -> None:
    """Who fills the captured input itself copies nothing; who gives another tensor has it copied."""
    replays, state = captured()
    mine = replays.bucket({"x": torch.ones(2, 3)}).inputs["x"]
    mine.fill_(5)
    replays({"x": mine})
    assert state[0, 0] == 5
    other = torch.ones(2, 3)
    replays({"x": other})
    assert mine[0, 0] == 1
    assert state[0, 0] == 6
    replays.bucket({"x": mine})({})
    assert state[0, 0] == 7, "a bucket that is given nothing runs on what is there"


def test_inputs_may_lie_in_the_captured_inputs() -> None:
    """Another look at a captured input, or two of them exchanged, is what it was before anything is copied."""
    replays = GraphReplayer(lambda given: {"y": given["x"] - 2 * given["z"]}, {})
    example = {"x": torch.zeros(2, 2), "z": torch.zeros(2, 2)}
    replays.capture(example)
    mine = replays.bucket(example).inputs
    for make in (lambda: {"x": mine["x"].t(), "z": mine["z"]}, lambda: {"x": mine["z"], "z": mine["x"]}):
        mine["x"].copy_(torch.arange(4.0).view(2, 2))
        mine["z"].copy_(torch.arange(4.0).view(2, 2) * 10)
        given = make()
        wanted = given["x"] - 2 * given["z"]
        assert torch.equal(replays(given)["y"], wanted)


def test_inputs_that_need_gradients_leave_no_trace() -> None:
    replays = GraphReplayer(lambda given: {"y": given["x"] * 2}, {})
    x = torch.ones(2, requires_grad=True)
    replays.capture({"x": x})
    assert replays({"x": x})["y"].tolist() == [2, 2]
    assert not replays.bucket({"x": x}).inputs["x"].requires_grad


@pytest.mark.parametrize("captured_in", [False, True])
@pytest.mark.parametrize("called_in", [False, True])
def test_inference_mode_may_begin_and_end_between_calls(captured_in: bool, called_in: bool) -> None:
    replays = GraphReplayer(lambda given: {"y": given["x"] * 2}, {})
    with torch.inference_mode(captured_in):
        replays.capture({"x": torch.ones(2)})
    with torch.inference_mode(called_in):
        assert replays({"x": torch.full((2,), 3.0)})["y"].tolist() == [6, 6]
    assert replays({"x": torch.full((2,), 4.0)})["y"].tolist() == [8, 8]


def test_a_capture_that_fails_leaves_the_state_as_it_was() -> None:
    def fails(given: Mapping[str, Any]) -> dict[str, Any]:
        given["state"].add_(1)
        raise ValueError("this step fails")

    state = torch.zeros(2)
    with pytest.raises(ValueError, match="this step fails"):
        GraphReplayer(fails, {"state": state}).capture({})
    assert not state.any()


def test_state_is_written_through() -> None:
    """Only the pages of the new row are written, nothing as large as a cache is allocated: no copy, no copy-back."""
    keys, values = allocate_paged(CACHE), allocate_paged(CACHE)
    replays = GraphReplayer(caller_owned, {"keys": keys, "values": values})
    given = {"row": torch.ones(1, CACHE[1], 1, CACHE[3]), "at": torch.tensor([7])}
    replays.capture(given)
    moved = profile_memory(lambda: replays(given), keys)
    assert 0 < moved.written_bytes <= CACHE[1] * 4096
    assert moved.copied_bytes(keys.nbytes) == 0
    assert keys[0, :, 7].eq(1).all()
    assert keys.sum() == CACHE[1] * CACHE[3]


def test_a_replay_allocates_nothing() -> None:
    """Neither inputs nor outputs are allocated anew: what is allocated is what the code itself allocates."""
    total = torch.zeros(3)

    def in_place(given: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": torch.add(given["state"], given["x"], out=given["state"])}

    replays = GraphReplayer(in_place, {"state": total})
    x = torch.ones(3)
    replays.capture({"x": x})
    assert record_torch_allocations(lambda: replays({"x": x})) == []

    replays, state = captured()
    given = {"x": torch.ones(2, 3)}
    bare = record_torch_allocations(lambda: step({**given, "state": state}))
    assert bare
    assert record_torch_allocations(lambda: replays(given)) == bare


@pytest.mark.parametrize("holder", ["tensor", "view", "array", "part of a list"])
def test_a_held_output_is_never_written_over(holder: str) -> None:
    replays, state = captured()
    given = {"x": torch.ones(2, 3)}
    made = replays(given)["sum"]
    hold = {"tensor": made, "view": made[1:].view(1, 1), "array": made.numpy(), "part of a list": [made.unbind()[0]]}
    held: Any = hold[holder]
    del made, hold
    before = str(held)
    with pytest.raises(
        UsageError, match=r"sum of the last replay is still referenced and would be overwritten\. Clone it"
    ):
        replays(given)
    assert str(held) == before
    assert state[0, 0] == 1, "a replay that is refused has done nothing"
    del held
    assert replays(given)["sum"][0] == 6


def test_a_clone_may_be_held() -> None:
    replays, _ = captured()
    held = [replays({"x": torch.ones(2, 3)})["sum"].clone() for _ in range(3)]
    assert [each[0].item() for each in held] == [3, 6, 9]


def test_buckets_have_outputs_of_their_own() -> None:
    """One state, two shapes: what is held of one does not stand in the way of the other."""
    state = torch.zeros(2)
    replays = GraphReplayer(lambda given: {"y": given["state"].add_(given["x"].sum()).clone()}, {"state": state})
    for rows in (1, 4):
        replays.capture({"x": torch.ones(rows)})
    one = replays({"x": torch.ones(1)})["y"]
    four = replays({"x": torch.ones(4)})["y"]
    assert one.tolist() == [1, 1]
    assert four.tolist() == [5, 5]
    with pytest.raises(UsageError, match="still referenced"):
        replays({"x": torch.ones(4)})


def test_no_new_shape() -> None:
    replays, state = captured()
    for wrong in (torch.ones(3, 3), torch.ones(2, 3, dtype=torch.float64), torch.ones(6), 3):
        with pytest.raises(
            UsageError, match=r"No step was captured for x .*\. Capture it first\. Captured so far: x f32\[2, 3\]\."
        ):
            replays({"x": wrong})
    with pytest.raises(UsageError, match="No step was captured for x"):
        replays({"x": torch.ones(2, 3), "y": 1})
    assert not state.any()


def test_a_number_is_part_of_what_is_captured() -> None:
    replays = GraphReplayer(lambda given: {"y": given["x"] * given["by"]}, {})
    replays.capture({"x": torch.ones(2), "by": 3})
    assert replays({"x": torch.ones(2), "by": 3})["y"].tolist() == [3, 3]
    with pytest.raises(
        UsageError, match=r"No step was captured for by 4, x f32\[2\]\. Capture it first\. Captured so far: by 3, x f32"
    ):
        replays({"x": torch.ones(2), "by": 4})
    for alike in (3.0, torch.tensor(3)):
        with pytest.raises(UsageError, match="No step was captured for by"):
            replays({"x": torch.ones(2), "by": alike})


def test_state_at_another_address_is_refused() -> None:
    replays, state = captured()
    given = {"x": torch.ones(2, 3)}
    replays({**given, "state": state})
    with pytest.raises(UsageError, match="address, shape or strides of state have changed"):
        replays({**given, "state": state.clone()})
    with pytest.raises(UsageError, match="address, shape or strides of state have changed"):
        replays({**given, "state": state.view(3, 2)})
    elsewhere: Any = torch.zeros(2, 3)
    state.set_(elsewhere)
    with pytest.raises(UsageError, match="address, shape or strides of state have changed"):
        replays(given)


def test_results_that_cannot_be_replayed() -> None:
    with pytest.raises(UsageError, match="y is not a tensor"):
        GraphReplayer(lambda given: {"y": 3}, {}).capture({"x": torch.ones(1)})
    replays = GraphReplayer(lambda given: {"y": given["x"][: int(given["x"].sum())].clone()}, {})
    replays.capture({"x": torch.ones(4)})
    with pytest.raises(UsageError, match=r"y had the shape \[4\] at capture, but has \[2\] now"):
        replays({"x": torch.full((4,), 0.5)})


def test_caller_owned_and_module_owned_caches() -> None:
    """The same steps, caches given or the module's own: replayed and plain, all the same."""
    torch.manual_seed(0)
    keys, values = torch.zeros(CACHE), torch.zeros(CACHE)
    given_caches = GraphReplayer(caller_owned, {"keys": keys, "values": values})
    module = OwnCache()
    own_caches = GraphReplayer(module_owned(module), {"keys": module.keys, "values": module.values})
    plain = {"keys": torch.zeros(CACHE), "values": torch.zeros(CACHE)}
    example = {"row": torch.ones(1, CACHE[1], 1, CACHE[3]), "at": torch.tensor([0])}
    given_caches.capture(example)
    own_caches.capture(example)
    for at in range(8):
        given = {"row": torch.randn(1, CACHE[1], 1, CACHE[3]), "at": torch.tensor([at])}
        wanted = caller_owned({**given, **plain})["attended"]
        assert torch.equal(given_caches(given)["attended"], wanted)
        assert torch.equal(own_caches(given)["attended"], wanted)
    assert torch.equal(keys, plain["keys"])
    assert torch.equal(module.values, plain["values"])


def test_a_compiled_program_that_owns_its_state() -> None:
    program = program_of(OwnCache(), [torch.ones(1, CACHE[1], 1, CACHE[3]), torch.tensor([0])])
    whole = compile_program(program, "eager")
    held = {row.name: whole.owned_tensors[row.name] for row in whole.bindings.state}
    replays = GraphReplayer(lambda given: {"attended": whole(given["row"], given["at"])}, held)
    module = OwnCache()
    given = {"row": torch.randn(1, CACHE[1], 1, CACHE[3]), "at": torch.tensor([3])}
    replays.capture(given)
    assert torch.equal(replays(given)["attended"], module(given["row"], given["at"]))


def test_decode_buckets_of_a_decoder(tmp_path: Path) -> None:
    """A language model's step at two batch sizes over one cache: the tokens and the cache of plain runs."""
    model = llama_folder(tmp_path / "model", num_hidden_layers=2)
    executable = compile_model(str(model), "eager", BuildOptions(max_length=32, max_batch=2))
    state, plain = executable.new_state(), executable.new_state()
    for caches in (state, plain):
        for value in caches.values():
            value.zero_()
    replays = GraphReplayer(executable, state)
    for batch in (1, 2):
        replays.capture(decode(batch, 0))
    for length in range(6):
        for batch in (1, 2):
            given = decode(batch, length)
            wanted = executable({**given, **plain})["logits"]
            assert torch.equal(replays(given)["logits"], wanted)
    assert all(torch.equal(state[name], plain[name]) for name in state)
    with pytest.raises(UsageError, match=r"No step was captured for input_ids i64\[3, 1\]"):
        replays(decode(3, 0))


def decode(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.full((batch, 1), 3 + length),
        "slots": torch.arange(batch),
        "lengths": torch.full((batch,), length),
    }
