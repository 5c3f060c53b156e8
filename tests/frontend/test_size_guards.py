"""A program is the model at every size it claims: what was assumed of sizes holds there, or the model is refused."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from inlay import Example
from inlay.errors import CaptureError
from inlay.frontend import SourceModel, capture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inlay.program import Program

AXES = {"x": {0: "batch", 1: "length"}}


class _Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _captured(function: Callable[[Tensor], Tensor], limit: int | None = 1000) -> Program:
    example = Example(_Calls(function), (torch.randn(2, 8, 4),), axes=AXES)
    return capture(SourceModel("it", "module", example, {}, max_sizes={"length": limit} if limit else {}))


def _in_chunks(x: Tensor) -> Tensor:
    """What a gated delta rule does: a state that goes from chunk to chunk."""
    rows = pad(x, (0, 0, 0, (64 - x.shape[1] % 64) % 64))
    state, out = torch.zeros_like(x[:, 0]), []
    for chunk in range(rows.shape[1] // 64):
        part = rows[:, 64 * chunk : 64 * chunk + 64]
        out.append(part + state.unsqueeze(1))
        state = state + part.sum(1)
    return torch.cat(out, 1)[:, : x.shape[1]]


def _by_halves(x: Tensor) -> Tensor:
    steps = x.shape[1]
    while steps > 4:
        x, steps = x * 0.5, steps // 2
    return x


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a loop over chunks": (_in_chunks, "which is false for length 65"),
    "a loop over halves": (_by_halves, "which is false for length"),
    "a branch": (lambda x: x * 2 if x.shape[1] > 300 else x, "which is false for length 301"),
    "a branch on a multiple": (lambda x: x if x.shape[1] % 4 else x * 2, "which is false for length"),
    "a number that was baked in": (lambda x: x * int(x.shape[1] / 3), "which is false for length"),
    "a branch on both": (
        lambda x: x * 2 if x.shape[0] * x.shape[1] > 100 else x,
        "that requires batch*length <= 100",
    ),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", REFUSED)
def test_another_program_for_other_sizes(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(CaptureError) as refused:
        _captured(function)
    sentence = str(refused.value)
    assert sentence.startswith("it is not the same program for all sizes: traced with ")
    assert "its code takes a path at test_size_guards.py:" in sentence
    assert said in sentence


@pytest.mark.fast
def test_parts_that_are_equal_for_multiples_alone() -> None:
    """torch's own code asks whether four divides the length, and cuts in another way where it does not."""
    with pytest.raises(CaptureError, match="is not the same program for all sizes"):
        _captured(lambda x: torch.cat([part * 2 for part in x.tensor_split(4, 1)], 1))


HOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded to chunks": lambda x: pad(x, (0, 0, 0, (64 - x.shape[1] % 64) % 64)).reshape(x.shape[0], -1, 64, 4).sum(1),
    "a row of positions": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1),
    "a window": lambda x: x[:, -16:],
    "a branch that is decided": lambda x: x if x.shape[1] >= 1 else x * 2,
    "tokens in a row": lambda x: x.reshape(-1, 4).softmax(-1).view(x.shape),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", HOLDS)
def test_the_same_program_for_all_sizes(name: str) -> None:
    program = _captured(HOLDS[name])
    module = program.module()
    for shape in ((2, 8, 4), (3, 64, 4), (2, 65, 4), (5, 999, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), HOLDS[name](x))


@pytest.mark.fast
def test_multiples() -> None:
    """A reshape that other sizes are an error in, as they are in the model."""
    program = _captured(lambda x: x.reshape(x.shape[0], x.shape[1] // 4, 16).sum(2))
    x = torch.randn(3, 40, 4)
    torch.testing.assert_close(program.module()(x), x.reshape(3, 10, 16).sum(2))
    with pytest.raises((RuntimeError, AssertionError)):
        program.module()(x[:, :38])


@pytest.mark.fast
def test_one_is_a_size_of_its_own() -> None:
    """A module that asks for it is captured from 2 on."""
    alone = _captured(lambda x: x * 2 if x.shape[1] == 1 else x)
    assert {symbol.name: symbol.low for symbol in alone.symbols.values()} == {"batch": 1, "length": 2}


TABLE = torch.randn(32, 4)


def _times(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x * 2
    return x


RANGES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a branch": (lambda x: x * 2 if x.shape[1] > 300 else x, 300),
    "a loop over chunks": (_in_chunks, 64),
    "a table of positions": (lambda x: x + TABLE[: x.shape[1]], 32),
    "a loop over chunks, rounded up": (lambda x: _times(x, math.ceil(x.shape[1] / 128)), 128),
    "a number that was baked in": (lambda x: x * (1 + int(x.shape[1] / 200)), 199),
}


@pytest.mark.fast
def test_the_lower_end_of_a_range() -> None:
    """What is another program for small sizes is captured for the larger ones, and runs no smaller."""
    program = _captured(lambda x: x * 2 if x.shape[1] < 5 else x, limit=None)
    assert {symbol.name: (symbol.low, symbol.high) for symbol in program.symbols.values()}["length"] == (5, None)
    module, x = program.module(), torch.randn(3, 5, 4)
    assert torch.equal(module(x), x)
    with pytest.raises(RuntimeError):
        module(x[:, 1:])


@pytest.mark.fast
@pytest.mark.parametrize("name", RANGES)
def test_the_range_of_a_module(name: str) -> None:
    """A module that does not say how far it goes is captured as far as it is one program, and runs no further."""
    function, high = RANGES[name]
    program = _captured(function, limit=None)
    assert {symbol.name: symbol.high for symbol in program.symbols.values()} == {"batch": None, "length": high}
    module, x = program.module(), torch.randn(3, high + 1, 4)
    torch.testing.assert_close(module(x[:, :-1]), function(x[:, :-1]))
    with pytest.raises(RuntimeError):
        module(x)


QWEN3_5: dict[str, Any] = {
    **{"model_type": "qwen3_5_text", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32},
    **{"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.nightly
def test_gated_delta_rule(tmp_path: Path) -> None:
    """Qwen3.5 loops over chunks of 64 positions: lengths to 64 agree, every position beyond would be wrong."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    with pytest.raises(CaptureError) as refused:
        capture(str(tmp_path))
    assert "its code takes a path at modeling_qwen3_5.py:" in str(refused.value)
    assert "//64), 1), which is false for length 65" in str(refused.value)


ROWS = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))


def _rows_of_a_table(x: Tensor) -> Tensor:
    return x + ROWS[: x.shape[1]]


def _other_at_the_limit(x: Tensor) -> Tensor:
    made = _rows_of_a_table(x)
    return made * 2 if x.shape[1] < 300 else made


def test_a_table_with_as_many_rows_as_the_limit() -> None:
    """What torch compares while it checks `length == min(300, length)` assumes nothing; the same in the model does."""
    program = _captured(_rows_of_a_table, 300)
    assert {each.name: each.high for each in program.symbols.values()}["length"] == 300
    with pytest.raises(CaptureError, match="which is false for length 301"):
        _captured(_rows_of_a_table)
    with pytest.raises(CaptureError, match="requires length < 300, which is false for length 300"):
        _captured(_other_at_the_limit, 300)
