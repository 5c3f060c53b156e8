"""The text of single tokens, for logprobs."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from inlay.runtime.text_codec import REPLACEMENT_CHARACTER

if TYPE_CHECKING:
    from inlay.runtime.text_codec import TextCodec


class TokenText:
    """The text and the bytes of tokens, cached.

    A token that is a part of a character has no text. It is written in OpenAI's form, `bytes:\\xe2\\x82`.
    """

    def __init__(self, text: TextCodec) -> None:
        self._tokenizer = text.tokenizer
        self._known: dict[int, tuple[str, tuple[int, ...] | None]] = {}

    def __call__(self, token: int) -> tuple[str, tuple[int, ...] | None]:
        """Return the text of a token, and its bytes if they are known."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._render(token)
        return found

    def _render(self, token: int) -> tuple[str, tuple[int, ...] | None]:
        # Decode it twice and take the second: decoders strip a space from the first token.
        one = str(self._tokenizer.decode([token], skip_special_tokens=False))
        two = str(self._tokenizer.decode([token, token], skip_special_tokens=False))
        text = two[len(one) :] if two.startswith(one) else one
        if REPLACEMENT_CHARACTER not in text:
            return text, tuple(text.encode())
        raw = self._bytes(self._tokenizer.id_to_token(token) or "")
        if raw is None:
            return text, None
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _bytes(self, name: str) -> tuple[int, ...] | None:
        """Return the bytes that a vocabulary entry represents."""
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
            return (int(found[1], 16),)
        if all(char in self._alphabet for char in name):
            return tuple(self._alphabet[char] for char in name)
        return None

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """The alphabet of byte-level tokenizers: printable bytes unchanged, others from U+0100 on."""
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in plain]
        return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
