"""A text encoder in a package: `inlay.load_encoder(path).embed(texts)`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

from inlay.errors import PackageError, UsageError, suggest
from inlay.program.bindings import Role
from inlay.program.encoder import EMBEDDINGS, MASK, TOKEN_TYPES, TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tokenizers import Encoding, Tokenizer

    from inlay.lowering.executable import Executable
    from inlay.program.encoder import EncoderFacts

BATCH_SIZE = 32


class Encoder:
    """Computes embeddings of texts with a package. All methods are safe to call from several threads.

    A text is padded to a length that depends on its own length only, and is batched with texts of that padded length.
    Texts in the same call therefore change its embedding at most by rounding.
    """

    def __init__(self, executable: Executable, facts: EncoderFacts, tokenizer: Tokenizer) -> None:
        """`tokenizer` truncates as the facts say."""
        self._run, self._tokenizer, self.facts = executable, tokenizer, facts
        rows = executable.bindings.with_role(Role.INPUT)
        self._inputs = {row.target: row.name for row in rows}
        if not {TOKENS, MASK} <= set(self._inputs) <= {TOKENS, MASK, TOKEN_TYPES}:
            raise PackageError(f"The inputs of an encoder cannot be {list(self._inputs)}.", "Build the package again.")
        self.dimension = int(executable.bindings.outs[0].shape[-1])
        """The number of values of an embedding."""

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        batch_size: int = BATCH_SIZE,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> torch.Tensor:
        """Return the embeddings of texts, f32[texts, dimension].

        `prompt` names one of the model's prompts (`facts.prompts`), which is put in front of every text; by default the
        model's default prompt, if it has one. `on_progress` is called with the number of texts that are done.
        """
        if batch_size < 1:
            raise UsageError(f"The batch size cannot be {batch_size}.", "Use 1 or more.")
        return self.embed_tokens(self.encode(texts, prompt=prompt), batch_size, on_progress)

    def embed_tokens(
        self,
        encodings: Sequence[Encoding],
        batch_size: int = BATCH_SIZE,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> torch.Tensor:
        """Return the embeddings of texts that were encoded."""
        made = torch.empty(len(encodings), self.dimension)
        done = 0
        for length, places in self._batches(encodings, batch_size):
            made[places] = self._embed_batch([encodings[place] for place in places], length)
            done += len(places)
            on_progress(done)
        return made

    def _find_prompt(self, name: str | None) -> str:
        prompts = self.facts.prompts
        if name is not None and name not in prompts:
            known = suggest(name, prompts) if prompts else "The model has no prompts; put the text in front yourself."
            raise UsageError(f"There is no prompt {name!r}.", known)
        return prompts.get(self.facts.default_prompt if name is None else name, "")

    def encode(self, texts: Sequence[str], *, prompt: str | None = None) -> list[Encoding]:
        """Return the tokens of texts after a prompt, truncated to the maximum length."""
        before = self._find_prompt(prompt)
        if isinstance(texts, str):
            raise UsageError("`texts` must be a list of texts, not one text.", "Pass [text].")
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                raise UsageError(f"Text {place} is a {type(text).__name__}.", "Pass strings.")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"Text {place} is not valid Unicode: {error.reason}.", "Remove the surrogate."
                ) from error
        encodings = self._tokenizer.encode_batch([before + text for text in texts])
        for place, encoding in enumerate(encodings):
            if not encoding.ids:
                raise UsageError(f"Text {place} has no tokens, so it has no embedding.", "Leave it out.")
        return encodings

    def _batches(self, encodings: Sequence[Encoding], size: int) -> Iterator[tuple[int, list[int]]]:
        """Yield padded lengths, each with the places of up to `size` texts; the longest texts come first."""
        lengths = [padded_length(len(each.ids), self.facts.max_length) for each in encodings]
        order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
        for length, found in groupby(order, key=lambda place: lengths[place]):
            places = list(found)
            for start in range(0, len(places), size):
                yield length, places[start : start + size]

    def _embed_batch(self, encodings: Sequence[Encoding], length: int) -> torch.Tensor:
        def pad(rows: list[list[int]], value: int = 0) -> torch.Tensor:
            return torch.tensor([row + [value] * (length - len(row)) for row in rows])

        given = {
            TOKENS: pad([each.ids for each in encodings], self.facts.pad_token),
            MASK: pad([each.attention_mask for each in encodings]),
            TOKEN_TYPES: pad([each.type_ids for each in encodings]),
        }
        results = self._run({name: given[target] for target, name in self._inputs.items()})
        made: torch.Tensor = results[EMBEDDINGS]
        return made.float()


def padded_length(length: int, most: int) -> int:
    """Return the length to pad to: a multiple of 8, and of an eighth of the next lower power of two.

    >>> [padded_length(each, 512) for each in (1, 9, 64, 65, 130, 300, 511)]
    [8, 16, 64, 72, 144, 320, 512]
    """
    step = max(8, 1 << (length.bit_length() - 4)) if length > 7 else 8
    return min(most, -(-length // step) * step)


def load_encoder(path: Path | str, *, verify: bool = False) -> Encoder:
    """Load the text encoder in a package that `inlay build` wrote. Nothing is compiled or converted.

    Weights are compared with their checksums at the first load; `verify` does so again.
    """
    from tokenizers import normalizers

    from inlay.package.loader import load_package
    from inlay.runtime.text_codec import TextCodec

    package = load_package(path, verify=verify)
    facts = package.manifest.encoder
    if facts is None:
        raise UsageError(
            f"{path} is a package of another kind ({package.manifest.kind}), not a text encoder.",
            "Build one from a folder of sentence-transformers or of an encoder.",
        )
    tokenizer = TextCodec.load(package.folder / "tokenizer").tokenizer
    tokenizer.enable_truncation(facts.max_length, direction=facts.truncation_side)
    if facts.lowercase:
        rules = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rules])
    return Encoder(package, facts, tokenizer)
