"""From what a client asks to what an engine is asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.errors import ModelError, UsageError
from inlay.runtime.request import Request
from inlay.runtime.sampling import COLDEST, Sampling
from inlay.serve.errors import ApiError
from inlay.serve.schema import Answered, ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

    from inlay.runtime.text import Text
    from inlay.serve.schema import Said

ASIDE = 4096
"""Characters from which on a prompt is read in another thread: others wait for the event loop."""
DEFAULT_TOKENS = 16
"""What OpenAI's older route makes unless told."""
CHAT_TOKENS = 1024
"""What an answer in a conversation has at most unless told: a model that does not end would take a slot to its end."""


@dataclass(frozen=True)
class Bounds:
    """How long prompts and answers may be."""

    prompt: int
    tokens: int
    vocabulary: int
    characters: int
    """A prompt of more has more tokens than it may have: it is not worth looking closer."""


async def encode(asked: ChatRequest | CompletionRequest, text: Text, bounds: Bounds) -> list[tuple[int, ...]]:
    """The prompts of a request as tokens."""
    if isinstance(asked, ChatRequest):
        messages = [_turn(message) for message in asked.messages]
        size = sum(len(each["content"]) for each in messages)
        prompts = [await _aside(size, lambda: _encode_chat(text, messages, bounds), "messages")]
    elif isinstance(asked.prompt, str) or isinstance(asked.prompt[0], str):
        texts: Any = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        prompts = await _aside(sum(map(len, texts)), lambda: [_encode(text, each, bounds) for each in texts], "prompt")
    else:
        given: Any = asked.prompt
        prompts = given if isinstance(given[0], list) else [given]
        if (largest := max(map(max, prompts))) >= bounds.vocabulary:
            known = f"this model knows {bounds.vocabulary} tokens"
            raise ApiError(400, f"There is no token {largest}: {known}, counted from 0.", param="prompt")
    for prompt in prompts:
        _check_prompt(prompt, bounds, "messages" if isinstance(asked, ChatRequest) else "prompt")
    return [tuple(prompt) for prompt in prompts]


def requests(
    asked: ChatRequest | CompletionRequest, prompts: list[tuple[int, ...]], bounds: Bounds, salt: str, owner: str
) -> list[Request]:
    """A request to the engine for each choice, those of the first prompt first."""
    tokens, stop = _tokens(asked, bounds), asked.stop or ()
    return [
        Request(
            prompt,
            _sampling(asked, choice),
            tokens,
            (stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=bool(asked.ignore_eos),
            logprobs=_logprobs(asked),
            salt=f"{salt}/{asked.cache_salt}" if asked.cache_salt else salt,
            owner=owner,
        )
        for prompt in prompts
        for choice in range(asked.n or 1)
    ]


def _encode_chat(text: Text, messages: list[dict[str, Any]], bounds: Bounds) -> list[int]:
    if text.chat is None:
        return text.encode_chat(messages)  # says what is wrong
    return _encode(text, text.chat.render(messages), bounds, special=False)


def _encode(text: Text, prompt: str, bounds: Bounds, special: bool = True) -> list[int]:
    """As `Text.encode`, by a call that lets other threads run: what is long takes a second for a million characters."""
    if len(prompt) > bounds.characters:
        raise _too_long(f"{len(prompt)} characters, which cannot be {bounds.prompt} tokens, the most it may have")
    return list(text.tokenizer.encode_batch_fast([prompt], add_special_tokens=special)[0].ids)


def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of a text that one token can stand for at most; normalizers may drop some of them before."""
    return max(map(len, tokenizer.get_vocab())) * (1 if tokenizer.normalizer is None else 4)


def _turn(message: Said | Answered) -> dict[str, Any]:
    """A message as templates know it: text in one piece, and no role that is OpenAI's alone."""
    content = message.content
    if content is None:
        content = (isinstance(message, Answered) and message.refusal) or ""
    elif not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    turn = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return turn if message.name is None else {**turn, "name": message.name}


async def _aside(size: int, work: Callable[[], Any], param: str) -> Any:
    try:
        return work() if size < ASIDE else await asyncio.to_thread(work)
    except (UsageError, ModelError) as error:
        raise ApiError(400, str(error), param=param) from error
    except ApiError as error:
        error.param = param
        raise


def _check_prompt(prompt: list[int], bounds: Bounds, param: str) -> None:
    if not prompt:
        raise ApiError(400, "The prompt is empty, and this model has no begin token.", param=param)
    if len(prompt) > bounds.prompt:
        raise _too_long(f"{len(prompt)} tokens, but may have {bounds.prompt} at most", param)


def _too_long(what: str, param: str | None = None) -> ApiError:
    return ApiError(400, f"The prompt has {what}.", param=param, code="context_length_exceeded")


def _tokens(asked: ChatRequest | CompletionRequest, bounds: Bounds) -> int:
    if isinstance(asked, ChatRequest):
        name = "max_completion_tokens" if asked.max_completion_tokens is not None else "max_tokens"
        tokens = asked.max_completion_tokens or asked.max_tokens or min(CHAT_TOKENS, bounds.tokens)
    else:
        name, tokens = "max_tokens", asked.max_tokens or min(DEFAULT_TOKENS, bounds.tokens)
    if tokens > bounds.tokens:
        raise ApiError(400, f"{name} is {tokens}, but may be {bounds.tokens} at most.", param=name)
    return tokens


def _sampling(asked: ChatRequest | CompletionRequest, choice: int) -> Sampling:
    """The choices of one seed are not alike, but the same ones each time."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return Sampling(
        temperature if temperature >= COLDEST else 0.0,
        max(asked.top_k or 0, 0),
        1.0 if asked.top_p is None else asked.top_p,
        asked.min_p or 0.0,
        1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        None if asked.seed is None else (asked.seed + choice) % 2**64,
    )


def _logprobs(asked: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(asked, CompletionRequest):
        return asked.logprobs
    if asked.logprobs:
        return asked.top_logprobs or 0
    if asked.top_logprobs is not None:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None
