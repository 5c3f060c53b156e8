"""Sessions: sequences on a compiled decoder. Each lies in a slot of one cache, which nobody has to reset."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from inlay.errors import UsageError
from inlay.program.decoder import SIGNATURE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.lowering.executable import Executable


class Session:
    """A batch of sequences that grow together. How long each is, is known here and nowhere else.

    Prompts and single tokens go through the same call; rows beyond a sequence's length are never read, so beginning
    again costs nothing. What `advance` returned is the caller's: no later call writes to it.

    Any number of threads may work on one package, each on a session of its own. One session is for one thread at a
    time: which of two calls came first would decide what its sequences hold, so the second is refused.
    """

    def __init__(self, executable: Executable, batch: int = 1) -> None:
        self._run = executable
        self._state = executable.new_state()
        slots, _, room, _ = executable.bindings.state[0].shape
        if batch > int(slots):
            raise UsageError(
                f"{batch} sequences were asked for, and the package has {slots} slots.", "Build with --max-batch."
            )
        self.batch, self.max_seq_len = batch, int(room)
        self._slots = torch.arange(batch)
        self._lengths = torch.zeros(batch, dtype=torch.int64)
        self._busy = threading.Lock()

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence holds."""
        return self._lengths.tolist()

    def restart(self, *sequences: int) -> None:
        """Begin these sequences again, or all of them. Takes no time: nothing is cleared."""
        with self._exclusive():
            self._lengths = self._lengths.clone()
            self._lengths[list(sequences) if sequences else slice(None)] = 0

    def advance(
        self, tokens: torch.Tensor | Sequence[Sequence[int]], *, is_prefill: bool | None = None
    ) -> torch.Tensor:
        """Append as many tokens to every sequence; the scores after the last of them, f32[batch, vocabulary].

        `is_prefill`: they are a part of a prompt, which is computed alike however it is cut. By default several tokens
        are, and those that sequences begin with.
        """
        given = torch.as_tensor(tokens, dtype=torch.int64).contiguous()
        if given.dim() != 2 or given.shape[0] != self.batch or not given.shape[1]:
            raise UsageError(f"Tokens must be [{self.batch}, length], and are {list(given.shape)}.")
        with self._exclusive():
            longest = max(self.lengths) + given.shape[1]
            if longest > self.max_seq_len:
                raise UsageError(
                    f"A sequence would grow to {longest} tokens, and there is room for {self.max_seq_len}.",
                    "Build with a larger --max-length, or begin again.",
                )
            given_all = {
                **self._state,
                SIGNATURE.tokens: given,
                SIGNATURE.slots: self._slots,
                SIGNATURE.lengths: self._lengths,
            }
            begins = given.shape[1] > 1 or not any(self.lengths)
            results = self._run(given_all, is_prefill=begins if is_prefill is None else is_prefill)
            self._lengths = self._lengths + given.shape[1]
        scores: torch.Tensor = results[SIGNATURE.logits][:, -1]
        return scores.float()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise UsageError("Another thread is using this session.", "Open one session for each thread.")
        try:
            yield
        finally:
            self._busy.release()


class SequenceSession:
    """A session of one sequence, as generating text wants it. For one thread at a time, as sessions are."""

    def __init__(self, executable: Executable) -> None:
        self._session = Session(executable)
        self.max_seq_len = self._session.max_seq_len

    @property
    def length(self) -> int:
        """Tokens already in the cache."""
        return self._session.lengths[0]

    def restart(self) -> None:
        """Begin again at length 0, in constant time."""
        self._session.restart()

    def advance(self, tokens: list[int]) -> torch.Tensor:
        """Append tokens; the logits after the last of them, f32[vocabulary]."""
        return self._session.advance([tokens])[0]
