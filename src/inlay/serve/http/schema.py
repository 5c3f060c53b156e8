"""Request models of the HTTP API. Fields have OpenAI's names, or vLLM's names where OpenAI has none.

Unsupported fields that would change the output are rejected, not ignored. Unknown fields are rejected too, because most
are typing errors. Fields that cannot change the output are accepted and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

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
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

MOST_CHOICES = 16
MOST_PROMPTS = 64
MOST_TOOLS = 128
MOST_TEXTS = 2048
MOST_BIASES = 1024
LONGEST_STOP = 256
"""In characters. The limit exists because the text is compared with every stop string at every token."""

IgnoredField = Annotated[Any, WithJsonSchema({})]
"""A field that is accepted and ignored, because it cannot change the output."""


@dataclass(frozen=True, eq=False)  # typing takes equal annotations for one, and 0 is equal to False
class Unsupported:
    """Marks a field that this server does not support. Only None and neutral values are accepted."""

    neutral: tuple[Any, ...] = ()

    def check(self, value: Any) -> Any:
        """Return a neutral value unchanged; reject any other value."""
        if value is None or any(value == each and type(value) is type(each) for each in self.neutral):
            return value
        raise PydanticCustomError("unsupported", "this server does not support it; leave it out")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}


def _check_surrogates(text: str) -> str:
    """Reject lone surrogates: JSON allows them, tokenizers do not. pydantic checks strings that have limits itself."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("half_character", "it contains half of a character (a lone surrogate)") from None
    return text


ValidText = Annotated[str, AfterValidator(_check_surrogates)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
TokenKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
"""A token as a key of JSON."""


def _shape(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, str):
        return "one text" if first is value else "several texts"
    return "several in tokens" if isinstance(first, list) and first is not value else "one in tokens"


class _RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_RequestModel):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: IgnoredField = None


class TextPart(_RequestModel):
    """A text part of a message."""

    type: Literal["text"]
    text: ValidText


class InputMessage(_RequestModel):
    """A system, developer or user message."""

    role: Literal["system", "developer", "user"]
    content: ValidText | Annotated[list[TextPart], Field(min_length=1)]
    name: ValidText | None = None


class CalledFunction(_RequestModel):
    """A function and its arguments, which are JSON in a text."""

    name: FunctionName
    arguments: ValidText


class ToolCall(_RequestModel):
    """A call in an earlier assistant message, as clients send it back."""

    id: ValidText
    type: Literal["function"]
    function: CalledFunction
    index: IgnoredField = None


class AssistantInputMessage(_RequestModel):
    """An earlier assistant message, as clients send it back."""

    role: Literal["assistant"]
    content: ValidText | list[TextPart] | None = None
    name: ValidText | None = None
    refusal: ValidText | None = None
    annotations: IgnoredField = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    reasoning_content: ValidText | None = None
    function_call: Annotated[Any, Unsupported()] = None
    audio: Annotated[Any, Unsupported()] = None


class ToolMessage(_RequestModel):
    """The result of a call."""

    role: Literal["tool"]
    content: ValidText | list[TextPart]
    tool_call_id: ValidText
    name: ValidText | None = None


Message = Annotated[InputMessage | AssistantInputMessage | ToolMessage, Field(discriminator="role")]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class Function(_RequestModel):
    """A function that the model may call."""

    name: FunctionName
    description: ValidText | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Accepted for OpenAI's clients. Calls that `tool_choice` forces always follow the schema."""


class Tool(_RequestModel):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(_RequestModel):
    """The name of a function."""

    name: FunctionName


class NamedTool(_RequestModel):
    """A tool that the model must use."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(_RequestModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(_RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(_RequestModel):
    """A JSON schema with a name."""

    name: Annotated[str, Field(max_length=64)]
    description: IgnoredField = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Accepted for OpenAI's clients. Answers always follow the schema."""


class JsonSchemaFormat(_RequestModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(_RequestModel):
    """What the answer must be: exactly one of the fields, which have vLLM's names."""

    json_: Annotated[dict[str, Any] | ValidText | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: ValidText | None = None
    choice: Annotated[list[Annotated[ValidText, Field(min_length=1)]], Field(min_length=1, max_length=1024)] | None = (
        None
    )
    grammar: ValidText | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if sum(getattr(self, name) is not None for name in type(self).model_fields) != 1:
            raise PydanticCustomError("one_constraint", "send exactly one of json, json_object, regex, choice, grammar")
        return self


class _GenerationRequest(_RequestModel):
    """Fields that both generation routes accept."""

    model: ValidText
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # vLLM's names
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # outside it logits may not be finite
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: Annotated[ResponseFormat, Field(discriminator="type")] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)] | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # not supported: neutral values only
    stop_token_ids: Annotated[Any, Unsupported(([],))] = None
    skip_special_tokens: Annotated[Any, Unsupported((True,))] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported((True,))] = None
    include_stop_str_in_output: Annotated[Any, Unsupported((False,))] = None
    no_stop_trim: Annotated[Any, Unsupported((False,))] = None
    return_hidden_states: Annotated[Any, Unsupported((False,))] = None
    kv_transfer_params: Annotated[Any, Unsupported()] = None
    priority: IgnoredField = None
    request_id: IgnoredField = None
    user: IgnoredField = None


class ChatRequest(_GenerationRequest):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: Annotated[Any, Unsupported((["text"],))] = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    """False: the reasoning stays in the content."""
    include_reasoning: bool | None = None
    """False: the reasoning is not returned."""
    functions: Annotated[Any, Unsupported(([],))] = None
    function_call: Annotated[Any, Unsupported(("none", "auto"))] = None
    audio: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    add_generation_prompt: Annotated[Any, Unsupported((True,))] = None
    continue_final_message: Annotated[Any, Unsupported((False,))] = None
    add_special_tokens: Annotated[Any, Unsupported((False,))] = None
    chat_template: Annotated[Any, Unsupported()] = None
    stream_reasoning: IgnoredField = None
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
    echo: bool | None = None
    suffix: Annotated[Any, Unsupported(("",))] = None
    best_of: Annotated[Any, Unsupported((1,))] = None
    add_special_tokens: Annotated[Any, Unsupported((True,))] = None


class EmbeddingRequest(_RequestModel):
    """`POST /v1/embeddings`"""

    model: ValidText
    input: ValidText | Annotated[list[ValidText], Field(min_length=1, max_length=MOST_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: IgnoredField = None


class TokenizeRequest(_RequestModel):
    """`POST /tokenize`: a text, or the messages of a chat."""

    model: ValidText | None = None
    prompt: ValidText | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Annotated[Any, Unsupported((True,))] = None
    continue_final_message: Annotated[Any, Unsupported((False,))] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_RequestModel):
    """`POST /detokenize`"""

    model: ValidText | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
