"""Sessions: sequences on a compiled decoder without an engine, each in a slot of one KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inlay.errors import UsageError
from inlay.lowering.owned_state import OwnedState
from inlay.program.decoder import SIGNATURE
from inlay.runtime.decode_replay import open_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.lowering.executable import Executable


class Session:
    """A batch of sequences that grow together. Only the session stores their lengths.

    Prompts and single tokens use the same call. Rows beyond a sequence's length are never read, so a restart clears
    nothing. No later call overwrites the result of `advance`.

    Several threads may use one package, each with its own session. A session is for one thread at a time: a concurrent
    call is rejected, because the content of the sequences would depend on the order of the calls.
    """

    def __init__(self, executable: Executable, batch: int = 1) -> None:
        self._state = executable.new_state()
        self._run = open_steps(executable, self._state)
        cache = executable.cache
        if cache is None:
            raise UsageError("The package has no KV cache.", "Build it from a language model.")
        if batch > cache.slots:
            raise UsageError(
                f"The session has {batch} sequences, but the package has {cache.slots} slots.",
                "Build with a larger --max-batch.",
            )
        self.batch, self.max_seq_len, self._max_prefill = batch, cache.max_seq_len, executable.max_prefill
        self._check_tokens = cache.check_tokens
        self._slots = torch.arange(batch)
        self._lengths = torch.zeros(batch, dtype=torch.int64)
        held = {**self._state, SIGNATURE.lengths: self._lengths}
        self.state = OwnedState(held, {name: name for name in held}, {})
        """The KV cache of all slots, and the lengths."""

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each sequence."""
        return self._lengths.tolist()

    def restart(self, *sequences: int) -> None:
        """Set the length of these sequences, or of all, to 0. No memory is cleared."""
        with self.state.exclusive():
            self._lengths[list(sequences) if sequences else slice(None)] = 0

    def advance(
        self, tokens: torch.Tensor | Sequence[Sequence[int]], *, is_prefill: bool | None = None
    ) -> torch.Tensor:
        """Append the same number of tokens to every sequence; return the logits after the last, f32[batch, vocabulary].

        `is_prefill`: the tokens are part of a prompt, whose result does not depend on how it is split into chunks. The
        default is true for several tokens and when all sequences are empty.
        """
        given = torch.as_tensor(tokens, dtype=torch.int64).contiguous()
        if given.dim() != 2 or given.shape[0] != self.batch or not given.shape[1]:
            raise UsageError(f"Tokens must have the shape [{self.batch}, length], but have {list(given.shape)}.")
        with self.state.exclusive():
            longest = max(self.lengths) + given.shape[1]
            if longest > self.max_seq_len:
                raise UsageError(
                    f"A sequence would grow to {longest} tokens, but the limit is {self.max_seq_len}.",
                    "Build with a larger --max-length, or call restart().",
                )
            if given.shape[1] > self._max_prefill:
                self._check_tokens(given)  # all of them, before the first of several calls writes
            begins = given.shape[1] > 1 or not any(self.lengths)
            given_all = {**self._state, SIGNATURE.slots: self._slots, SIGNATURE.lengths: self._lengths}
            for part in torch.split(given, self._max_prefill, 1):
                given_all[SIGNATURE.tokens] = part.contiguous()
                results = self._run(given_all, is_prefill=begins if is_prefill is None else is_prefill)
                self._lengths += part.shape[1]
        scores: torch.Tensor = results[SIGNATURE.logits][:, -1]
        return scores.float()


class SequenceSession:
    """A session of one sequence, for text generation. For one thread at a time, like `Session`."""

    def __init__(self, executable: Executable) -> None:
        self._session = Session(executable)
        self.max_seq_len = self._session.max_seq_len

    @property
    def state(self) -> OwnedState:
        """The KV cache of all slots, and the length."""
        return self._session.state

    @property
    def length(self) -> int:
        """The number of tokens in the sequence."""
        return self._session.lengths[0]

    def restart(self) -> None:
        """Set the length to 0, in constant time."""
        self._session.restart()

    def advance(self, tokens: list[int]) -> torch.Tensor:
        """Append tokens; return the logits after the last, f32[vocabulary]."""
        return self._session.advance([tokens])[0]
