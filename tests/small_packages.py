"""Packages of small models for tests, and what a model answers without one."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch

from inlay.runtime import Session

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.lowering.executable import Executable

ROOM = 256
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": ROOM,
    "tie_word_embeddings": False,
}


def greedy(executable: Executable, prompts: torch.Tensor, count: int, *, poison: bool = True) -> torch.Tensor:
    """As many tokens a prompt, always the likeliest. The cache starts full of NaN: whoever reads it shows."""
    session = Session(executable, len(prompts))
    if poison:
        for value in session._state.values():
            value.fill_(float("nan"))
    scores = session.advance(prompts)
    found = []
    for _ in range(count):
        assert bool(torch.isfinite(scores).all())
        found.append(scores.argmax(-1, keepdim=True))
        scores = session.advance(found[-1])
    return torch.cat(found, 1)


def eager_greedy(model: Any, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """The same from a stock model that computes everything again at each step."""
    tokens = prompts
    with torch.no_grad():
        for _ in range(count):
            scores = model(tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
    return tokens[:, prompts.shape[1] :]


def check_tokens(executable: Executable, model: Any) -> None:
    """64 tokens, with one prompt and with four, are those of the stock model."""
    for batch in (1, 4):
        prompts = torch.randint(3, 250, (batch, 9), generator=torch.Generator().manual_seed(batch))
        assert torch.equal(greedy(executable, prompts, 64), eager_greedy(model, prompts, 64))


def assert_greedy(model: Any, prompts: torch.Tensor, found: torch.Tensor, bound: float = 0.02) -> None:
    """Each token is the likeliest of a stock model after those before it, unless others are nearly as likely."""
    with torch.no_grad():
        scores = model(torch.cat([prompts, found], 1), use_cache=False).logits[:, prompts.shape[1] - 1 : -1]
    gaps = scores.amax(-1) - scores.gather(-1, found.unsqueeze(-1)).squeeze(-1)
    assert bool((gaps <= bound * (scores.amax(-1) - scores.amin(-1))).all())


def in_new_process(code: str, *args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=600)
