"""Sessions: sequences on a compiled decoder. Each lies in a slot of one cache, which nobody has to reset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.compile.execute import Executable


class Session:
    """A batch of sequences that grow together. How long each is, is known here and nowhere else.

    Prompts and single tokens go through the same call; rows beyond a sequence's length are never read, so beginning
    again costs nothing. What `advance` returned is the caller's: no later call writes to it.
    """

    def __init__(self, executable: Executable, batch: int = 1) -> None:
        self._run = executable
        self._state = executable.new_state()
        slots, _, room, _ = executable.bindings.state[0].shape
        if batch > int(slots):
            raise UsageError(
                f"{batch} sequences were asked for, and the package has {slots} slots.", "Build with --max-batch."
            )
        self.batch, self.room = batch, int(room)
        self._slots = torch.arange(batch)
        self._lengths = torch.zeros(batch, dtype=torch.int64)

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence holds."""
        return self._lengths.tolist()

    def restart(self, *sequences: int) -> None:
        """Begin these sequences again, or all of them. Takes no time: nothing is cleared."""
        self._lengths = self._lengths.clone()
        self._lengths[list(sequences) if sequences else slice(None)] = 0

    def advance(self, tokens: torch.Tensor | Sequence[Sequence[int]]) -> torch.Tensor:
        """Append as many tokens to every sequence; the scores after the last of them, f32[batch, vocabulary]."""
        given = torch.as_tensor(tokens, dtype=torch.int64).contiguous()
        if given.dim() != 2 or given.shape[0] != self.batch or not given.shape[1]:
            raise UsageError(f"Tokens must be [{self.batch}, length], and are {list(given.shape)}.")
        longest = max(self.lengths) + given.shape[1]
        if longest > self.room:
            raise UsageError(
                f"A sequence would grow to {longest} tokens, and there is room for {self.room}.",
                "Build with a larger --max-length, or begin again.",
            )
        results = self._run({**self._state, "input_ids": given, "slots": self._slots, "lengths": self._lengths})
        self._lengths = self._lengths + given.shape[1]
        scores: torch.Tensor = results["logits"][:, -1]
        return scores.float()


class OneSequence:
    """A session of one sequence, as generating text wants it."""

    def __init__(self, executable: Executable) -> None:
        self._session = Session(executable)
        self.room = self._session.room

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
