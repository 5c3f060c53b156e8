"""Greedy tokens: what a stock model says without any cache, and what a compiled step says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.lowering.state.buffers import zero_state
from inlay.package.memory_profiler import allocate_paged
from tests.architectures import ARCHITECTURES
from tests.models import random_model

if TYPE_CHECKING:
    from inlay.lowering.compiled_program import CompiledProgram
    from inlay.program.bindings import Bindings

STOCK = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "mixtral")
WINDOWED = ("mistral", "gemma3_text", "phi3")
ROOM, TOKENS, WINDOW, BATCH = 256, 64, 16, 2
START = torch.tensor([[5], [9]])


def stock_model(model_type: str, **changes: Any) -> Any:
    """A small stock model of two layers whose words depend on what came before: weights are large and not tied."""
    found = next(each for each in ARCHITECTURES if each.model_type == model_type)
    config: dict[str, Any] = {"num_hidden_layers": 2, "initializer_range": 0.2, "tie_word_embeddings": False}
    if model_type == "gemma3_text":
        config["layer_types"] = ["sliding_attention", "full_attention"]
    return random_model(found.full_config() | {"model_type": model_type} | config | changes)


def without_cache(model: Any, prompt: torch.Tensor, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and the logits they were chosen by; everything is computed anew for every token."""
    logits = []
    with torch.no_grad():
        for _ in range(tokens):
            logits.append(model(input_ids=prompt, use_cache=False).logits[:, -1])
            prompt = torch.cat([prompt, logits[-1].argmax(-1, keepdim=True)], 1)
    return prompt[:, -tokens:], torch.stack(logits, 1)


def decode(
    step: CompiledProgram, caches: dict[str, torch.Tensor], token: torch.Tensor, tokens: int = TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from a compiled step."""
    logits = []
    for _ in range(tokens):
        logits.append(step(token, **caches)[:, -1].clone())
        token = logits[-1].argmax(-1, keepdim=True)
    made = torch.stack(logits, 1)
    return made.argmax(-1), made


def paged_zeros(bindings: Bindings) -> dict[str, torch.Tensor]:
    """Caches that can be watched; a counter is too small for pages of its own."""
    made = zero_state(bindings)
    return {name: allocate_paged(value.shape, value.dtype) if value.dim() else value for name, value in made.items()}
