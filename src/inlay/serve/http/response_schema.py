"""Response models of the HTTP API. Fields have OpenAI's names, or vLLM's names where OpenAI has none."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class TokenLogprob(BaseModel):
    """A token and its logprob."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class SampledTokenLogprob(TokenLogprob):
    """The sampled token, with the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Logprobs of the tokens of a message."""

    content: list[SampledTokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Logprobs of the tokens of a completion, in the format of `/v1/completions`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptDetails(BaseModel):
    """Details of the prompt tokens."""

    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


ApiFinishReason = Literal["stop", "length", "tool_calls"]


class FunctionCall(BaseModel):
    """A function that the model calls."""

    name: str
    arguments: str
    """JSON. It may be incomplete or not fit the function, unless `tool_choice` forces the call."""


class AnswerToolCall(BaseModel):
    """A call that the model generated."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The message that the model generated."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class PromptToken(BaseModel):
    """A token that may be at a position of the prompt."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of the prompt, the tokens as numbers; None for the first."""


class _Choice(BaseModel):
    index: int
    prompt_logprobs: PromptLogprobs | None = None


class ChatChoice(_Choice):
    """One choice of a chat completion."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ApiFinishReason


class CompletionChoice(_Choice):
    """One choice of a text completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ApiFinishReason


class _ResponseModel(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatResponse(_ResponseModel):
    """The response of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class CompletionResponse(_ResponseModel):
    """The response of `/v1/completions`."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["inlay"] = "inlay"
    max_model_len: int


class Models(BaseModel):
    """The list of served models, which has one entry."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """Message, type, parameter and code of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The error response of every route."""

    error: ErrorDetail


class Embedding(BaseModel):
    """The embedding of a text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or float32 numbers of little-endian order in base64."""


class EmbeddingUsage(BaseModel):
    """Token counts of a request for embeddings."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    """The response of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
