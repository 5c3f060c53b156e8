"""Stock decoders that are given a cache: the tokens of transformers, however sequences are cut, placed and batched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.config import resolve_config
from inlay.errors import ContractError
from inlay.frontend import capture
from inlay.program.text.parser import parse
from inlay.program.text.printer import dump
from inlay.transforms.pass_manager import configure, run
from tests.architectures import ARCHITECTURES
from tests.decoders import Parts
from tests.greedy_tokens import stock_model, without_cache

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CHOSEN = ("mistral", "gemma2", "bloom")
REFUSED = {
    "lfm2": r"aten\.conv1d\.\w+ is not known to keep positions independent",
}
"""A convolution over positions: what is refused, and what for."""
OTHERS = [each.model_type for each in ARCHITECTURES if each.model_type not in (*CHOSEN, *REFUSED)]
LAYERS = {"smollm3": 4, "deepseek_v3": 3, "glm4_moe": 3, "lfm2": 6}
ROOM, SLOTS, WINDOW, TOKENS = 96, 4, 16, 64


def _with_cache(folder: Path, model_type: str, room: int = ROOM, max_prefill: int = 0) -> tuple[Any, Parts]:
    """The model, and the same with a cache that was inserted."""
    model = stock_model(model_type, num_hidden_layers=LAYERS.get(model_type, 2), max_position_embeddings=512)
    model.save_pretrained(folder)
    options = ("enabled=true", f"max_length={room}", f"max_batch={SLOTS}", f"max_prefill={max_prefill}")
    program, records = run(
        capture(str(folder)), configure(resolve_config(settings=[f"insert_kv_cache.{o}" for o in options]))
    )
    assert next(each.sites for each in records if each.key == "insert_kv_cache") == LAYERS.get(model_type, 2)
    parts = Parts(program)
    assert all(state.is_eligible for state in parts.step.states)
    assert not parts.step.remarks
    return model, parts


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


def _prompt(*shape: int) -> Tensor:
    return torch.randint(3, 250, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _check_tokens(model: Any, parts: Parts) -> None:
    """One sequence, then four at once, beyond the window where there is one."""
    for slots in ([2], [3, 1, 0, 2]):
        parts.forget()
        prompt = _prompt(len(slots), 5)
        tokens, logits = without_cache(model, prompt, TOKENS)
        assert len(set(tokens[0].tolist())) > 3, "the stream says the same thing again and again, and proves little"
        assert prompt.shape[1] + TOKENS > WINDOW
        given, made = prompt, []
        for _ in range(TOKENS):
            made.append(parts(slots, input_ids=given).logits[:, -1])
            given = made[-1].argmax(-1, keepdim=True)
        _close(torch.stack(made, 1), logits)
        assert torch.equal(torch.stack(made, 1).argmax(-1), tokens)


def _check_ragged(model: Any, parts: Parts) -> None:
    """Prompts of several lengths, one of them in parts; then tokens together, in another order at each step."""
    parts.forget()
    rows = {2: _prompt(1, 19), 0: _prompt(1, 7), 3: _prompt(1, 12)}
    with torch.no_grad():
        whole = model(input_ids=rows[2], use_cache=False).logits
    _close(torch.cat([parts([2], input_ids=part).logits for part in rows[2].split([4, 1, 14], 1)], 1), whole)
    assert parts.filled[2] > WINDOW
    parts([0], input_ids=rows[0][:, :5])
    parts([3], input_ids=rows[3][:, :10])
    parts([3, 0], input_ids=torch.cat([rows[3][:, 10:], rows[0][:, 5:]]))
    for slots in ([2, 0, 3], [3, 2, 0], [0, 3], [0, 2, 3]):
        new = torch.tensor([[slot * 31 + parts.filled[slot]] for slot in slots])
        found = parts(slots, input_ids=new).logits
        for row, slot in enumerate(slots):
            rows[slot] = torch.cat([rows[slot], new[row : row + 1]], 1)
            with torch.no_grad():
                _close(found[row, -1], model(input_ids=rows[slot], use_cache=False).logits[0, -1])
    for cache in parts.caches.values():
        assert cache[1].isnan().all(), "a slot of nobody was written to"
        assert all(cache[slot, :, rows[slot].shape[1] :].isnan().all() for slot in rows)


def _check(folder: Path, model_type: str) -> None:
    model, parts = _with_cache(folder, model_type)
    _check_tokens(model, parts)
    _check_ragged(model, parts)


@pytest.mark.parametrize("model_type", CHOSEN)
def test_stock_decoders(tmp_path: Path, model_type: str) -> None:
    _check(tmp_path, model_type)


@pytest.mark.parametrize(
    ("model_type", "rooms"),
    [("gemma2", [64, 250]), pytest.param("mistral", [64, 64], marks=pytest.mark.nightly)],
)
def test_rings(tmp_path: Path, model_type: str, rooms: list[int]) -> None:
    """Slots of a window of 16 rows and a call, and sequences that go through them several times."""
    model, parts = _with_cache(tmp_path, model_type, room=250, max_prefill=9)
    assert [cache.shape[2] for cache in list(parts.caches.values())[::2]] == rooms
    assert next(each.high for each in parts.program.symbols.values() if each.name == "length") == 9
    rows = {2: _prompt(1, 27), 0: _prompt(1, 80)}
    found = {
        slot: [parts([slot], input_ids=part).logits for part in prompt.split(9, 1)] for slot, prompt in rows.items()
    }
    for _ in range(150):
        new = torch.cat([found[slot][-1][:, -1:].argmax(-1) for slot in rows])
        logits = parts(list(rows), input_ids=new).logits
        for row, slot in enumerate(rows):
            rows[slot] = torch.cat([rows[slot], new[row : row + 1]], 1)
            found[slot].append(logits[row : row + 1])
    for slot, tokens in rows.items():
        with torch.no_grad():
            expected = model(input_ids=tokens, use_cache=False).logits
        _close(torch.cat(found[slot], 1), expected)
        assert torch.equal(expected[:, -151:-1].argmax(-1), tokens[:, -150:])
        assert len(set(tokens[0, -150:].tolist())) > 3


def test_rings_that_save_nothing(tmp_path: Path) -> None:
    """Where a window and a call need as many rows as the longest sequence has, the program is as without rings."""
    stock_model("mistral").save_pretrained(tmp_path)
    captured = capture(str(tmp_path))
    settings = [f"insert_kv_cache.{each}" for each in ("enabled=true", f"max_length={ROOM}", f"max_batch={SLOTS}")]
    plain, with_rings, same = (
        dump(run(captured, configure(resolve_config(settings=[*settings, f"insert_kv_cache.max_prefill={most}"])))[0])
        for most in (0, 33, 65)
    )
    assert plain == same
    assert dump(parse(with_rings)) == with_rings
    assert parse(with_rings).bindings["lengths"].below == ROOM


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", OTHERS)
def test_other_stock_decoders(tmp_path: Path, model_type: str) -> None:
    _check(tmp_path, model_type)


def test_a_slot_is_used_again(tmp_path: Path) -> None:
    """Rows of a longer sequence that was there before are never read: NaN or large, the result is the same."""
    model, parts = _with_cache(tmp_path, "mistral")
    parts([1], input_ids=_prompt(1, 40))
    parts.filled[1] = 0
    with torch.no_grad():
        expected = model(input_ids=_prompt(1, 9), use_cache=False).logits
    _close(parts([1], input_ids=_prompt(1, 9)).logits, expected)


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(ContractError, match=REFUSED[model_type]):
        _with_cache(tmp_path, model_type)
