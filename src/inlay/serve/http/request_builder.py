"""Conversion of HTTP requests to engine requests."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inlay.errors import ModelError, UsageError
from inlay.runtime.request import Request
from inlay.runtime.sampling import MIN_TEMPERATURE, Sampling
from inlay.serve.http.answer_form import tools_of
from inlay.serve.http.errors import ApiError
from inlay.serve.http.schema import AssistantInputMessage, ChatRequest, CompletionRequest, ToolMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tokenizers import Tokenizer

    from inlay.runtime.grammar import Grammar
    from inlay.runtime.text_codec import TextCodec
    from inlay.serve.http.answer_form import AnswerForm
    from inlay.serve.http.schema import InputMessage, TokenizeRequest, ToolCall

MAX_INLINE_CHARS = 4096
"""Prompts of this many characters or more are tokenized in another thread, to keep the event loop responsive."""
DEFAULT_TOKENS = 16
"""OpenAI's default for max_tokens in `/v1/completions`."""
CHAT_TOKENS = 1024
"""Default for max_tokens in chat. It stops a model that never emits an end token from filling its slot."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of prompts and of generated tokens."""

    max_prompt_tokens: int
    max_tokens: int
    vocab_size: int
    max_prompt_chars: int
    """A longer prompt exceeds `max_prompt_tokens` in any case, so it is rejected before it is tokenized."""


async def encode(
    body: ChatRequest | CompletionRequest, text: TextCodec, bounds: RequestLimits
) -> list[tuple[int, ...]]:
    """Return the prompts of a request as tokens."""
    if isinstance(body, ChatRequest):
        tools = () if body.tool_choice == "none" else tools_of(body)
        prompts = [await _encode_messages(body.messages, text, bounds, tools, _template_options(body, text))]
    elif isinstance(body.prompt, str) or isinstance(body.prompt[0], str):
        texts: Any = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        prompts = await _run_encoding(
            sum(map(len, texts)), lambda: [_encode(text, each, bounds) for each in texts], "prompt"
        )
    else:
        given: Any = body.prompt
        prompts = given if isinstance(given[0], list) else [given]
        for each in prompts:
            check_tokens(each, bounds, "prompt")
    for prompt in prompts:
        _check_prompt(prompt, bounds, "messages" if isinstance(body, ChatRequest) else "prompt")
    return [tuple(prompt) for prompt in prompts]


def prompt_texts(body: CompletionRequest, prompts: list[tuple[int, ...]], text: TextCodec) -> list[str]:
    """Return prompts as they were sent; those in tokens as text, with special tokens."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], str):
        return list(map(str, body.prompt))
    return [text.decode(list(tokens), with_special=True) for tokens in prompts]


async def encode_text(body: TokenizeRequest, text: TextCodec, bounds: RequestLimits) -> list[int]:
    """Return the tokens of a text or of the messages of a chat, which may be longer than a prompt."""
    unbounded = replace(bounds, max_prompt_chars=sys.maxsize)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Send either prompt or messages.", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            message = "The chat template writes the special tokens. Leave add_special_tokens out."
            raise ApiError(400, message, param="add_special_tokens")
        return await _encode_messages(body.messages, text, unbounded)
    prompt, special = body.prompt or "", body.add_special_tokens is not False
    made: list[int] = await _run_encoding(len(prompt), lambda: _encode(text, prompt, unbounded, special), "prompt")
    return made


def check_tokens(tokens: list[int], bounds: RequestLimits, param: str) -> None:
    """Raise an error if the vocabulary lacks a token."""
    if (largest := max(tokens, default=0)) >= bounds.vocab_size:
        known = f"The vocabulary has {bounds.vocab_size} tokens"
        raise ApiError(400, f"Token {largest} does not exist. {known}, counted from 0.", param=param)


def build_requests(
    body: ChatRequest | CompletionRequest,
    prompts: list[tuple[int, ...]],
    bounds: RequestLimits,
    id_: str,
    tenant: str,
    form: AnswerForm,
    grammar: Grammar | None = None,
) -> list[Request]:
    """Return one engine request for each prompt and choice, ordered by prompt."""
    tokens, stop = _tokens(body, bounds), body.stop or ()
    if (body.min_tokens or 0) > tokens:
        raise ApiError(400, f"min_tokens is {body.min_tokens}, but max_tokens is {tokens}.", param="min_tokens")
    check_tokens(list(map(int, body.logit_bias or ())), bounds, "logit_bias")
    return [
        Request(
            prompt,
            _sampling(body, choice),
            tokens,
            (stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=bool(body.ignore_eos),
            logprobs=_logprobs(body),
            prompt_logprobs=_prompt_logprobs(body),
            grammar=grammar,
            grammar_after=form.grammar_start if grammar else "",
            min_tokens=body.min_tokens or 0,
            with_special_tokens=form.needs_special_tokens,
            salt="/".join(filter(None, (tenant, body.cache_salt))),
            owner=tenant or id_,
            id=id_,
        )
        for prompt in prompts
        for choice in range(body.n or 1)
    ]


async def _encode_messages(
    messages: list[InputMessage | AssistantInputMessage | ToolMessage],
    text: TextCodec,
    bounds: RequestLimits,
    tools: Sequence[dict[str, Any]] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    turns = [_turn(message) for message in messages]

    def encode() -> list[int]:
        if text.chat is None:
            return text.encode_chat(turns)  # raises the error
        return _encode(text, text.chat.render(turns, tools, options), bounds, special=False)

    size = sum(len(each["content"]) for each in turns) + sum(len(str(each)) for each in tools)
    made: list[int] = await _run_encoding(size, encode, "messages")
    return made


def _template_options(body: ChatRequest, text: TextCodec) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets."""
    options, effort = dict(body.chat_template_kwargs or {}), body.reasoning_effort
    if effort is not None and text.chat is not None:
        if "reasoning_effort" not in text.chat.variables and "enable_thinking" in text.chat.variables:
            options.setdefault("enable_thinking", effort != "none")
        elif "reasoning_effort" in text.chat.variables:
            options["reasoning_effort"] = effort
        else:
            problem = "The chat template of this model has no setting for the reasoning. Leave reasoning_effort out."
            raise ApiError(400, problem, param="reasoning_effort")
    return options


def _encode(text: TextCodec, prompt: str, bounds: RequestLimits, special: bool = True) -> list[int]:
    """Like `TextCodec.encode`, but releases the GIL: a million characters take a second."""
    if len(prompt) > bounds.max_prompt_chars:
        raise _too_long(f"{len(prompt)} characters, which is more than {bounds.max_prompt_tokens} tokens, the limit")
    return list(text.tokenizer.encode_batch_fast([prompt], add_special_tokens=special)[0].ids)


def longest_token(tokenizer: Tokenizer) -> int:
    """Return the most characters that one token can represent. Normalizers may drop some, hence the factor."""
    return max(map(len, tokenizer.get_vocab())) * (1 if tokenizer.normalizer is None else 4)


def _turn(message: InputMessage | AssistantInputMessage | ToolMessage) -> dict[str, Any]:
    """Return a message for a chat template: content as one string, OpenAI's developer role as system."""
    content = message.content
    if content is None:
        content = (isinstance(message, AssistantInputMessage) and message.refusal) or ""
    elif not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    elif isinstance(message, AssistantInputMessage):
        if message.reasoning_content is not None:
            turn["reasoning_content"] = turn["thinking"] = message.reasoning_content  # templates differ
        if message.tool_calls:
            turn["tool_calls"] = [_call(each) for each in message.tool_calls]
    return turn if message.name is None else {**turn, "name": message.name}


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call for a chat template, which expects the arguments as an object."""
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The arguments of the call of {name} are not JSON.", param="messages") from error
    if not isinstance(arguments, dict):
        raise ApiError(400, f"The arguments of the call of {name} are not a JSON object.", param="messages")
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def _run_encoding(size: int, work: Callable[[], Any], param: str) -> Any:
    try:
        return work() if size < MAX_INLINE_CHARS else await asyncio.to_thread(work)
    except (UsageError, ModelError) as error:
        raise ApiError(400, str(error), param=param) from error
    except ApiError as error:
        error.param = param
        raise


def _check_prompt(prompt: list[int], bounds: RequestLimits, param: str) -> None:
    if not prompt:
        raise ApiError(400, "The prompt is empty, and this model has no BOS token. Send a prompt.", param=param)
    if len(prompt) > bounds.max_prompt_tokens:
        raise _too_long(f"{len(prompt)} tokens, but the limit is {bounds.max_prompt_tokens}", param)


def _too_long(what: str, param: str | None = None) -> ApiError:
    return ApiError(400, f"The prompt has {what}.", param=param, code="context_length_exceeded")


def _tokens(asked: ChatRequest | CompletionRequest, bounds: RequestLimits) -> int:
    if isinstance(asked, ChatRequest):
        name = "max_completion_tokens" if asked.max_completion_tokens is not None else "max_tokens"
        tokens = asked.max_completion_tokens or asked.max_tokens or min(CHAT_TOKENS, bounds.max_tokens)
    else:
        name, tokens = "max_tokens", asked.max_tokens or min(DEFAULT_TOKENS, bounds.max_tokens)
    if tokens > bounds.max_tokens:
        raise ApiError(400, f"{name} is {tokens}, but must be at most {bounds.max_tokens}.", param=name)
    return tokens


def _sampling(asked: ChatRequest | CompletionRequest, choice: int) -> Sampling:
    """Return the sampling parameters. Each choice has its own seed, derived deterministically from the request's."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    return Sampling(
        temperature if temperature >= MIN_TEMPERATURE else 0.0,
        max(asked.top_k or 0, 0),
        1.0 if asked.top_p is None else asked.top_p,
        asked.min_p or 0.0,
        1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        None if asked.seed is None else (asked.seed + choice) % 2**64,
        asked.presence_penalty or 0.0,
        asked.frequency_penalty or 0.0,
        tuple((int(token), bias) for token, bias in (asked.logit_bias or {}).items()),
    )


def _prompt_logprobs(asked: ChatRequest | CompletionRequest) -> int | None:
    """Return how many top logprobs of prompt tokens to compute. `echo` returns those of the prompt with the others."""
    is_echo = isinstance(asked, CompletionRequest) and asked.echo and asked.logprobs is not None
    if asked.stream and (is_echo or asked.prompt_logprobs is not None):
        raise ApiError(400, "Logprobs of the prompt and stream exclude each other.", param="stream")
    wanted = [each for each in (asked.prompt_logprobs, asked.logprobs if is_echo else None) if each is not None]
    return max(wanted) if wanted else None


def _logprobs(asked: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(asked, CompletionRequest):
        return asked.logprobs
    if asked.logprobs:
        return asked.top_logprobs or 0
    if asked.top_logprobs is not None:
        raise ApiError(400, "top_logprobs requires logprobs to be true.", param="top_logprobs")
    return None
