"""Request bodies of OpenAI's API: the supported fields, their types and bounds.

How many items a list may have is in ``body_limits``; of a list, the first wrong item is reported.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from triptych.core.errors import RequestError, Unsupported
from triptych.deployments.http.openai.validation_errors import (
    describe,
    dotted,
    misspelt_fields,
    nearest_field,
)

MAX_STOP_CHARS = 256
MAX_NAME_CHARS = 256
MAX_KL = 100.0
"""Largest limit of a KL in nats; one of 100 limits nothing."""
MAX_PROFILE_STEPS = 1000
MAX_PROFILE_S = 60.0
MAX_INT = 2**31 - 1
MAX_PRIORITY = 100
MIN_SLO_MS = 0.001
MAX_SLO_MS = 86_400_000
MIN_PENALTY = 0.01
"""A logit divided by this stays finite."""
MAX_PLUGINS = 32
MAX_OPTIONS = 32

MAX_REPORTED_ERRORS = 10
MAX_REPORTED_CHARS = 200


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate at character {error.start}") from error
    return text


def _text_or_image(part: object) -> object:
    kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("text", "image_url"):
        raise ValueError(f"only parts of type 'text' or 'image_url' are read, not {kind[:32]!r}")
    return cast("object", part)


def _part_kind(part: object) -> str:
    given = cast("dict[str, object]", part) if isinstance(part, dict) else {}
    return "@image" if given.get("type") == "image_url" else "@text"


def _kind(value: object) -> str:
    """The tag of the type that was given for a field of several types.

    The tags begin with ``@``, so that error paths can leave them out.
    """
    if not isinstance(value, list):
        return "@one"
    first = cast("list[object]", value)[:1]
    match first:
        case [list()]:
            return "@id lists"
        case [int()]:
            return "@ids"
        case _:
            return "@many"


def _one_or_many(value: object) -> str:
    return "@many" if isinstance(value, list) else "@one"


def _few_plugins(value: object) -> object:
    """Reject a large mapping before each of its entries is validated and reported."""
    given = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    if len(given) > MAX_PLUGINS:
        raise ValueError(f"expected at most {MAX_PLUGINS} plug-ins, not {len(given)}")
    for options in given.values():
        if isinstance(options, dict) and len(cast("dict[str, object]", options)) > MAX_OPTIONS:
            raise ValueError(f"expected at most {MAX_OPTIONS} options of a plug-in")
    return cast("object", value)


def _switch_kind(value: object) -> str:
    return "@switch" if isinstance(value, bool) else "@options"


Text = Annotated[str, AfterValidator(_well_formed)]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Milliseconds = Annotated[Finite, Field(ge=MIN_SLO_MS, le=MAX_SLO_MS)]
TokenId = Annotated[int, Field(ge=0, lt=2**63)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
PluginName = Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)]
PluginOverride = Annotated[
    Annotated[bool, Tag("@switch")] | Annotated[dict[PluginName, Finite], Tag("@options")],
    Discriminator(_switch_kind),
]
"""A plug-in on, off, or on with options."""
Stop = Annotated[
    Annotated[StopText, Tag("@one")]
    | Annotated[list[StopText], Field(fail_fast=True), Tag("@many")],
    Discriminator(_one_or_many),
]
Prompt = Annotated[
    Annotated[Text, Tag("@one")]
    | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("@many")]
    | Annotated[TokenIds, Tag("@ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("@id lists")],
    Discriminator(_kind),
]


class Body(BaseModel):
    """A JSON object: strict types, null means absent, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        given = cast("dict[str, object]", data)
        return {key: value for key, value in given.items() if value is not None}


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _well_formed_json(value: dict[str, object]) -> dict[str, object]:
    """Refuse lone surrogates, with which neither a prompt nor a grammar can be built."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text in it has a lone surrogate") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _parsed(schema: object) -> object:
    """Parse a schema that is sent as text, as vLLM allows."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise ValueError("the text is not JSON") from error


Pattern = Annotated[Text, Field(min_length=1)]
JsonObject = Annotated[dict[str, object], AfterValidator(_well_formed_json)]
Schema = Annotated[JsonObject, BeforeValidator(_parsed)]
Choices = Annotated[list[Text], Field(fail_fast=True)]


class JsonSchema(Body):
    """A schema with a name, as OpenAI wraps it."""

    name: Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    json_schema: JsonObject = Field(alias="schema", default_factory=dict[str, object])


class ResponseFormat(Body):
    """OpenAI's constraint of the output; ``regex`` is an extension of Together."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: Pattern | None = None
    """For ``regex``: a pattern that matches the whole output."""
    grammar: Pattern | None = None
    """For ``grammar``: rules in Lark's notation."""


class StructuredOutputs(Body):
    """vLLM's constraint of the output: exactly one of these fields."""

    json_schema: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None


class CompressionOptions(Body):
    """How the request may be compressed."""

    floor: Literal["low", "high"] = "low"
    """The lowest class that may store its tokens, where server and key allow a lower one."""
    method: Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """One of the compression methods that ``/v1/models`` lists; None: the default of the key or of
    the server."""
    max_kl: Annotated[Finite, Field(ge=0, le=MAX_KL)] | None = None
    """The largest KL to the full cache that its method may have; None or 0: what key and server
    say."""


class GenerationBody(Body):
    """Fields that chat completions and completions share."""

    model: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_INT)
    max_tokens: int | None = Field(None, ge=1, le=2**63 - 1)
    temperature: Finite = Field(1.0, ge=0, le=2)
    top_p: Finite = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_INT)
    min_p: Finite = Field(0.0, ge=0, le=1)
    presence_penalty: Finite = Field(0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(0.0, ge=-2, le=2)
    repetition_penalty: Finite = Field(1.0, ge=MIN_PENALTY, le=10)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] = Field(
        default_factory=dict[str, float]
    )
    stop: Stop = Field(default_factory=list[str])
    stop_token_ids: TokenIds = Field(default_factory=list[int])
    min_tokens: int = Field(0, ge=0, le=MAX_INT)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT)
    """Keep only this many last tokens of the prompt, as in vLLM; -1: as many as fit."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    ttft_slo_ms: Milliseconds | None = None
    tpot_slo_ms: Milliseconds | None = None
    deadline_ms: Milliseconds | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    session_id: Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    plugins: Annotated[dict[PluginName, PluginOverride], BeforeValidator(_few_plugins)] = Field(
        default_factory=dict[str, bool | dict[str, float]]
    )
    """Plug-ins of the decode step whose settings this request overrides."""
    compression: CompressionOptions = Field(default_factory=CompressionOptions)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def answer_tokens(self) -> tuple[int | None, str]:
        """The requested limit of output tokens, and the name of its field."""
        return self.max_tokens, "max_tokens"


class TextPart(Body):
    type: Literal["text"]
    text: Text


class ImageUrl(Body):
    url: Text
    """A data URI."""
    detail: Literal["auto", "low", "high"] = "auto"
    """No effect: the model's processor decides what is seen of an image."""


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[
    Annotated[TextPart, Tag("@text")] | Annotated[ImagePart, Tag("@image")],
    Discriminator(_part_kind),
]


def _arguments(value: object) -> object:
    """Arguments as JSON text. Clients send "" or null for none, and some send the object."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return "{}" if isinstance(value, str) and value.strip() in ("", "null") else value


def _is_json_object(text: str) -> str:
    try:
        # Python refuses integers of more than 4,300 digits, which are valid JSON.
        is_object = isinstance(json.loads(text, parse_int=float), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError("expected the text of a JSON object")
    return text


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(Body):
    """A tool's name, description and parameters."""

    name: ToolName
    description: Text = ""
    parameters: JsonObject = Field(default_factory=dict[str, object])
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: ToolName


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class FunctionCall(Body):
    name: ToolName
    arguments: Annotated[Text, BeforeValidator(_arguments), AfterValidator(_is_json_object)] = "{}"


class ToolCall(Body):
    """A tool call of an earlier assistant message."""

    id: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """``function`` is OpenAI's older form of ``tool``, without an id."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field(
        default_factory=list[ToolCall]
    )
    function_call: FunctionCall | None = None
    """OpenAI's older form of ``tool_calls``."""
    tool_call_id: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] = ""
    reasoning_content: Text = ""
    """Reasoning of an earlier assistant message, for templates that show it."""
    reasoning: Text = ""
    """The same; the newer name."""
    content: Annotated[
        Annotated[Text, Tag("@one")]
        | Annotated[
            list[Annotated[Part, BeforeValidator(_text_or_image)]],
            Field(fail_fast=True),
            Tag("@many"),
        ],
        Discriminator(_one_or_many),
    ]

    @model_validator(mode="before")
    @classmethod
    def _empty_content(cls, data: object) -> object:
        """Calls and results have no content in many histories."""
        if not isinstance(data, dict):
            return data
        given = cast("dict[str, object]", data)
        may_be_empty = given.get("role") in ("assistant", "tool", "function")
        return {**given, "content": ""} if may_be_empty and given.get("content") is None else given

    @property
    def calls(self) -> list[FunctionCall]:
        """The calls of an assistant's message, in either form."""
        if self.role != "assistant":
            return []
        older = [self.function_call] if self.function_call and not self.tool_calls else []
        return [call.function for call in self.tool_calls] + older

    @property
    def text(self) -> str:
        parts = self.content
        if isinstance(parts, str):
            return parts
        return "\n".join(part.text for part in parts if isinstance(part, TextPart))

    @property
    def images(self) -> list[tuple[int, str]]:
        """Images: which part of the content, and its URL."""
        parts = [] if isinstance(self.content, str) else self.content
        return [
            (index, part.image_url.url)
            for index, part in enumerate(parts)
            if isinstance(part, ImagePart)
        ]

    @property
    def _content_for_template(self) -> str | list[dict[str, str]]:
        """The text, or a list of parts if there are images."""
        if isinstance(self.content, str) or not self.images:
            return self.text
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in self.content
        ]

    def for_template(self) -> dict[str, object]:
        # OpenAI's newer name of the system role; no chat template knows it.
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, object] = {"role": role, "content": self._content_for_template}
        reasoning = self.reasoning_content or self.reasoning
        return turn | {"reasoning_content": reasoning} if reasoning else turn


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class Rendering(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The output continues the last message instead of starting a new one."""
    chat_template_kwargs: JsonObject = Field(default_factory=dict[str, object])
    """Variables of the model's chat template."""
    reasoning_effort: Annotated[Text, Field(min_length=1, max_length=32)] | None = None
    """OpenAI's field; ``none`` turns reasoning off, where the chat template can."""
    documents: list[JsonObject] = Field(default_factory=list[dict[str, object]])
    """For chat templates that have documents."""
    chat_template: object = None


class ChatBody(GenerationBody, Rendering):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=2**63 - 1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default_factory=list[Tool])
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("@one")]
            | Annotated[NamedTool, Tag("@named")],
            Discriminator(lambda value: "@one" if isinstance(value, str) else "@named"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    """Whether the answer has ``reasoning_content``."""
    functions: list[object] = Field(default_factory=list[object])

    @property
    def answer_tokens(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is None:
            return super().answer_tokens
        return self.max_completion_tokens, "max_completion_tokens"


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, le=2**63 - 1)
    """0 is allowed with ``echo``: only the prompt with its log probabilities is returned."""
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str = ""
    best_of: int = Field(1, ge=1, le=MAX_INT)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each either a text or token ids."""
        match self.prompt:
            case str():
                return [self.prompt]
            case [int(), *_]:
                return [self.prompt]
            case _:
                return cast("list[str] | list[list[int]]", self.prompt)


class TokenizeBody(Rendering):
    """``POST /tokenize``: a raw prompt, or messages."""

    model: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field(default_factory=list[Tool])
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: Annotated[Text, Field(max_length=MAX_NAME_CHARS)] | None = None
    tokens: TokenIds


class ProfileBody(Body):
    """``POST /profile``: the length of the profile."""

    steps: Annotated[int, Field(ge=1, le=MAX_PROFILE_STEPS)] = 100
    """Most steps of each stage."""
    seconds: Annotated[float, Field(gt=0, le=MAX_PROFILE_S)] = 10.0
    trace: bool = False
    """Whether to return the events of every step as well."""


B = TypeVar("B", bound=Body)

IGNORED_FIELDS = {
    "metadata", "modalities", "prompt_cache_key", "request_id",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
}  # fmt: skip
"""Fields of OpenAI's and vLLM's APIs that have no effect here."""

UNSUPPORTED_FIELDS = {
    "add_special_tokens": "chat templates write special tokens themselves",
    "allowed_token_ids": "use structured_outputs, or logit_bias",
    "audio": "answers are texts",
    "bad_words": "use logit_bias",
    "logits_processors": "use structured_outputs, or a plug-in of the decode step",
    "logprob_token_ids": "use top_logprobs",
    "media_io_kwargs": "images are read as the model's processor says",
    "mm_processor_kwargs": "images are read as the model's processor says",
    "prefix": "use continue_final_message",
    "prompt_embeds": "send tokens or a text",
    "return_tokens_as_token_ids": "use return_token_ids",
    "thinking_token_budget": "use max_tokens, or reasoning_effort",
    "use_beam_search": "sample with n instead",
    "web_search_options": "there is no search: send a tool",
}
"""Fields that would change an answer and are not done, and what to use instead."""


def check_supported(kind: type[Body], data: Mapping[str, object]) -> None:
    """Raise Unsupported for a field that would change the answer and is not done.

    Null, false and empty values change nothing.
    """
    known = kind.model_fields.keys()
    for name, hint in UNSUPPORTED_FIELDS.items():
        if name not in known and data.get(name):
            raise Unsupported(f"{name}: not supported; {hint}", name)


def check_known(kind: type[Body], data: Mapping[str, object]) -> None:
    """Raise RequestError for an unknown field, such as a misspelt one."""
    known = {info.alias or name for name, info in kind.model_fields.items()} | IGNORED_FIELDS
    for name in data:
        if name not in known:
            shown, near = name[:MAX_REPORTED_CHARS], nearest_field(name, known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise RequestError(f"{shown!r}: there is no such field{hint}", shown)


def warnings_of(kind: type[Body], data: Mapping[str, object]) -> str:
    """Value of the header ``X-Triptych-Warning``: unknown fields that resemble known ones; empty if
    there is none."""
    return "; ".join(misspelt_fields(kind, data, IGNORED_FIELDS))


def validate(kind: type[B], data: Mapping[str, object]) -> B:
    """Check a parsed body.

    Raises: RequestError naming the first wrong field as a dotted path, with a message
        whose size does not depend on what was sent
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        lines = [describe(fault, data) for fault in faults[:MAX_REPORTED_ERRORS]]
        if len(faults) > MAX_REPORTED_ERRORS:
            lines.append(f"and {len(faults) - MAX_REPORTED_ERRORS} more")
        raise RequestError("; ".join(lines), dotted(faults[0]["loc"])) from error
