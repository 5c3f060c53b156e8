"""A language model ready to answer: `inlay.load(path).generate(...)`."""

from __future__ import annotations

import threading
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, Protocol, overload

from inlay.errors import UsageError
from inlay.runtime.generation_state import GenerationState
from inlay.runtime.outputs import TokenOutput, collect
from inlay.runtime.request import Request
from inlay.runtime.sampling import Sampling
from inlay.runtime.session import SequenceSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from inlay.runtime.chat_template import Messages
    from inlay.runtime.outputs import Completion
    from inlay.runtime.text_codec import TextCodec


MAX_TOKENS = 256
GREEDY = Sampling()


class LanguageModel:
    """Text in, text out, on steppers that `open_stepper` makes.

    Any number of threads may use one model: answers may overlap, and each is made on a stepper of its own. Steppers are
    used again, so there are as many caches as there were answers at once.
    """

    def __init__(self, text: TextCodec | Path, open_stepper: Callable[[], Stepper]) -> None:
        self._text = text
        self._open = open_stepper
        self._idle: list[Stepper] = []
        self._text_lock = threading.Lock()

    @property
    def text(self) -> TextCodec:
        """Tokenizer and chat template, read when they are first needed."""
        with self._text_lock:
            if isinstance(self._text, Path):
                from inlay.runtime.text_codec import (
                    TextCodec,  # who gives token numbers need not pay for it: pydantic, Jinja
                )

                self._text = TextCodec.load(self._text)
            return self._text

    def open(self) -> Stepper:
        """A sequence of one's own: token numbers in, scores out. For one thread at a time; open one for each."""
        return self._open()

    @overload
    def generate(
        self,
        prompt: str | Messages,
        *,
        sampling: Sampling = ...,
        max_tokens: int = ...,
        stop: Sequence[str] = ...,
        raw: bool = ...,
        stream: Literal[False] = ...,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: str | Messages,
        *,
        sampling: Sampling = ...,
        max_tokens: int = ...,
        stop: Sequence[str] = ...,
        raw: bool = ...,
        stream: Literal[True],
    ) -> Iterator[TokenOutput]: ...

    def generate(
        self,
        prompt: str | Messages,
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        raw: bool = False,
        stream: bool = False,
    ) -> Completion | Iterator[TokenOutput]:
        """Answer a prompt or a conversation, whole or, with `stream`, piece by piece.

        A prompt becomes a conversation of one message where the model has a chat template; `raw` continues it as it
        stands, which is what happens without a template. Threads may call this at the same time; the pieces of one
        stream are for one thread at a time.
        """
        pieces = self._stream(self._encode(prompt, raw), sampling, max_tokens, stop)
        return pieces if stream else collect(pieces)

    def _encode(self, prompt: str | Messages, raw: bool) -> list[int]:
        if not isinstance(prompt, str):
            if raw:
                raise UsageError("A conversation cannot be given raw.", "Give one text, or leave raw out.")
            return self.text.encode_chat(prompt)
        if raw or self.text.chat is None:
            return self.text.encode(prompt)
        return self.text.encode_chat([{"role": "user", "content": prompt}])

    def _stream(
        self, prompt: list[int], sampling: Sampling, max_tokens: int, stop: Sequence[str]
    ) -> Iterator[TokenOutput]:
        try:
            stepper = self._idle.pop()
        except IndexError:
            stepper = self._open()
        try:
            yield from generate(stepper, self.text, prompt, sampling, max_tokens=max_tokens, stop=stop)
        finally:
            self._idle.append(stepper)


def load(path: Path | str, *, verify: bool = False) -> LanguageModel:
    """The language model in a package that `inlay build` wrote; nothing is compiled or converted.

    It may be used by any number of threads, and so may several packages in one process. Every thread that calls starts
    as many threads of OpenMP as OMP_NUM_THREADS or torch say: with many callers, let each have few.
    `verify` also reads all weights and holds them against their hashes, which otherwise happens at the first load.
    """
    from inlay.package.loader import load_package

    package = load_package(path, verify=verify)
    if package.manifest.kind != "decoder":
        raise UsageError(
            f"{path} is a compiled program, not a language model.", "Call it with inlay.package.load_package(path)."
        )
    return LanguageModel(package.folder / "tokenizer", lambda: SequenceSession(package))


def generate(
    stepper: Stepper,
    text: TextCodec,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Sequence[str] = (),
) -> Iterator[TokenOutput]:
    """Pieces of the answer to a prompt of tokens, which `TextCodec.encode` and `TextCodec.encode_chat` make.

    The tokens after the first are timed without what happens between two pieces.
    """
    started, aside = perf_counter(), 0.0
    writer = GenerationState(Request(tuple(prompt), sampling, max_tokens, stop), text, stepper.max_seq_len)
    given = list(prompt)
    stepper.restart()
    while True:
        token = writer.sample(stepper.advance(given))
        given = [token]
        shown, ended = writer.add(token)
        paused = perf_counter()
        yield TokenOutput(shown, token, paused - started - aside, ended)
        if ended:
            return
        aside += perf_counter() - paused


class Stepper(Protocol):
    """One sequence on a compiled package: tokens go in, logits come out, the cache stays inside."""

    @property
    def length(self) -> int:
        """Tokens already in the cache."""
        ...

    @property
    def max_seq_len(self) -> int:
        """The most tokens the cache can hold."""
        ...

    def restart(self) -> None:
        """Begin again at length 0, in constant time."""
        ...

    def advance(self, tokens: list[int]) -> torch.Tensor:
        """Append tokens; the logits after the last of them, f32[vocabulary]."""
        ...
