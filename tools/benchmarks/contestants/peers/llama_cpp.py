"""llama.cpp as a contestant, with its fastest Python API: `llama_decode`, without sampling and copies of logits."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp as lib
import numpy as np

AT_ONCE = 512


class Contestant:
    """One model with a separate context per use, so that the filled cache of one does not slow down another."""

    version = f"llama-cpp-python {lib.__version__}"

    def __init__(self, model: str, threads: int) -> None:
        lib.llama_log_set(_silent, None)
        lib.llama_backend_init()
        self._threads = threads
        self._model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"it cannot read {model}.")
        vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._tokens = [token % vocabulary for token in range(1, 4097)]
        self._contexts: dict[tuple[int, int], Any] = {}
        self.decode(1, 0)

    def decode(self, tokens: int, context_tokens: int) -> list[float]:
        """Decode single tokens of one sequence after a context."""
        return self.batch(1, tokens, context_tokens)

    def batch(self, sequences: int, tokens: int, context_tokens: int) -> list[float]:
        """Decode single tokens of several sequences in a batch."""
        context = self._empty(sequences, context_tokens + tokens)
        for sequence in range(sequences):
            for at in range(0, context_tokens, AT_ONCE):
                count = min(AT_ONCE, context_tokens - at)
                self._advance(context, [(self._tokens[at + each], at + each, sequence) for each in range(count)])
        return [
            self._advance(context, [(1, context_tokens + step, each) for each in range(sequences)], every=True)
            for step in range(tokens)
        ]

    def prefill(self, tokens: int) -> list[float]:
        """Compute a prompt, including its logits."""
        context = self._empty(1, tokens)
        return [self._advance(context, [(self._tokens[at], at, 0) for at in range(tokens)])]

    def losses(self, tokens: list[int]) -> list[float]:
        """Return the negative log probability of each token but the first."""
        context = self._empty(1, len(tokens))
        self._advance(context, [(token, at, 0) for at, token in enumerate(tokens)], every=True)
        vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        scores = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(tokens), vocabulary))[:-1].astype(np.float64)
        most = scores.max(1)
        found = most + np.log(np.exp(scores - most[:, None]).sum(1)) - scores[np.arange(len(most)), tokens[1:]]
        return [float(each) for each in found]

    def _empty(self, sequences: int, room: int) -> Any:
        key = sequences, -(-room // 256) * 256
        if key not in self._contexts:
            params = lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max = key[0] * key[1], sequences
            params.n_batch = params.n_ubatch = AT_ONCE
            params.n_threads = params.n_threads_batch = self._threads
            self._contexts[key] = lib.llama_init_from_model(self._model, params)
        lib.llama_memory_clear(lib.llama_get_memory(self._contexts[key]), False)
        return self._contexts[key]

    def _advance(self, context: Any, given: list[tuple[int, int, int]], every: bool = False) -> float:
        """Return the seconds for some (token, position, sequence), with logits of the last or of every one."""
        batch = lib.llama_batch_init(len(given), 0, 1)
        for at, (token, position, sequence) in enumerate(given):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = every or at == len(given) - 1
        batch.n_tokens = len(given)
        start = perf_counter()
        failed = lib.llama_decode(context, batch)
        lib.llama_synchronize(context)
        seconds = perf_counter() - start
        lib.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        return seconds


_silent = lib.llama_log_callback(lambda level, text, data: None)


def open_contestant(arguments: dict[str, Any]) -> Contestant:
    """Return the contestant; the benchmark protocol calls this function."""
    model = arguments.get("model")
    if not model or not Path(model).is_file():
        raise SystemExit("it requires a GGUF file; pass it with --model.")
    return Contestant(model, arguments["threads"])
