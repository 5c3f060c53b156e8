"""The state of one generation: sampling, detokenization, stop strings and length limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inlay.errors import UsageError
from inlay.runtime.grammar import mask_logits
from inlay.runtime.outputs import FinishReason, TokenLogprobs
from inlay.runtime.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from inlay.runtime.grammar import GrammarMatcher
    from inlay.runtime.request import Request
    from inlay.runtime.text_codec import TextCodec


class GenerationState:
    """The state of one request during generation. `max_seq_len` is the capacity of a sequence in tokens."""

    def __init__(self, request: Request, text: TextCodec, max_seq_len: int) -> None:
        check_length(len(request.prompt), max_seq_len, request.max_tokens)
        _check_ends(request)
        self.request = request
        self._grammar = None if request.grammar is None else text.grammars.open(request.grammar)
        self._before: str | None = "" if self._grammar is not None and request.grammar_after else None
        """What was generated of the text before the grammar applies."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.history = list(request.prompt)
        """Prompt tokens and generated tokens."""
        self.left = min(request.max_tokens, max_seq_len - len(request.prompt) + 1)  # the last token is not cached
        self._generator = None if request.sampling.is_greedy else request.sampling.generator()
        self._encode = text.encode_part
        self._stops = StopStrings(request.stop)
        self._stream = text.detokenizer(with_special=request.with_special_tokens)
        self._ends: frozenset[int] = frozenset() if request.ignore_eos else text.eos

    @property
    def matcher(self) -> GrammarMatcher | None:
        """Follows the answer while a grammar applies to it."""
        return self._grammar if self._before is None else None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether sampling is a plain argmax of the logits."""
        return self.request.sampling.is_plain_greedy and not self._must_continue

    @property
    def _must_continue(self) -> bool:
        return len(self.history) - len(self.request.prompt) < self.request.min_tokens

    def sample(self, scores: torch.Tensor, allowed: np.ndarray | None = None) -> int:
        """Sample the next token from the logits, among those that are allowed."""
        if allowed is not None:
            scores = mask_logits(scores, allowed)
        if self._must_continue:
            ends = [token for token in sorted(self._ends) if token < len(scores)]
            scores = scores.index_fill(0, torch.tensor(ends, dtype=torch.long), -float("inf"))
        prompt = len(self.request.prompt)
        return sample(scores, self.history, self.request.sampling, self._generator, prompt)

    def logprobs(self, scores: torch.Tensor, token: int) -> TokenLogprobs | None:
        """Return the logprob of a token, and the top logprobs, if the request asks for them."""
        return None if self.request.logprobs is None else _logprobs(scores, token, self.request.logprobs)

    def add_prompt_logprobs(self, scores: torch.Tensor) -> None:
        """Add the logprobs of the next tokens of the prompt, of which each row has the logits."""
        begin, most = len(self.prompt_logprobs) + 1, self.request.prompt_logprobs or 0
        tokens = self.request.prompt[begin : begin + len(scores)]
        self.prompt_logprobs += [_logprobs(row, token, most) for row, token in zip(scores, tokens, strict=False)]

    def add(self, token: int) -> tuple[str, FinishReason | None]:
        """Append a token; return the text that is final now, and the finish reason if the generation ends."""
        self.history.append(token)
        self.left -= 1
        is_complete = self.matcher is not None and self.matcher.add(token)
        is_end = token in self._ends
        ended = FinishReason.EOS if is_end else FinishReason.STOP if is_complete else None
        if ended is None and self.left == 0:
            ended = FinishReason.LENGTH
        text = "" if is_end else self._stream.add(token)
        if self._before is not None:
            self._begin_grammar(self._before + text)
        shown = self._stops.add(text)
        if ended and not self._stops.is_found:
            shown += self._stops.add(self._stream.finish())
        if self._stops.is_found:
            ended = FinishReason.STOP
        elif ended:
            shown += self._stops.finish()
        return shown, ended

    def _begin_grammar(self, text: str) -> None:
        """Apply the grammar if this text has what comes before it. What follows in the same token must be allowed."""
        before, found, rest = text.partition(self.request.grammar_after)
        self._before = None if found else before[-len(self.request.grammar_after) :]
        if self.matcher is not None and rest.strip():
            for token in self._encode(rest.lstrip()):
                self.matcher.add(token)

    def flush(self) -> str:
        """Return the text that was held back, when the generation is aborted."""
        return self._stops.add(self._stream.finish()) + self._stops.finish()


def _logprobs(scores: torch.Tensor, token: int, most: int) -> TokenLogprobs:
    logs = scores.log_softmax(-1)
    values, tokens = logs.topk(min(most, len(logs)))
    return TokenLogprobs(float(logs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def _check_ends(request: Request) -> None:
    """Raise an error if what a request states about its end is contradictory."""
    for name in ("ignore_eos", "min_tokens"):
        if request.grammar and getattr(request, name):
            raise UsageError(f"{name} and a grammar exclude each other.", "Leave one of them out.")
    if not 0 <= request.min_tokens <= request.max_tokens:
        problem = f"min_tokens is {request.min_tokens}, but must be from 0 to max_tokens."
        raise UsageError(problem, f"max_tokens is {request.max_tokens}.")


def check_length(prompt: int, max_seq_len: int, max_tokens: int) -> None:
    """Raise an error if the prompt is empty or too long, or if max_tokens is less than 1."""
    if max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}, but must be at least 1.", "Set it to 1 or more.")
    if prompt == 0:
        raise UsageError("The prompt is empty, and this model has no BOS token.", "Send a prompt.")
    if prompt > max_seq_len:
        raise UsageError(
            f"The prompt has {prompt} tokens, but the package is limited to {max_seq_len}.",
            "Shorten the prompt, or build the package with a larger --max-length.",
        )


class StopStrings:
    """Returns text up to the first stop string, and holds back text that may be the beginning of one.

    The result does not depend on how the text is split. Of several stop strings, the one that is complete first counts.

    >>> stops = StopStrings(["END"])
    >>> stops.add("The E"), stops.add("arth EN"), stops.add("D of it"), stops.is_found
    ('The ', 'Earth ', '', True)
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if isinstance(strings, str) or not all(strings):
            raise UsageError("Stop strings must be a list of non-empty strings.", 'Pass a list such as ["\\n\\n"].')
        self._strings = tuple(strings)
        self._held = ""
        self.is_found = False

    def add(self, piece: str) -> str:
        """Add a piece of text; return the text that is final now."""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._strings if (start := text.find(stop)) >= 0]
        if ends:
            self.is_found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
