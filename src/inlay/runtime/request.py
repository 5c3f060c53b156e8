"""What is asked of an engine, and the answer as it comes: from another thread, or awaited in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from inlay.errors import UsageError
from inlay.runtime.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from inlay.runtime.outputs import TokenOutput


@dataclass(frozen=True)
class Request:
    """A prompt of tokens, and how it is to be answered."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    """Go on when the model says it is done."""
    logprobs: int | None = None
    """Say how likely each token was, and so many of the likeliest others."""
    priority: int = 0
    """Higher ones are taken first; what they leave in the cache goes last."""
    salt: str = ""
    """Requests share what is cached only with those of the same salt."""
    owner: str = ""
    """Whose it is: a slot that becomes free goes to those who have the fewest. Without one, to who came first."""
    timeout: float | None = None
    """Seconds from being asked until the answer ends, complete or not."""


class QueueFullError(UsageError):
    """There is no room for another request now."""

    def __init__(self, waiting: int, seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting already.", f"Ask again in {seconds:.0f} s.")
        self.retry_after = seconds


class EngineClosedError(UsageError):
    """The engine takes no requests any more."""

    def __init__(self) -> None:
        super().__init__("The engine is shutting down.", "Ask another one.")


class RequestHandle:
    """The answer to a request, in pieces. One reader: iterate over it in a thread, or `async for` in an event loop."""

    def __init__(self, id_: int, request: Request, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.id, self.request, self.loop = id_, request, loop
        self.arrival_time = monotonic()
        self.cached_tokens = 0
        """How many tokens of the prompt were in the cache; known when the first piece comes."""
        self.is_cancelled = False
        self.error: BaseException | None = None
        self._outputs: deque[TokenOutput] = deque()
        self._is_finished = False
        self._new = threading.Condition()
        self._wake_event: asyncio.Event | None = None

    @property
    def deadline(self) -> float | None:
        """When it has to end, on the monotonic clock."""
        return None if self.request.timeout is None else self.arrival_time + self.request.timeout

    @property
    def is_finished(self) -> bool:
        """Whether the last token has arrived, or an error."""
        return self._is_finished

    def cancel(self) -> None:
        """Nobody wants the rest: it ends before the engine's next step. Any thread may call it, any number of times."""
        self.is_cancelled = True

    def put(self, outputs: list[TokenOutput], error: BaseException | None = None) -> None:
        """For the engine: more of the answer. Called in the event loop if there is one, else in the engine's thread."""
        with self._new:
            self._outputs.extend(outputs)
            self.error = error or self.error
            self._is_finished = error is not None or bool(outputs and outputs[-1].finish_reason)
            self._new.notify_all()
        if self._wake_event is not None:
            self._wake_event.set()

    def __iter__(self) -> Iterator[TokenOutput]:
        while True:
            with self._new:
                self._new.wait_for(lambda: self._outputs or self._is_finished)
                ready, ended = self._take()
            yield from ready
            if ended:
                return

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        async for batch in self.batches():
            for piece in batch:
                yield piece

    async def batches(self) -> AsyncIterator[list[TokenOutput]]:
        """All pieces that are ready, whenever there are some; for an event loop."""
        self._wake_event = asyncio.Event()
        while True:
            ready, ended = self._take()
            if ready:
                yield ready
            if ended:
                return
            await self._wake_event.wait()
            self._wake_event.clear()

    def _take(self) -> tuple[list[TokenOutput], bool]:
        """What is there, and whether nothing follows."""
        ready = list(self._outputs)
        self._outputs.clear()
        if self.error is not None and not ready:
            raise self.error
        return ready, self._is_finished and self.error is None
