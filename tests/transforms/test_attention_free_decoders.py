"""Decoders that do not attend: what brings positions together has state, and is not built as if it had none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from inlay.errors import ContractError
from inlay.flow import BuildOptions, prepare, transform
from inlay.frontend import Example, capture

pytestmark = pytest.mark.fast


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.scores = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.mix = nn.Conv1d(8, 8, width)
        self.width = width

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        hidden = self.tokens(input_ids)
        if self.width > 1:
            hidden = hidden + self.mix(pad(hidden.transpose(1, 2), (self.width - 1, 0))).transpose(1, 2)
        return {"logits": self.scores(hidden)}


def _example(width: int) -> Example:
    ids = torch.arange(10).reshape(2, 5)
    return Example(_Model(width), (ids,), axes={"input_ids": {0: "batch", 1: "length"}})


def test_a_convolution_is_state() -> None:
    with pytest.raises(ContractError) as refused:
        transform(prepare(capture(_example(4)), BuildOptions()), BuildOptions())
    assert "_Model cannot be built as a decoder: " in str(refused.value)
    reason = "is not known to keep positions independent, and there is no attention to cache (at "
    assert reason in str(refused.value)


def test_as_a_program_of_whole_sequences() -> None:
    options = BuildOptions(settings=("insert_kv_cache.enabled=false",))
    program, _ = transform(prepare(capture(_example(4)), options), options)
    assert not program.bindings.state


def test_each_token_alone_needs_none() -> None:
    program, _ = transform(prepare(capture(_example(1)), BuildOptions()), BuildOptions())
    assert not program.bindings.state
