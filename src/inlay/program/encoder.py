"""Text encoders: names of their inputs and their output, and what turns text into them. Manifests store it."""

from __future__ import annotations

from dataclasses import dataclass, field

TOKENS, MASK, TOKEN_TYPES, EMBEDDINGS = "input_ids", "attention_mask", "token_type_ids", "embeddings"
"""Token ids, mask of the tokens that are not padding, types of the tokens (optional), all `[batch, length]`; and
embeddings, `[batch, dimension]`. Padding is on the right."""


@dataclass(frozen=True)
class EncoderFacts:
    """What the files of an encoder state about its texts and its embeddings."""

    max_length: int
    """Longer texts are truncated to this many tokens."""
    pooling: tuple[str, ...]
    """Pooling modes, as sentence-transformers names them; several are concatenated."""
    normalized: bool = False
    """Whether embeddings have length 1."""
    pad_token: int = 0
    lowercase: bool = False
    """Whether texts are lowercased before the tokenizer's own rules."""
    truncation_side: str = "right"
    prompts: dict[str, str] = field(default_factory=dict)
    """Name → text in front of a text."""
    default_prompt: str = ""
    """Name of the prompt that is used if none is asked for; empty: none."""
