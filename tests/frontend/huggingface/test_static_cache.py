"""Stock decoders with a static cache: the tokens of the model without cache, all caches written in place."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import ModelError, UsageError
from inlay.frontend import capture, open_model, with_static_cache
from inlay.lowering.compiled_program import compile_program
from inlay.lowering.state.buffers import zero_state
from inlay.package.memory_profiler import profile_memory
from inlay.program.bindings import Role
from tests.greedy_tokens import (
    BATCH,
    ROOM,
    START,
    STOCK,
    TOKENS,
    WINDOW,
    WINDOWED,
    decode,
    paged_zeros,
    stock_model,
    without_cache,
)
from tests.models import LLAMA, config_folder, llama_folder, random_model

if TYPE_CHECKING:
    from inlay.lowering.compiled_program import CompiledProgram
    from inlay.program import Program

IN_CI = ("llama", "gemma3_text", "gpt2", "mixtral")
"""One of each kind; the other stock decoders are nightly."""

COMPILED = ("inductor", "aot")


@cache
def _decoding(model_type: str) -> Program:
    return capture(with_static_cache(stock_model(model_type), max_length=ROOM, batch=BATCH))


@cache
def _page() -> dict[str, dict[str, str]]:
    """The table of docs/stock_caches.md: column by column for each architecture."""
    text = (Path(__file__).parents[3] / "docs" / "stock_caches.md").read_text()
    lines = [line for line in text.partition("## Measured")[2].splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def _told(model_type: str, column: str, backend: str = "") -> str:
    """A cell of the table; of a column that has a part for each backend, this backend's."""
    (title,) = [each for each in _page()[model_type] if each.startswith(column)]
    cell = _page()[model_type][title]
    return cell.split(", ")[("eager", *COMPILED).index(backend)] if backend else cell


@pytest.mark.fast
def test_the_page_is_about_what_is_tested() -> None:
    assert tuple(_page()) == STOCK


def _check_tokens(step: CompiledProgram, caches: dict[str, torch.Tensor], model_type: str) -> None:
    tokens, logits = without_cache(stock_model(model_type), START)
    found, made = decode(step, caches, START)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(made, logits, rtol=0, atol=2e-4)
    assert _told(model_type, "tokens equal", step.backend) == "yes"
    # Rounding is another one on another processor: the page gives its size.
    assert (made - logits).abs().max() < 10 * float(_told(model_type, "off", step.backend))
    assert len(set(tokens[0].tolist())) > 3, "the stream says the same thing again and again, and proves little"
    assert caches["count_0"] == caches["count_1"] == TOKENS


def _check_in_place(step: CompiledProgram, caches: dict[str, torch.Tensor], model_type: str) -> None:
    states = {state.binding.target: state for state in step.states}
    assert set(states) == {f"{what}_{layer}" for what in ("key", "value", "count") for layer in range(2)}
    assert {state.reason for state in step.states} == {""}
    assert not step.remarks
    assert _told(model_type, "states in place") == f"{len(states)} of {len(states)}"
    for name in ("key_1", "value_0"):
        size = caches[name].numel() * caches[name].element_size()
        moved = profile_memory(lambda: step(START, **caches), caches[name])
        assert _told(model_type, "written of a cache") == f"{moved.written_bytes // 1024} of {size // 1024} KiB"
        # Larger blocks exist: heads that are repeated for grouped queries. A copy is as large as what it copies.
        copied = [each for each in moved.allocation_sizes if each == size]
        assert _told(model_type, "copied") == str(len(copied)) == "0"


def _check(model_type: str, backend: str) -> None:
    step = compile_program(_decoding(model_type), backend)
    caches = paged_zeros(step.bindings)
    places = {name: value.data_ptr() for name, value in caches.items()}
    _check_tokens(step, caches, model_type)
    _check_in_place(step, caches, model_type)
    assert places == {name: value.data_ptr() for name, value in caches.items()}


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=() if each in IN_CI else pytest.mark.nightly) for each in STOCK],
)
def test_eager(model_type: str) -> None:
    _check(model_type, "eager")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["gemma3_text"])
def test_inductor(model_type: str) -> None:
    _check(model_type, "inductor")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [each for each in STOCK if each != "gemma3_text"])
def test_inductor_others(model_type: str) -> None:
    _check(model_type, "inductor")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", STOCK)
def test_aot(model_type: str) -> None:
    _check(model_type, "aot")


def test_copies_are_seen() -> None:
    """What the other tests rule out is what happens when the functional program is run as it is."""
    program = _decoding("gpt2")
    module, caches = program.module(), paged_zeros(program.bindings)
    size = caches["key_1"].numel() * 4
    with torch.no_grad():
        moved = profile_memory(lambda: module(START, **caches), caches["key_1"])
    assert moved.written_bytes == size
    assert moved.allocation_sizes.count(size) >= 4


@pytest.mark.parametrize("model_type", WINDOWED)
def test_streams_cross_the_window(model_type: str) -> None:
    """Without its window a model says something else: streams of this length are a test of it."""
    model, unlimited = stock_model(model_type), stock_model(model_type, sliding_window=4 * TOKENS)
    assert model.config.sliding_window == WINDOW
    tokens, _ = without_cache(model, START)
    with torch.no_grad():
        logits, others = (each(input_ids=tokens, use_cache=False).logits for each in (model, unlimited))
    differs = (logits - others).abs().amax((0, 2)) > 1e-3
    assert differs.tolist() == [False] * WINDOW + [True] * (TOKENS - WINDOW)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "opt"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_prompt_and_decoding_share_caches(model_type: str, backend: str) -> None:
    """A prompt longer than the window in two parts of different length, then tokens one by one."""
    model = stock_model(model_type)
    prompt = torch.randint(0, 250, (BATCH, WINDOW + 9), generator=torch.Generator().manual_seed(1))
    tokens, logits = without_cache(model, prompt, 24)
    reading = capture(with_static_cache(model, max_length=ROOM, batch=BATCH, length=None))
    assert reading.bindings["input_ids"].shape == (BATCH, "length")
    read, step = compile_program(reading, backend), compile_program(_decoding(model_type), backend)
    caches = zero_state(read.bindings)
    assert {name: value.shape for name, value in zero_state(step.bindings).items()} == {
        name: value.shape for name, value in caches.items()
    }
    assert all(state.is_eligible for state in read.states)
    read(prompt[:, :4].contiguous(), **caches)
    last = read(prompt[:, 4:].contiguous(), **caches)[:, -1]
    torch.testing.assert_close(last, logits[:, 0], rtol=0, atol=2e-4)
    found, _ = decode(step, caches, last.argmax(-1, keepdim=True), 23)
    assert torch.equal(found, tokens[:, 1:])


def test_caches_are_the_callers() -> None:
    """Two streams through one step do not know of each other; zeroed caches begin anew."""
    step = compile_program(_decoding("llama"), "eager")
    one, two = zero_state(step.bindings), zero_state(step.bindings)
    first = decode(step, one, START, 8)
    decode(step, two, START.flip(0).contiguous(), 3)
    again = decode(step, one, first[0][:, -1:], 3)
    other = zero_state(step.bindings)
    whole = decode(step, other, START, 11)
    assert torch.equal(torch.cat([first[0], again[0]], 1), whole[0])
    for value in other.values():
        value.zero_()
    assert torch.equal(decode(step, other, START, 11)[1], whole[1])


@pytest.mark.parametrize("backend", ["eager", *COMPILED])
def test_full_caches_are_not_written_beyond(backend: str) -> None:
    step = compile_program(_decoding("gpt2"), backend)
    caches = zero_state(step.bindings)
    for name in ("count_0", "count_1"):
        caches[name].fill_(ROOM - 1)
    step(START, **caches)
    assert caches["count_0"] == ROOM
    before = caches["key_0"].clone()
    with pytest.raises((IndexError, RuntimeError)):
        step(START, **caches)
    assert torch.equal(caches["key_0"], before)


def test_without_weights_in_memory(tmp_path: Path) -> None:
    """A folder: captured without loading a weight, then run with them."""
    folder = llama_folder(tmp_path / "model")
    found = with_static_cache(open_model(str(folder)), max_length=32)
    program = capture(found)
    assert all(row.name in program.tensors for row in program.bindings.with_role(Role.PARAMETER))
    assert program.facts.heads is not None
    assert program.facts.heads.value == 4
    step = compile_program(program, "eager")
    tokens, _ = without_cache(random_model(LLAMA), START[:1], 8)
    assert torch.equal(decode(step, zero_state(step.bindings), START[:1], 8)[0], tokens)


def test_half_precision() -> None:
    """Caches have the type the model computes in."""
    found = with_static_cache(random_model(LLAMA).to(torch.bfloat16), max_length=32)
    program = capture(found)
    assert program.bindings["key_0"].type_text == "bf16[1, 2, 32, 8]"
    assert all(state.is_eligible for state in compile_program(program, "eager").states)


def _refused(change: Any, **sizes: Any) -> None:
    model = random_model(LLAMA)
    change(model)
    with_static_cache(model, **{"max_length": 32, **sizes})


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"max_length": 129}, "max_length is 129, but LlamaForCausalLM supports 128 positions. Choose at most 128."),
        ({"max_length": 4, "length": 5}, "max_length is 4, but one step has 5 tokens."),
        ({"max_length": 1, "length": None}, "max_length is 1, but one step has 2 tokens."),
        ({"batch": 0}, "batch is 0, but must be at least 1."),
        ({"length": 0}, "length is 0, but must be at least 1. Pass None for any length."),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        _refused(lambda model: None, **sizes)


@pytest.mark.fast
def test_models_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="A Linear is not a causal language model of transformers"):
        with_static_cache(torch.nn.Linear(2, 2), max_length=8)
    with pytest.raises(ModelError, match="uses flex_attention attention, which takes no mask tensor"):
        _refused(lambda model: model.set_attn_implementation("flex_attention"))
    layers = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
    folder = config_folder(tmp_path, model_type="lfm2", architectures=["Lfm2ForCausalLM"], **layers)
    with pytest.raises(ModelError, match="Layer 0 of Lfm2ForCausalLM stores its state in a LinearAttentionLayer"):
        with_static_cache(open_model(str(folder)), max_length=8)
    with pytest.raises(ModelError, match="Layer 1 of LlamaForCausalLM never wrote to its cache"):
        _refused(lambda model: model.model.layers.pop(-1))
