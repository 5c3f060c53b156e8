"""What clients may ask, field by field. OpenAI's names, and vLLM's for what OpenAI does not have.

A field that would change the answer and that this server does not know how to follow is refused, not passed over; so is
a name nobody knows, which is most often a typing error. Fields that cannot change an answer are taken and not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, core_schema

MOST_CHOICES = 16
MOST_PROMPTS = 64
LONGEST_STOP = 256
"""Characters: every token is held against every stop string."""

IgnoredField = Annotated[Any, WithJsonSchema({})]
"""Cannot change the answer."""


@dataclass(frozen=True)
class Unsupported:
    """Marks a field that may only have values that ask for nothing."""

    neutral: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        """Refuse all others."""
        if value is None or any(value == each and type(value) is type(each) for each in self.neutral):
            return value
        raise PydanticCustomError("unsupported", "this server cannot follow it: leave it out")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}


def _check_surrogates(text: str) -> str:
    """JSON can hold halves of characters, which no tokenizer takes; strings with limits are checked anyway."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("half_character", "it holds half of a character (a lone surrogate)") from None
    return text


ValidText = Annotated[str, AfterValidator(_check_surrogates)]


def _shape(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, str):
        return "one text" if first is value else "several texts"
    return "several in tokens" if isinstance(first, list) and first is not value else "one in tokens"


class _RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_RequestModel):
    """How a stream is written."""

    include_usage: bool | None = None
    include_obfuscation: IgnoredField = None


class TextPart(_RequestModel):
    """A part of a message."""

    type: Literal["text"]
    text: ValidText


class InputMessage(_RequestModel):
    """What the model was told."""

    role: Literal["system", "developer", "user"]
    content: ValidText | Annotated[list[TextPart], Field(min_length=1)]
    name: ValidText | None = None


class AssistantInputMessage(_RequestModel):
    """What it said, as clients give it back."""

    role: Literal["assistant"]
    content: ValidText | list[TextPart] | None = None
    name: ValidText | None = None
    refusal: ValidText | None = None
    annotations: IgnoredField = None
    tool_calls: Annotated[Any, Unsupported(([],))] = None
    function_call: Annotated[Any, Unsupported()] = None
    audio: Annotated[Any, Unsupported()] = None


Message = Annotated[InputMessage | AssistantInputMessage, Field(discriminator="role")]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _GenerationRequest(_RequestModel):
    """What both routes know."""

    model: ValidText
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # as vLLM names them
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # beyond, scores are no numbers
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    # those that must not ask for anything
    presence_penalty: Annotated[
        Any,
        Unsupported(
            (
                0,
                0.0,
            )
        ),
    ] = None
    frequency_penalty: Annotated[
        Any,
        Unsupported(
            (
                0,
                0.0,
            )
        ),
    ] = None
    logit_bias: Annotated[Any, Unsupported(({},))] = None
    user: IgnoredField = None


class ChatRequest(_GenerationRequest):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[Any, Unsupported(({"type": "text"},))] = None
    modalities: Annotated[Any, Unsupported((["text"],))] = None
    tools: Annotated[Any, Unsupported(([],))] = None
    tool_choice: Annotated[
        Any,
        Unsupported(
            (
                "none",
                "auto",
            )
        ),
    ] = None
    functions: Annotated[Any, Unsupported(([],))] = None
    function_call: Annotated[
        Any,
        Unsupported(
            (
                "none",
                "auto",
            )
        ),
    ] = None
    audio: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    parallel_tool_calls: IgnoredField = None
    prediction: IgnoredField = None
    metadata: IgnoredField = None
    store: IgnoredField = None
    service_tier: IgnoredField = None
    safety_identifier: IgnoredField = None
    prompt_cache_key: IgnoredField = None
    prompt_cache_options: IgnoredField = None
    prompt_cache_retention: IgnoredField = None


class CompletionRequest(_GenerationRequest):
    """`POST /v1/completions`"""

    prompt: Annotated[
        Annotated[ValidText, Tag("one text")]
        | Annotated[list[ValidText], Field(min_length=1, max_length=MOST_PROMPTS), Tag("several texts")]
        | Annotated[Tokens, Tag("one in tokens")]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS), Tag("several in tokens")],
        Discriminator(_shape),
    ]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Annotated[Any, Unsupported((False,))] = None
    suffix: Annotated[Any, Unsupported(("",))] = None
    best_of: Annotated[Any, Unsupported((1,))] = None


class TokenLogprob(BaseModel):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class SampledTokenLogprob(TokenLogprob):
    """The token that was drawn."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """How likely each token of a message was."""

    content: list[SampledTokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """The same, in the form of the older route."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class PromptDetails(BaseModel):
    """What is known about the tokens of a prompt."""

    cached_tokens: int
    """Those that did not have to be computed."""


class Usage(BaseModel):
    """How much was read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


ApiFinishReason = Literal["stop", "length"]


class AssistantMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ApiFinishReason


class CompletionChoice(BaseModel):
    """One of the answers, in the form of the older route."""

    index: int
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
    """The answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class CompletionResponse(_ResponseModel):
    """The continuation of a text."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["inlay"] = "inlay"
    max_model_len: int


class Models(BaseModel):
    """All of them: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error, as every route writes it."""

    error: ErrorDetail
