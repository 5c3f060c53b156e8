"""A language model ready to answer: `inlay.load(path).generate(...)`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from inlay.errors import UsageError
from inlay.runtime.generate import generate
from inlay.runtime.pieces import collect
from inlay.runtime.sampling import Sampling
from inlay.runtime.session import OneSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inlay.runtime.chat import Messages
    from inlay.runtime.pieces import Completion, Piece
    from inlay.runtime.protocol import Stepper
    from inlay.runtime.text import Text

MAX_TOKENS = 256
GREEDY = Sampling()


class LanguageModel:
    """Text in, text out, on steppers that `open_stepper` makes.

    Any number of threads may use one model: answers may overlap, and each is made on a stepper of its own. Steppers are
    used again, so there are as many caches as there were answers at once.
    """

    def __init__(self, text: Text | Path, open_stepper: Callable[[], Stepper]) -> None:
        self._text = text
        self._open = open_stepper
        self._idle: list[Stepper] = []
        self._reading = threading.Lock()

    @property
    def text(self) -> Text:
        """Tokenizer and chat template, read when they are first needed."""
        with self._reading:
            if isinstance(self._text, Path):
                from inlay.runtime.text import Text  # who gives token numbers need not pay for it: pydantic, Jinja

                self._text = Text.load(self._text)
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
    ) -> Iterator[Piece]: ...

    def generate(
        self,
        prompt: str | Messages,
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        raw: bool = False,
        stream: bool = False,
    ) -> Completion | Iterator[Piece]:
        """Answer a prompt or a conversation, whole or, with `stream`, piece by piece.

        A prompt becomes a conversation of one message where the model has a chat template; `raw` continues it as it
        stands, which is what happens without a template. Threads may call this at the same time; the pieces of one
        stream are for one thread at a time.
        """
        pieces = self._pieces(self._encode(prompt, raw), sampling, max_tokens, stop)
        return pieces if stream else collect(pieces)

    def _encode(self, prompt: str | Messages, raw: bool) -> list[int]:
        if not isinstance(prompt, str):
            if raw:
                raise UsageError("A conversation cannot be given raw.", "Give one text, or leave raw out.")
            return self.text.encode_chat(prompt)
        if raw or self.text.chat is None:
            return self.text.encode(prompt)
        return self.text.encode_chat([{"role": "user", "content": prompt}])

    def _pieces(self, prompt: list[int], sampling: Sampling, max_tokens: int, stop: Sequence[str]) -> Iterator[Piece]:
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
    from inlay.compile.load import load_package

    package = load_package(path, verify=verify)
    if package.manifest.kind != "decoder":
        raise UsageError(
            f"{path} is a compiled program, not a language model.", "Call it with inlay.compile.load_package(path)."
        )
    return LanguageModel(package.folder / "tokenizer", lambda: OneSequence(package))
