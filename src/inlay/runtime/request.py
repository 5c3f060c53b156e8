"""Engine requests, and handles that deliver their outputs to a thread or to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from inlay.errors import InlayError, UsageError
from inlay.runtime.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from inlay.runtime.grammar import Grammar
    from inlay.runtime.outputs import TokenOutput


@dataclass(frozen=True)
class Request:
    """A tokenized prompt and the parameters of its generation."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    """Continue after an end token."""
    logprobs: int | None = None
    """Return the logprob of each token, and this many top logprobs."""
    prompt_logprobs: int | None = None
    """Return the logprob of each token of the prompt, and this many top logprobs. The prefix cache is not used."""
    grammar: Grammar | None = None
    """What the answer must be. Without one it is free."""
    grammar_after: str = ""
    """The grammar applies after this text, such as the end of the reasoning. Empty: from the start."""
    min_tokens: int = 0
    """End tokens are not sampled before this many tokens."""
    with_special_tokens: bool = False
    """The text contains special tokens, except for end tokens."""
    priority: int = 0
    """Requests of higher priority are scheduled first, and their blocks are evicted last."""
    salt: str = ""
    """Only requests with the same salt share cached blocks."""
    owner: str = ""
    """The tenant. A free slot goes to the owner with the fewest slots. Requests without owner count as 0 slots."""
    timeout: float | None = None
    """Seconds from arrival after which the generation is aborted."""
    id: str = ""
    """The id in logs and traces. Requests of one HTTP request have the same."""


class QueueFullError(UsageError):
    """The queue of the engine is full."""

    def __init__(self, waiting: int, seconds: float) -> None:
        super().__init__(f"The queue is full: {waiting} requests are waiting.", f"Retry in {seconds:.0f} s.")
        self.retry_after = seconds


class EngineClosedError(UsageError):
    """The engine accepts no more requests."""

    def __init__(self) -> None:
        super().__init__("The engine is shutting down.", "Use another engine.")


class EngineUnavailableError(UsageError):
    """Nothing can run the request at present."""


class RequestHandle:
    """The outputs of a request, for one consumer: iterate in a thread, or `async for` in an event loop."""

    def __init__(self, id_: int, request: Request, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.id, self.request, self.loop = id_, request, loop
        self.arrival_time = monotonic()
        self.cached_tokens = 0
        """Prompt tokens taken from the prefix cache; set before the first output."""
        self.is_cancelled = False
        self.error: BaseException | None = None
        self._outputs: deque[TokenOutput] = deque()
        self.is_finished = False
        """Whether the last token or an error has arrived."""
        self._new = threading.Condition()
        self._wake_event: asyncio.Event | None = None

    @property
    def deadline(self) -> float | None:
        """The time at which the request times out, on the monotonic clock."""
        return None if self.request.timeout is None else self.arrival_time + self.request.timeout

    def cancel(self) -> None:
        """Cancel the request before the engine's next step. Any thread may call this, any number of times."""
        self.is_cancelled = True

    def put(self, outputs: list[TokenOutput], error: BaseException | None = None) -> None:
        """Add outputs. The engine calls this in the event loop if there is one, else in its own thread."""
        with self._new:
            self._outputs.extend(outputs)
            self.error = error or self.error
            self.is_finished = error is not None or bool(outputs and outputs[-1].finish_reason)
            self._new.notify_all()
        if self._wake_event is not None:
            self._wake_event.set()

    def __iter__(self) -> Iterator[TokenOutput]:
        while True:
            with self._new:
                self._new.wait_for(lambda: self._outputs or self.is_finished)
                ready, ended = self._take()
            yield from ready
            if ended:
                return

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        async for batch in self.batches():
            for piece in batch:
                yield piece

    async def batches(self, heartbeat: float | None = None) -> AsyncIterator[list[TokenOutput]]:
        """Yield lists of the outputs that are ready; an empty list after `heartbeat` seconds. For an event loop."""
        self._wake_event = asyncio.Event()
        while True:
            ready, ended = self._take()
            if ready:
                yield ready
            if ended:
                return
            if self.is_finished:  # with an error, behind the outputs
                continue
            try:
                async with asyncio.timeout(heartbeat):
                    await self._wake_event.wait()
            except TimeoutError:
                yield []
            self._wake_event.clear()

    def _take(self) -> tuple[list[TokenOutput], bool]:
        """Return the outputs that are ready, and whether they are the last ones."""
        ready = list(self._outputs)
        self._outputs.clear()
        if self.error is not None and not ready:
            raise self.error
        return ready, self.is_finished and self.error is None


def put_all(outputs: Iterable[tuple[RequestHandle, TokenOutput | InlayError]]) -> None:
    """Add outputs and errors to their handles."""
    for handle, each in outputs:
        if isinstance(each, InlayError):
            handle.put([], each)
        else:
            handle.put([each])
