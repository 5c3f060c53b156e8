"""A language model in a package: `inlay.load(path).generate(...)`."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast, overload

from inlay.errors import UsageError
from inlay.runtime.generation_state import GenerationState
from inlay.runtime.grammar import Grammar
from inlay.runtime.outputs import Completion, TokenOutput, collect
from inlay.runtime.request import QueueFullError, Request, RequestHandle
from inlay.runtime.sampling import Sampling
from inlay.runtime.session import SequenceSession
from inlay.runtime.tool_format import FINAL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    import torch

    from inlay.runtime.chat_template import Messages
    from inlay.runtime.engine import Engine
    from inlay.runtime.grammar import Schema
    from inlay.runtime.text_codec import TextCodec

MAX_TOKENS = 256
GREEDY = Sampling()
_QUEUE_POLL_SECONDS = 0.01


class LanguageModel:
    """Generates text with a package.

    All methods are safe to call from several threads. `generate` with one prompt runs in the calling thread, on a
    session with its own KV cache; sessions are reused, so there are as many caches as there were calls at once.
    `generate` with a list of prompts, and `astream`, run on one engine, which batches all requests. The engine is
    started by the first such call. `close` stops it.
    """

    def __init__(
        self,
        text: TextCodec | Path,
        open_stepper: Callable[[], Stepper],
        open_engine: Callable[[], Engine] | None = None,
    ) -> None:
        self._text = text
        self._open = open_stepper
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._idle: list[Stepper] = []
        self._text_lock, self._engine_lock = threading.Lock(), threading.Lock()

    @property
    def text(self) -> TextCodec:
        """The tokenizer and chat template. They are read on first use."""
        with self._text_lock:
            if isinstance(self._text, Path):
                # It imports pydantic and Jinja, which token ids do not need.
                from inlay.runtime.text_codec import TextCodec

                self._text = TextCodec.load(self._text)
            return self._text

    @property
    def engine(self) -> Engine:
        """The engine that batches requests. It is started on first use."""
        with self._engine_lock:
            if self._engine is None:
                if self._open_engine is None:
                    raise UsageError("This model has no engine.", "Load it from a package with inlay.load.")
                engine = self._open_engine()
                engine.start()
                self._engine = engine
            return self._engine

    def close(self) -> None:
        """Stop the engine and free its memory. Unfinished requests end with the finish reason `cancelled`.

        A call that has requests left to submit raises EngineClosedError.
        """
        with self._engine_lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> Stepper:
        """Return a session for one sequence: token ids in, logits out. One thread at a time may use it."""
        return self._open()

    @overload
    def generate(
        self,
        prompt: str | Messages,
        *,
        sampling: Sampling = ...,
        max_tokens: int = ...,
        stop: Sequence[str] = ...,
        schema: Schema | None = ...,
        grammar: Grammar | None = ...,
        raw: bool = ...,
        stream: Literal[False] = ...,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: list[str] | Sequence[Messages],
        *,
        sampling: Sampling = ...,
        max_tokens: int = ...,
        stop: Sequence[str] = ...,
        schema: Schema | None = ...,
        grammar: Grammar | None = ...,
        raw: bool = ...,
        stream: Literal[False] = ...,
        on_progress: Callable[[int], None] | None = ...,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: str | Messages,
        *,
        sampling: Sampling = ...,
        max_tokens: int = ...,
        stop: Sequence[str] = ...,
        schema: Schema | None = ...,
        grammar: Grammar | None = ...,
        raw: bool = ...,
        stream: Literal[True],
    ) -> Iterator[TokenOutput]: ...

    def generate(
        self,
        prompt: str | Messages | list[str] | Sequence[Messages],
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        schema: Schema | None = None,
        grammar: Grammar | None = None,
        raw: bool = False,
        stream: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> Completion | list[Completion] | Iterator[TokenOutput]:
        """Answer a prompt or a conversation, or a list of them. `stream` returns the tokens of one answer as they come.

        A prompt becomes a conversation with one message if the model has a chat template. `raw` continues the prompt
        without the template, which is also what happens if there is none. A list of prompts is answered in batches;
        each prompt gets the answer that it gets alone. `on_progress` is called with the number of finished answers.

        With `schema`, a JSON schema or a pydantic model, the answer is JSON of it; with `grammar`, what that states. It
        is incomplete if it ends with the finish reason `length`.
        """
        prompts, rules = _as_many(prompt), _as_grammar(schema, grammar)
        if prompts is None:
            tokens = self._encode(cast("str | Messages", prompt), raw)
            pieces = self._stream(tokens, sampling, max_tokens, stop, rules)
            return pieces if stream else collect(pieces)
        if stream:
            raise UsageError("A list of prompts cannot be streamed.", "Use `astream` for each prompt.")
        if not prompts:
            return []
        engine, requests = self.engine, []
        for place, each in enumerate(prompts):
            try:
                request = _request(self.text, self._encode(each, raw), sampling, max_tokens, stop, rules)
                GenerationState(request, self.text, engine.max_seq_len)
            except UsageError as error:
                raise UsageError(f"Prompt {place}: {error.problem}", error.remedy) from error
            requests.append(request)
        return _generate_all(engine, requests, on_progress or (lambda done: None))

    async def astream(
        self,
        prompt: str | Messages,
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        schema: Schema | None = None,
        grammar: Grammar | None = None,
        raw: bool = False,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Answer a prompt or a conversation token by token in an event loop.

        All streams of a model are batched. Ending the iteration early cancels the request.
        """
        engine = await asyncio.to_thread(lambda: self.engine)
        rules = _as_grammar(schema, grammar)
        request = _request(self.text, self._encode(prompt, raw), sampling, max_tokens, stop, rules)
        while True:
            with suppress(QueueFullError):  # another thread may submit in between
                if not engine.is_full:
                    handle = engine.submit(request, asyncio.get_running_loop())
                    break
            await asyncio.sleep(_QUEUE_POLL_SECONDS)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.cancel()

    def _encode(self, prompt: str | Messages, raw: bool) -> list[int]:
        if not isinstance(prompt, str):
            if raw:
                raise UsageError(
                    "`raw` needs a text, and this is a conversation.", "Pass a string, or leave `raw` out."
                )
            return self.text.encode_chat(prompt)
        if raw or self.text.chat is None:
            return self.text.encode(prompt)
        return self.text.encode_chat([{"role": "user", "content": prompt}])

    def _stream(
        self, prompt: list[int], sampling: Sampling, max_tokens: int, stop: Sequence[str], grammar: Grammar | None
    ) -> Iterator[TokenOutput]:
        try:
            stepper = self._idle.pop()
        except IndexError:
            stepper = self._open()
        try:
            yield from generate(stepper, self.text, prompt, sampling, max_tokens=max_tokens, stop=stop, grammar=grammar)
        finally:
            self._idle.append(stepper)


def _generate_all(engine: Engine, requests: Sequence[Request], on_progress: Callable[[int], None]) -> list[Completion]:
    pending, completed = deque[RequestHandle](), list[Completion]()

    def collect_first() -> None:
        completed.append(collect(pending[0]))
        pending.popleft()
        on_progress(len(completed))

    try:
        for request in requests:
            pending.append(engine.submit(request, wait=True))
            while pending and pending[0].is_finished:
                collect_first()
        while pending:
            collect_first()
    finally:
        for handle in pending:
            handle.cancel()
    return completed


def _as_grammar(schema: Schema | None, grammar: Grammar | None) -> Grammar | None:
    if schema is None:
        return grammar
    if grammar is not None:
        raise UsageError("schema and grammar exclude each other.", "Leave one of them out.")
    return Grammar.json_schema(schema)


def _request(
    text: TextCodec,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    stop: Sequence[str],
    grammar: Grammar | None,
) -> Request:
    after = "" if grammar is None else text.grammar_start(prompt)
    kept = after == FINAL  # its markers are special tokens
    given = (tuple(prompt), sampling, max_tokens, stop)
    return Request(*given, grammar=grammar, grammar_after=after, with_special_tokens=kept)


def _as_many(prompt: Any) -> list[str | Messages] | None:
    """Return a list of prompts, or None if this is one prompt. A list of mappings is one conversation."""
    if not isinstance(prompt, Sequence):
        raise UsageError(f"A prompt cannot be a {type(prompt).__name__}.", "Pass a text, messages, or a list of them.")
    if isinstance(prompt, str) or any(isinstance(each, Mapping) for each in prompt):
        return None
    return list(prompt)


def load(path: Path | str, *, verify: bool = False) -> LanguageModel:
    """Load the language model in a package that `inlay build` wrote. Nothing is compiled or converted.

    Several packages may be loaded in one process. Every thread that generates starts as many OpenMP threads as
    OMP_NUM_THREADS or torch allow; with many threads, set that to a small number. Weights are compared with their
    checksums at the first load; `verify` does so again.
    """
    from inlay.package.loader import load_package

    package = load_package(path, verify=verify)
    if package.manifest.kind != "decoder":
        encodes = package.manifest.kind == "encoder"
        raise UsageError(
            f"{path} is {'a text encoder' if encodes else 'a compiled program'}, not a language model.",
            "Use `inlay embed` or inlay.load_encoder(path)."
            if encodes
            else "Call it with inlay.package.load_package(path).",
        )

    def open_engine() -> Engine:
        from inlay.runtime.engine import Engine

        return Engine(package, model.text)

    model = LanguageModel(package.folder / "tokenizer", lambda: SequenceSession(package), open_engine)
    return model


def generate(
    stepper: Stepper,
    text: TextCodec,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    stop: Sequence[str] = (),
    grammar: Grammar | None = None,
) -> Iterator[TokenOutput]:
    """Pieces of the answer to a prompt of tokens, which `TextCodec.encode` and `TextCodec.encode_chat` make.

    The tokens after the first are timed without what happens between two pieces.
    """
    started, aside = perf_counter(), 0.0
    request = _request(text, prompt, sampling, max_tokens, stop, grammar)
    writer = GenerationState(request, text, stepper.max_seq_len)
    given = list(prompt)
    stepper.restart()
    while True:
        scores = stepper.advance(given)
        token = writer.sample(scores, None if writer.matcher is None else writer.matcher.allowed())
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

    @property
    def max_seq_len(self) -> int:
        """The most tokens the cache can hold."""

    def restart(self) -> None:
        """Begin again at length 0, in constant time."""

    def advance(self, tokens: list[int]) -> torch.Tensor:
        """Append tokens; the logits after the last of them, f32[vocabulary]."""
