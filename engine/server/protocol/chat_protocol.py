"""Request models of `/v1/chat/completions`: messages of text and images, tools and tool choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from ...base.sampling_params import SamplingParams
from ..parsing.formats import REASONING_FORMATS
from .errors import bad_field
from .generation_protocol import GenerationRequest, client_tools
from .structure import Constraint

MAX_PARTS = 4096
"""Limit, because parts are validated on the event loop."""


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message: a text, or the URL of an image."""

    text: str | None = None
    image_url: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The part as chat templates of image-text models receive it: of an image only that it is there."""
        return {"type": "image"} if self.text is None else {"type": "text", "text": self.text}


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


IMAGE_NOTE = "[an image, which this model cannot see: it reads text alone]"


def without_images(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put a note in the place of each image of a conversation in OpenAI's form."""

    note, readable = {"type": "text", "text": IMAGE_NOTE}, []
    for turn in turns:
        content = turn.get("content")
        if isinstance(content, list):
            content = [note if part.get("type") == "image_url" else part for part in content]
        readable.append({**turn, "content": content})
    return readable


def chat_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call by the assistant, in OpenAI's form; `arguments` as text, but for templates."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def bounded_parts(content: Any) -> Any:
    """A message's content. Raises `ValueError`: it has too many parts."""
    if isinstance(content, list) and len(content) > MAX_PARTS:
        raise ValueError(f"{len(content)} content parts: at most {MAX_PARTS}")
    return content


def _part(part: Any) -> ContentPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return ContentPart(text=part["text"])
    if kind == "image_url":
        # `detail` has no effect: the model's processor says how many tokens an image takes.
        named = part.get("image_url")
        url = named.get("url") if isinstance(named, dict) else named
        if isinstance(url, str) and url:
            return ContentPart(image_url=url)
        raise ValueError('a part of type "image_url" needs {"image_url": {"url": "..."}}')
    raise ValueError(f"content parts of type {kind!r} are not supported: text and image_url only")


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionCall(BaseModel):
    """A function call by the assistant; `arguments` is a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One of a message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """A message of a conversation: text, images, tool calls, or a tool's result."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    parts: tuple[ContentPart, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _texts_and_images(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("need an object with role and content")
        # OpenAI's older form of a tool's result, and of a call.
        if value.get("role") == "function" and value.get("name"):
            value = {**value, "role": "tool"}
        if isinstance(call := value.get("function_call"), dict) and not value.get("tool_calls"):
            calls = [chat_call(None, call.get("name"), call.get("arguments"))]
            value = {**value, "tool_calls": calls}
        # vLLM's newer name: https://docs.vllm.ai/en/v0.11.2/features/reasoning_outputs/
        if isinstance(reasoning := value.get("reasoning"), str):
            value = {**value, "reasoning_content": value.get("reasoning_content") or reasoning}
        content, parts = value.get("content"), ()
        if isinstance(content, list):
            parts = tuple(map(_part, bounded_parts(content)))
            content = "\n".join(part.text for part in parts if part.text is not None)
        if content is None and not value.get("tool_calls") and not value.get("reasoning_content"):
            raise ValueError("content is missing")
        has_image = any(part.image_url for part in parts)
        return {**value, "content": content, "parts": parts if has_image else ()}

    @model_validator(mode="after")
    def _calls_are_the_assistants(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} has no tool_calls")
        return self

    @property
    def image_urls(self) -> list[str]:
        return [part.image_url for part in self.parts if part.image_url]

    def for_template(self, *, as_parts: bool = False) -> dict[str, Any]:
        """The message as the chat template receives it; a text as a list of one part where `as_parts`."""
        content: Any = self.content or ""
        if self.parts or as_parts:
            content = [part.for_template() for part in self.parts or (ContentPart(content),)]
        # Few templates know OpenAI's newer name for the role.
        role = "system" if self.role == "developer" else self.role
        fields: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            fields["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        return fields


class Function(BaseModel):
    """Name, description and parameters of a tool; `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One of a request's `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class FunctionName(BaseModel):
    """The name in a `tool_choice`."""

    name: str


class NamedTool(BaseModel):
    """A `tool_choice` that forces one tool."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunction(BaseModel):
    """One of the tools that an `allowed_tools` names."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedToolList(BaseModel):
    """The tools of an `allowed_tools`, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[AllowedFunction], Field(min_length=1, max_length=128), client_tools(None, "function")
    ]


class AllowedTools(BaseModel):
    """A `tool_choice` among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


MAX_MESSAGES = 4096
"""Limit, because a conversation is validated on the event loop."""
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def continued(messages: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Fields of a request that continues a last turn of the assistant, as Anthropic's and Ollama's do. A turn
    with its reasoning is not continued: templates cut that out, so that there is no end to go on from."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last["content"] or last.get("tool_calls"):
        return {}
    if any(form.end in str(last["content"]) for form in REASONING_FORMATS.values()):
        return {}
    return {"continue_final_message": True, "add_generation_prompt": False}


class PromptEnd(BaseModel):
    """How the prompt of a conversation ends, by vLLM's fields."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _begins_or_continues(self) -> PromptEnd:
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise ValueError("continue_final_message needs add_generation_prompt = false")
        return self

    @property
    def prompt_end(self) -> dict[str, bool]:
        continues = {"continue_final_message": True} if self.continue_final_message else {}
        return {"add_generation_prompt": self.add_generation_prompt is not False, **continues}


class ChatRequest(PromptEnd, GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128), client_tools("function")] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    has_functions: SkipJsonSchema[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _functions_are_tools(cls, value: Any) -> Any:
        """OpenAI's older form of tools and of their choice."""
        if not isinstance(value, dict):
            return value
        fields = {key: field for key, field in value.items() if key != "has_functions"}
        if not isinstance(fields.get("functions"), list):
            return fields
        functions, choice = fields.pop("functions"), fields.pop("function_call", None)
        if functions and not fields.get("tools"):
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
            named = {"type": "function", "function": choice}
            fields["tool_choice"] = named if isinstance(choice, dict) else choice
            fields["has_functions"] = True
        return fields

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs = true")
        return self

    @model_validator(mode="after")
    def _a_choice_needs_tools(self) -> ChatRequest:
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError(
                "tool_choice asks for a tool, and there are no tools (hosted ones are left out)"
            )
        known = [tool.function.name for tool in self.tools or ()]
        if unknown := next((name for name in self._chosen if name not in known), None):
            problem = "which is none of the tools (hosted ones are left out)"
            raise ValueError(f"tool_choice names {unknown!r}, {problem}")
        return self

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call; they are passed to the chat template."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in tools if tool.function.name in self._chosen]
        return tools

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice not in (None, "none", "auto")

    @property
    def is_forced_json(self) -> bool:
        """True if calls are JSON by a grammar, whatever the model's own format."""
        answer = self.answer_constraint()
        is_shaped = answer is not None and answer.kind != "structural_tag"
        return self.must_call or (bool(self.usable_tools) and is_shaped)

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template; those for the reasoning effort are what common templates read."""
        effort, chosen = self.reasoning_effort, {}
        if effort == "none":
            chosen = {"enable_thinking": False, "thinking": False}
        elif effort is not None:
            chosen = {"enable_thinking": True, "thinking": True, "reasoning_effort": effort}
        return {**self.prompt_end, **chosen, **(self.chat_template_kwargs or {})}

    def answer_constraint(self) -> Constraint | None:
        return super().constraint()

    @property
    def _chosen(self) -> list[str]:
        match self.tool_choice:
            case NamedTool(function=function):
                return [function.name]
            case AllowedTools(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return []

    def constraint(self) -> Constraint | None:
        """The grammar of the output: of the calls where there must be some, of the answer, or of either."""
        constraint = self.answer_constraint()
        # A JSON format is of an answer in text. instructor's RESPONSES_TOOLS sends it with a forced call.
        if self.must_call and constraint is not None and constraint.kind != "json_schema":
            problem = "the output must be a tool call (tool_choice), not an answer"
            raise bad_field(constraint.field, problem)
        if self.must_call:
            return Constraint("json_schema", calls_schema(self), "tools")
        if constraint is None or not self.usable_tools or constraint.kind == "structural_tag":
            return constraint
        if constraint.kind != "json_schema" or constraint.value.get("type") != "object":
            raise bad_field(constraint.field, "beside tools, only a JSON schema of an object")
        either = either_schema(constraint.value, calls_schema(self))
        return Constraint("json_schema", either, constraint.field)

    def sampling_params(self) -> SamplingParams:
        """Without a limit, the output may fill the context."""
        limit = self.max_completion_tokens
        num_scored = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(self.max_tokens if limit is None else limit, num_scored)


def calls_schema(request: ChatRequest) -> dict[str, Any]:
    """JSON schema of `[{"name": ..., "arguments": {...}}, ...]`, which the format `FORCED` parses. Raises
    `ApiError`: as `either_schema`."""
    tools, choice = request.usable_tools, request.tool_choice
    is_single = isinstance(choice, NamedTool) or request.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name][:1]
    shared: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object"})
        # Only declared arguments are allowed, unless the schema permits others.
        parameters.setdefault("additionalProperties", False)
        _share(parameters, shared)
        properties = {"name": {"const": tool.function.name}, "arguments": parameters}
        call = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append({**call, "additionalProperties": False})
    most = {"maxItems": 1} if is_single else {}
    return {**shared, "type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}


def either_schema(answer: dict[str, Any], calls: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of an answer or of calls. Raises `ApiError`: both define something else under one name."""
    shared: dict[str, Any] = {}
    answer, calls = dict(answer), dict(calls)
    _share(answer, shared)
    _share(calls, shared)
    return {**shared, "anyOf": [answer, calls]}


def _share(schema: dict[str, Any], shared: dict[str, Any]) -> None:
    """Move a schema's definitions to those at the root, where references find them."""
    for key in ("$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            for name, value in schema.pop(key).items():
                if shared.setdefault(key, {}).setdefault(name, value) != value:
                    raise bad_field("tools", f"{key}/{name} has two meanings")
