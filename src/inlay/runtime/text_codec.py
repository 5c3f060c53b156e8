"""The text side of a package: prompt to tokens, tokens to text, and which tokens end an answer.

Reads what `inlay.capture.tokenizer.save_tokenizer` wrote: `tokenizer.json`, `text.json` and, for models that chat,
`chat_template.jinja`. transformers is not imported: it takes seconds, and a package must not need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from inlay.errors import ModelError, UsageError, one_line
from inlay.runtime.chat_template import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from inlay.runtime.chat_template import Messages

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet one."""


class TextConfig(BaseModel):
    """What `text.json` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eos: frozenset[int]
    """Tokens that end an answer."""
    special_tokens: dict[str, str]
    """What chat templates call them, such as bos_token, and how they are written."""


class TextCodec:
    """Tokenizer, chat template and end tokens of one package."""

    def __init__(self, tokenizer: Tokenizer, facts: TextConfig, chat: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.eos = facts.eos
        self.chat = chat

    @classmethod
    def load(cls, folder: Path | str) -> TextCodec:
        """Read the tokenizer of a package."""
        folder = Path(folder)
        if not (folder / "text.json").is_file():
            raise ModelError(
                f"There is no tokenizer in {folder}: text.json is missing.",
                "Give the folder that `inlay build` wrote for a language model.",
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
        """Tokens of a prompt as it stands, after the begin token where the model has one."""
        return list(self.tokenizer.encode(prompt).ids)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Tokens of a conversation, ready for the answer; the template writes the special tokens itself."""
        if self.chat is None:
            raise UsageError(
                "This model has no chat template, so it cannot follow a conversation.", "Give it one prompt as text."
            )
        return list(self.tokenizer.encode(self.chat.render(messages), add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """Decodes an answer token by token."""
        return Detokenizer(self)


class Detokenizer:
    """Text of tokens that come one at a time; a character whose bytes are not all there yet waits.

    `tokenizers.decoders.DecodeStream` is not used: it loses what waits at the end, and fails where bytes that are no
    character follow a character made of bytes.
    """

    def __init__(self, text: TextCodec) -> None:
        self._text = text
        self._tokens: list[int] = []
        """Those whose text was given out last, as decoders treat a first token differently, and those that wait."""
        self._given = 0
        """How many of them were given out."""

    def add(self, token: int) -> str:
        """The text that is certain after one more token; often empty."""
        self._tokens.append(token)
        new = self._new()
        if not new or new.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._tokens, self._given = self._tokens[self._given :], len(self._tokens) - self._given
        return new

    def finish(self) -> str:
        """What still waits, when no token follows."""
        return self._new() if len(self._tokens) > self._given else ""

    def _new(self) -> str:
        before, whole = self._text.decode(self._tokens[: self._given]), self._text.decode(self._tokens)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._text.decode(self._tokens[self._given :])


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "Running a language model needs the tokenizers package.", "pip install 'inlay[run]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}.", "Build the package again.") from error
    tokenizer.no_truncation()  # the file may say otherwise: traces of how the model was trained
    tokenizer.no_padding()
    return tokenizer
