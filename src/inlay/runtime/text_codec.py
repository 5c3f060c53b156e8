"""Tokenizer, detokenizer, chat template and end tokens of a package.

Reads the files of `inlay.frontend.tokenizer.save_tokenizer`: `tokenizer.json`, `text.json` and, for chat models,
`chat_template.jinja`. transformers is not imported: the import takes seconds, and a package must not require it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from inlay.errors import ModelError, UsageError, one_line
from inlay.runtime.chat_template import ChatTemplate
from inlay.runtime.grammar import GrammarCompiler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from inlay.runtime.chat_template import Messages

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""The output of decoders for bytes that are not a character, or not a complete one."""
_LAST_TOKENS = 8
"""The tokens at the end of a prompt that may begin the reasoning of the answer."""


class TextConfig(BaseModel):
    """The content of `text.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eos: frozenset[int]
    """Tokens that end a generation."""
    special_tokens: dict[str, str]
    """Name in chat templates, such as bos_token → text of the token."""


class TextCodec:
    """Tokenizer, chat template and end tokens of one package."""

    def __init__(self, tokenizer: Tokenizer, facts: TextConfig, chat: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.eos = facts.eos
        self.chat = chat
        self.grammars = GrammarCompiler(self)
        """Compiles what answers must be, for this tokenizer."""

    @classmethod
    def load(cls, folder: Path | str) -> TextCodec:
        """Read the tokenizer of a package."""
        folder = Path(folder)
        if not (folder / "text.json").is_file():
            raise ModelError(
                f"{folder} contains no tokenizer: text.json is missing.",
                "Use a folder that `inlay build` wrote for a language model.",
            )
        try:
            facts = TextConfig.model_validate_json((folder / "text.json").read_bytes())
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ModelError(f"{folder / 'text.json'} is damaged: {reason}.", "Build the package again.") from error
        template = folder / "chat_template.jinja"
        chat = ChatTemplate(template.read_text("utf-8"), facts.special_tokens) if template.is_file() else None
        return cls(_read_tokenizer(folder / "tokenizer.json"), facts, chat)

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a plain prompt, after the BOS token if the model has one."""
        return list(self.tokenizer.encode(prompt).ids)

    def encode_part(self, text: str) -> list[int]:
        """Return the tokens of a part of a text, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Return the tokens of a conversation up to the next message; the template adds the special tokens."""
        if self.chat is None:
            raise UsageError(
                "This model has no chat template, so it does not support chat.", "Pass one prompt as plain text."
            )
        return self.encode_part(self.chat.render(messages))

    def grammar_start(self, prompt: Sequence[int]) -> str:
        """Return the text after which a grammar applies to an answer; empty if it applies from the start."""
        if self.chat is None:
            return ""
        end = self.decode(list(prompt[-_LAST_TOKENS:]), with_special=True).rstrip()
        return self.chat.markup.grammar_start(end)

    def decode(self, tokens: list[int], *, with_special: bool = False) -> str:
        """Return the text of tokens, without special tokens unless they are asked for."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not with_special))

    def detokenizer(self, *, with_special: bool = False) -> Detokenizer:
        """Return a detokenizer for a new generation."""
        return Detokenizer(self, with_special)


class Detokenizer:
    """Decodes tokens one at a time. Incomplete characters are held back.

    `tokenizers.decoders.DecodeStream` is not used: it loses held-back bytes at the end, and fails where invalid bytes
    follow a character of several byte tokens.
    """

    def __init__(self, text: TextCodec, with_special: bool) -> None:
        self._decode = partial(text.decode, with_special=with_special)
        self._tokens: list[int] = []
        """The last tokens whose text was returned (decoders treat a first token differently), and those held back."""
        self._given = 0
        """How many of them were returned."""

    def add(self, token: int) -> str:
        """Add a token; return the text that is final now, often empty."""
        self._tokens.append(token)
        new = self._new()
        if not new or new.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._tokens, self._given = self._tokens[self._given :], len(self._tokens) - self._given
        return new

    def finish(self) -> str:
        """Return the text that was held back, when no token follows."""
        return self._new() if len(self._tokens) > self._given else ""

    def _new(self) -> str:
        before, whole = self._decode(self._tokens[: self._given]), self._decode(self._tokens)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._decode(self._tokens[self._given :])


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "Running a language model requires the tokenizers package.", "pip install 'inlay[run]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}.", "Build the package again.") from error
    tokenizer.no_truncation()  # the file may enable it, left over from training
    tokenizer.no_padding()
    return tokenizer
