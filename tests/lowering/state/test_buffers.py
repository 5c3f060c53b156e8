"""Programs that own their caches: streamed, saved, loaded in another process, streamed on."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from inlay.errors import UsageError
from inlay.frontend import Example, capture, with_static_cache
from inlay.lowering.state.buffers import (
    drop_overwritten_buffers,
    inline_lifted_buffers,
    lift_mutated_buffers,
    zero_state,
)
from inlay.program.bindings import Role
from tests.greedy_tokens import START, stock_model, without_cache

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program import Program

LENGTHS = {"input_ids": {0: "batch", 1: "length"}}
BEFORE, AFTER = 7, 25
"""Tokens streamed before and after saving: the window of 16 is crossed in the other process."""

STREAM_ON = """
import json, sys, torch
module = torch.export.load(sys.argv[1]).module()
token, logits = torch.tensor(json.loads(sys.argv[2])), []
with torch.no_grad():
    for _ in range(int(sys.argv[3])):
        logits.append(module(token)[:, -1])
        token = logits[-1].argmax(-1, keepdim=True)
torch.save((torch.stack(logits, 1), module.count_0), sys.argv[4])
assert not {"inlay", "transformers"} & set(sys.modules)
"""


class Owner(torch.nn.Module):
    """A module with the caches of a stock model as buffers of its own."""

    def __init__(self, step: Example) -> None:
        super().__init__()
        self.step, self.names = step.module, list(step.kwargs)
        for name, value in step.kwargs.items():
            self.register_buffer(name, value.clone())

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.step(input_ids, **{name: getattr(self, name) for name in self.names})
        return logits


def _program(model_type: str, owner: str) -> Program:
    step = with_static_cache(stock_model(model_type), max_length=64, batch=2)
    if owner == "module":
        return capture(Example(Owner(step.example), step.example.args))
    program = capture(step)
    return inline_lifted_buffers(program, zero_state(program.bindings))


@pytest.mark.parametrize("owner", ["module", "program"])
@pytest.mark.parametrize("model_type", ["llama", pytest.param("gemma3_text", marks=pytest.mark.nightly)])
def test_stream_goes_on_in_another_process(model_type: str, owner: str, tmp_path: Path) -> None:
    tokens, logits = without_cache(stock_model(model_type), START, BEFORE + AFTER)
    program = _program(model_type, owner)
    assert {row.role for row in program.bindings.state} == {Role.BUFFER}
    assert len(program.bindings.state) == 6
    exported = program.to_exported()
    module, token = exported.module(), START
    with torch.no_grad():
        for step in range(BEFORE):
            made = module(token)[:, -1]
            torch.testing.assert_close(made, logits[:, step], rtol=0, atol=2e-4)
            token = made.argmax(-1, keepdim=True)
    saved, results = tmp_path / "stream.pt2", tmp_path / "logits.pt"
    torch.export.save(exported, saved)
    arguments = [str(saved), json.dumps(token.tolist()), str(AFTER), str(results)]
    subprocess.run([sys.executable, "-c", STREAM_ON, *arguments], check=True, capture_output=True, text=True)
    after, count = torch.load(results)
    assert count == BEFORE + AFTER
    assert torch.equal(after.argmax(-1), tokens[:, BEFORE:])
    torch.testing.assert_close(after, logits[:, BEFORE:], rtol=0, atol=2e-4)


def test_a_program_owns_what_it_was_given() -> None:
    """The state of a stream becomes a program's own; the caller's tensors are copied, not taken."""
    program = capture(with_static_cache(stock_model("gpt2"), max_length=32, batch=2))
    caches = zero_state(program.bindings)
    module = program.module()
    with torch.no_grad():
        module(START, **caches)
        owned = inline_lifted_buffers(program, caches).module()
        assert torch.equal(owned(START), module(START, **caches))
        owned(START)
    assert caches["count_0"] == 2
    lifted = lift_mutated_buffers(inline_lifted_buffers(program, caches))
    assert {row.target for row in lifted.bindings.with_role(Role.INPUT)} == {"input_ids", *caches}
    with pytest.raises(UsageError, match=r"The program has no argument key_9. Did you mean key_1\?"):
        inline_lifted_buffers(program, {"key_9": caches["key_0"]})
    with pytest.raises(UsageError, match=r"count_0 must be i64\[\]; got f32\[2\]."):
        inline_lifted_buffers(program, {"count_0": torch.ones(2)})


class _Overwriting(torch.nn.Module):
    """A causal decoder with a buffer that each call overwrites, as rotary embeddings keep their frequencies."""

    frequencies: torch.Tensor

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(4))
        self.reads = reads

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.one_hot(input_ids, 8).float().view(*input_ids.shape, 2, 4).transpose(1, 2)
        if self.reads:
            hidden = hidden * self.frequencies
        self.frequencies.copy_(torch.arange(4).float() + 1)
        hidden = hidden * self.frequencies
        return {"logits": torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)}


@pytest.mark.parametrize("reads", [False, True])
def test_what_each_call_overwrites_is_no_state_of_a_decoder(reads: bool) -> None:
    example = Example(_Overwriting(reads=reads), (), {"input_ids": torch.ones(2, 5, dtype=torch.int64)}, LENGTHS)
    program = capture(example)
    assert {row.role for row in program.bindings.state} == {Role.BUFFER}
    kept = drop_overwritten_buffers(program)
    assert [row.target for row in kept.bindings.state] == ["frequencies"] * reads
    ids = torch.randint(0, 8, (3, 9))
    assert torch.equal(kept.module()(input_ids=ids)["logits"], program.module()(input_ids=ids)["logits"])
    assert len(program.bindings.state) == 1, "the given program is unchanged"


class Counting(torch.nn.Module):
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(x)
        return x * 2


def test_an_overwritten_buffer_of_another_module_stays() -> None:
    """Its owner may read what the last call left."""
    program = capture(Example(Counting(), (torch.ones(3),)))
    assert drop_overwritten_buffers(program) is program
