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

Ignored = Annotated[Any, WithJsonSchema({})]
"""Cannot change the answer."""


@dataclass(frozen=True)
class Only:
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


def _whole(text: str) -> str:
    """JSON can hold halves of characters, which no tokenizer takes; strings with limits are checked anyway."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("half_character", "it holds half of a character (a lone surrogate)") from None
    return text


Words = Annotated[str, AfterValidator(_whole)]


def _shape(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, str):
        return "one text" if first is value else "several texts"
    return "several in tokens" if isinstance(first, list) and first is not value else "one in tokens"


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Asked):
    """How a stream is written."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class TextPart(_Asked):
    """A part of a message."""

    type: Literal["text"]
    text: Words


class Said(_Asked):
    """What the model was told."""

    role: Literal["system", "developer", "user"]
    content: Words | Annotated[list[TextPart], Field(min_length=1)]
    name: Words | None = None


class Answered(_Asked):
    """What it said, as clients give it back."""

    role: Literal["assistant"]
    content: Words | list[TextPart] | None = None
    name: Words | None = None
    refusal: Words | None = None
    annotations: Ignored = None
    tool_calls: Annotated[Any, Only(([],))] = None
    function_call: Annotated[Any, Only()] = None
    audio: Annotated[Any, Only()] = None


Message = Annotated[Said | Answered, Field(discriminator="role")]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Generation(_Asked):
    """What both routes know."""

    model: Words
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
        Only(
            (
                0,
                0.0,
            )
        ),
    ] = None
    frequency_penalty: Annotated[
        Any,
        Only(
            (
                0,
                0.0,
            )
        ),
    ] = None
    logit_bias: Annotated[Any, Only(({},))] = None
    user: Ignored = None


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[Any, Only(({"type": "text"},))] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    tools: Annotated[Any, Only(([],))] = None
    tool_choice: Annotated[
        Any,
        Only(
            (
                "none",
                "auto",
            )
        ),
    ] = None
    functions: Annotated[Any, Only(([],))] = None
    function_call: Annotated[
        Any,
        Only(
            (
                "none",
                "auto",
            )
        ),
    ] = None
    audio: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only()] = None
    verbosity: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    parallel_tool_calls: Ignored = None
    prediction: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None


class CompletionRequest(_Generation):
    """`POST /v1/completions`"""

    prompt: Annotated[
        Annotated[Words, Tag("one text")]
        | Annotated[list[Words], Field(min_length=1, max_length=MOST_PROMPTS), Tag("several texts")]
        | Annotated[Tokens, Tag("one in tokens")]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS), Tag("several in tokens")],
        Discriminator(_shape),
    ]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Annotated[Any, Only((False,))] = None
    suffix: Annotated[Any, Only(("",))] = None
    best_of: Annotated[Any, Only((1,))] = None


class TokenLikelihood(BaseModel):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChosenLikelihood(TokenLikelihood):
    """The token that was drawn."""

    top_logprobs: list[TokenLikelihood]


class ChatLogprobs(BaseModel):
    """How likely each token of a message was."""

    content: list[ChosenLikelihood]
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


Finished = Literal["stop", "length"]


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
    finish_reason: Finished


class CompletionChoice(BaseModel):
    """One of the answers, in the form of the older route."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finished


class _Made(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_Made):
    """The answer to a conversation."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class Completion(_Made):
    """The continuation of a text."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class Model(BaseModel):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["inlay"] = "inlay"
    max_model_len: int


class Models(BaseModel):
    """All of them: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class About(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """An error, as every route writes it."""

    error: About
