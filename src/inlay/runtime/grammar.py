"""Structured output: grammars that restrict the tokens of an answer, compiled by llguidance.

A matcher follows one answer. It states which tokens may come next, and is told which one did.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel

from inlay.errors import UsageError, one_line, printable
from inlay.runtime.json_schema import prepare_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inlay.runtime.text_codec import TextCodec

MAX_CHARS = 1 << 16
"""A longer grammar is rejected before it is compiled."""
_MOST_ITEMS = 500
"""Items of the parser at one place. A grammar that is so ambiguous would hold up all requests."""
_KEPT = 64
"""Compiled grammars that are kept for later requests."""
JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. With free whitespace, small models write it without end."""

Schema = Mapping[str, Any] | type[BaseModel]
"""A JSON schema, or a pydantic model that has one."""


@dataclass(frozen=True)
class Grammar:
    """What an answer must be: JSON of a schema, a match of a regular expression, or a sentence of a grammar.

    >>> Grammar.choice(["yes", "no"])
    Grammar(kind='choice', text='["yes", "no"]')
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    """The JSON schema, the expression, the choices as a JSON list, or a grammar in Lark's notation or in GBNF."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARS:
            what = f"The {self.kind} has {len(self.text)} characters, but the limit is {MAX_CHARS}."
            raise UsageError(what, "Use a shorter one.")

    @classmethod
    def json_schema(cls, schema: Schema) -> Grammar:
        """JSON of a schema, or of a pydantic model."""
        if isinstance(schema, type):
            schema = schema.model_json_schema()
        return cls("json", json.dumps(schema))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of several texts."""
        if not choices or not all(choices):
            raise UsageError("The choices must be a list of texts that are not empty.", 'Pass ["yes", "no"].')
        return cls("choice", json.dumps(list(choices)))


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last ones. All methods may be called from several threads."""

    def __init__(self, text: TextCodec) -> None:
        self._text = text
        self._lock, self._tokenizer_lock = threading.Lock(), threading.Lock()
        self._tokenizer: Any = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def open(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the start of an answer. Raise an error if the grammar is invalid or not supported."""
        with self._lock:
            if (made := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
        if made is None:
            made = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = made
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return GrammarMatcher(made.deep_copy())

    def preload(self) -> None:
        """Read the tokenizer in another thread, which takes about a second, instead of with the first grammar."""
        if find_spec("llguidance") is not None:
            threading.Thread(target=self._preload, name="inlay-grammar-preload", daemon=True).start()

    def _preload(self) -> None:
        with suppress(UsageError):  # the first request with a grammar reports it
            self._load()

    def _load(self) -> Any:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                tokenizer = self._text.tokenizer
                size = tokenizer.get_vocab_size(with_added_tokens=True)
                ends = sorted(self._text.eos)
                try:
                    self._tokenizer = _library().LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
                except ValueError as error:
                    problem = f"Structured output does not support this tokenizer: {printable(one_line(error), 200)}."
                    raise UsageError(problem, "Ask without it.") from error
        return self._tokenizer

    def _compile(self, grammar: Grammar) -> Any:
        library, tokenizer = _library(), self._load()
        try:
            if grammar.kind == "json":
                schema = json.dumps(prepare_schema(json.loads(grammar.text)))
                source = library.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
            else:
                source = library.grammar_from(grammar.kind, grammar.text)
        except (ValueError, RecursionError) as error:
            raise _invalid(grammar, one_line(error)) from error
        limits = library.LLParserLimits(max_items_in_row=_MOST_ITEMS, verbose_errors=False)
        made = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if made.is_error():
            raise _invalid(grammar, made.get_error())
        made.compute_bitmask()  # the first takes longest, and copies of the matcher share what it found
        if made.is_error():
            raise _invalid(grammar, made.get_error())
        return made


class GrammarMatcher:
    """Follows one answer. One thread at a time may use it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def allowed(self) -> np.ndarray:
        """Return a mask of the tokens that may come next, one byte per token."""
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(bool)

    def add(self, token: int) -> bool:
        """Add the token that was sampled; return whether only an end token can follow."""
        self._inner.consume_token(token)
        self._check()
        return bool(self._inner.is_stopped())

    def _check(self) -> None:
        if self._inner.is_error():
            problem = printable(self._inner.get_error(), 300)
            raise UsageError(f"The grammar cannot be followed further: {problem}.", "Use a simpler one.")


def mask_logits(scores: torch.Tensor, allowed: np.ndarray) -> torch.Tensor:
    """Return logits in which tokens that are not allowed have -inf.

    >>> mask_logits(torch.tensor([1.0, 2.0, 3.0]), np.array([True, False]))
    tensor([1., -inf, -inf])
    """
    kept = np.full(len(scores), -np.inf, np.float32)
    count = min(len(kept), len(allowed))
    np.copyto(kept[:count], scores.numpy()[:count], where=allowed[:count])
    return torch.from_numpy(kept)


Masks = dict[int, Future[np.ndarray]]
"""Place in a batch → the mask of its next token, which is computed in another thread."""


class MaskWorker:
    """Computes the masks of a step while the model computes its logits."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def start(self, matchers: Iterable[GrammarMatcher | None]) -> Masks:
        """Start to compute the masks of these matchers; return them by place."""
        found = enumerate(matchers)
        return {place: self._pool.submit(each.allowed) for place, each in found if each is not None}

    @property
    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="inlay-grammar")
        return self._threads

    def close(self) -> None:
        """End the thread."""
        if self._threads is not None:
            self._threads.shutdown()


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError("Structured output requires llguidance.", "pip install 'inlay[structured]'") from error
    return llguidance


def _invalid(grammar: Grammar, problem: str) -> UsageError:
    names = {"json": "JSON schema", "regex": "regular expression", "choice": "list of choices", "grammar": "grammar"}
    return UsageError(f"The {names[grammar.kind]} cannot be used: {printable(problem, 300).rstrip('.')}.", "Change it.")
