"""Hugging Face transformers as contestants: eager, and StaticCache + torch.compile, in two number formats."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

VARIANTS = ("eager-fp32", "eager-bf16", "compiled-fp32", "compiled-bf16")
OPTIONS: dict[str, Any] = {"freezing": True, "cpp_wrapper": True}
"""Inductor options for the fastest code on a CPU."""
SINGLE = "Only decode of one sequence is compiled, because each size takes minutes to compile."


class Eager:
    """An eager model with a growing cache."""

    version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def __init__(self, model: Any) -> None:
        self._model = model
        self._step(DynamicCache(config=model.config), torch.ones(1, 1, dtype=torch.int64), 0)

    def decode(self, tokens: int, context_tokens: int) -> list[float]:
        """Decode single tokens of one sequence after a context."""
        return self.batch(1, tokens, context_tokens)

    def batch(self, sequences: int, tokens: int, context_tokens: int) -> list[float]:
        """Decode single tokens of several sequences in a batch."""
        cache = DynamicCache(config=self._model.config)
        self._step(cache, self._prompt(sequences, context_tokens), 0)
        return [self._step(cache, self._prompt(sequences, 1), context_tokens + each) for each in range(tokens)]

    def prefill(self, tokens: int) -> list[float]:
        """Compute a prompt, including its logits."""
        return [self._step(DynamicCache(config=self._model.config), self._prompt(1, tokens), 0)]

    def _prompt(self, sequences: int, length: int) -> torch.Tensor:
        return torch.arange(length).expand(sequences, -1) % self._model.config.vocab_size

    def _step(self, cache: Any, tokens: torch.Tensor, at: int, forward: Any = None) -> float:
        positions = torch.arange(at, at + tokens.shape[1]).unsqueeze(0)
        start = perf_counter()
        (forward or self._model)(
            input_ids=tokens, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
        )
        return perf_counter() - start


class Compiled(Eager):
    """A model with a static cache and compiled decode; prompts run eagerly and are not timed."""

    def __init__(self, model: Any, room: int) -> None:
        self._room = room
        self._caches: dict[int, Any] = {}
        super().__init__(model)
        self._forward = torch.compile(model.forward, dynamic=False, options=OPTIONS)
        self.decode(2, 1)

    def batch(self, sequences: int, tokens: int, context_tokens: int) -> Any:
        """Decode single tokens of one sequence."""
        if sequences != 1:
            return SINGLE
        cache = self._caches.setdefault(sequences, StaticCache(config=self._model.config, max_cache_len=self._room))
        cache.reset()
        self._step(cache, self._prompt(1, context_tokens), 0)
        return [self._step(cache, self._prompt(1, 1), context_tokens + each, self._forward) for each in range(tokens)]

    def prefill(self, tokens: int) -> Any:
        """Not compiled."""
        return SINGLE


def open_contestant(arguments: dict[str, Any]) -> Eager:
    """Return the contestant; the benchmark protocol calls this function."""
    if not arguments.get("model"):
        raise SystemExit("it requires a GGUF file or a folder; pass it with --model.")
    torch.set_num_threads(arguments["threads"])
    torch.set_grad_enabled(False)
    how, _, number = arguments["variant"].partition("-")
    path = Path(arguments["model"])
    where = {"gguf_file": path.name} if path.is_file() else {}
    dtype = torch.bfloat16 if number == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path.parent if where else path, dtype=dtype, **where).eval()
    return Compiled(model, arguments["room"]) if how == "compiled" else Eager(model)
