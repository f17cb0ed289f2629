"""Request model of OpenAI's `/v1/responses`, and its translation into a chat request."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ...base.sampling_params import SamplingParams
from .chat_protocol import MAX_MESSAGES, ChatRequest, Function, ToolName, chat_call, image_part
from .errors import bad_field
from .generation_protocol import GenerationRequest, client_tools, is_hosted, unsupported
from .structure import ANY_OBJECT, Constraint, JsonSchemaFormat

LOGPROBS = "message.output_text.logprobs"
REASONING = "reasoning.encrypted_content"
"""Agents ask for it, and some send only that back: it is the text of the reasoning, which is no secret."""
_ENCODED = "llmopt:"

_TEXT_PARTS = ("input_text", "output_text", "text")


class TextFormat(JsonSchemaFormat):
    """`text.format`: plain text or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(BaseModel):
    """`text`: options of the output text."""

    model_config = ConfigDict(extra="allow")

    format: TextFormat = TextFormat()


class ReasoningOptions(BaseModel):
    """`reasoning`: its effort; summaries are not made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None


class FunctionTool(Function):
    """A function that the client offers."""

    type: Literal["function"]

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class Namespace(BaseModel):
    """Functions under a common name, which the model calls as `namespace.function`."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=128)]


class CustomTool(BaseModel):
    """A tool of free text, such as Codex' `apply_patch`: a function of one text to the model."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: dict[str, Any] | None = None

    @property
    def function(self) -> FunctionTool:
        """The tool as a function; a grammar of its text is told, not enforced."""
        lines, form = [self.description or ""], self.format or {}
        if isinstance(grammar := form.get("definition"), str):
            lines.append(f"The input follows this {form.get('syntax', '')} grammar:\n{grammar}")
        text = {"type": "string", "description": "the input as it is"}
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        fields = {"name": self.name, "description": "\n".join(filter(None, lines)) or None}
        return FunctionTool(type="function", **fields, parameters=parameters)


class ChosenTool(BaseModel):
    """A tool that a choice names."""

    type: Literal["function", "custom"]
    name: str

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class ResponsesAllowedTools(BaseModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[ChosenTool], Field(min_length=1, max_length=128), client_tools("function", "custom")
    ]

    def for_chat(self) -> dict[str, Any]:
        tools = [tool.for_chat() for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


class ResponsesChat(ChatRequest):
    """The chat request of a response; its schema is `text.format`'s."""

    answer_schema: dict[str, Any] | None = None

    def answer_constraint(self) -> Constraint | None:
        if self.answer_schema is None:
            return super().answer_constraint()
        return Constraint("json_schema", self.answer_schema, "text.format.schema")


class ResponsesRequest(GenerationRequest):
    """Body of `/v1/responses`."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None
    tools: (
        Annotated[
            list[FunctionTool | Namespace | CustomTool],
            Field(max_length=128),
            client_tools("function", "namespace", "custom"),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | ResponsesAllowedTools | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _is_no_hosted_tool(cls, choice: Any) -> Any:
        if is_hosted(choice) and choice["type"] != "allowed_tools":
            raise ValueError(f"{choice['type']!r} is hosted by its vendor, and cannot be used here")
        return choice

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.previous_response_id:
            problem = "responses are not stored: send the whole conversation as input"
            raise bad_field("previous_response_id", problem)
        for name in ("max_tokens", "response_format"):
            if getattr(self, name) is not None:
                raise unsupported(name)
        if self.num_completions > 1:
            raise unsupported("n")
        for field in self.include or ():
            if field not in (LOGPROBS, REASONING):
                raise unsupported(f"include {field!r}")

    def sampling_params(self) -> SamplingParams:
        return self.chat_request(self.turns).sampling_params()

    @property
    def functions(self) -> list[FunctionTool]:
        """All functions, those of a namespace under its name, and the tools of free text."""
        functions: list[FunctionTool] = []
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                functions.append(tool)
            elif isinstance(tool, CustomTool):
                functions.append(tool.function)
            else:
                for inner in tool.tools:
                    name = f"{tool.name}.{inner.name}"
                    functions.append(inner.model_copy(update={"name": name}))
        return functions

    def names_of(self, kind: type[Namespace | CustomTool]) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, kind))

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The input as chat messages. Raises `ApiError`: an item that is not supported."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        turns: list[dict[str, Any]] = []
        for item in self.input:
            _append(turns, item)
        return turns

    def chat_request(self, turns: Sequence[dict[str, Any]]) -> ResponsesChat:
        """The chat request for `turns`, the input's. Raises `ApiError`: content that is not supported;
        `ValidationError`: what a chat request refuses too."""
        system: list[dict[str, Any]] = []
        choice: Any = self.tool_choice
        if not (choice is None or isinstance(choice, str)):
            choice = choice.for_chat()
        if self.instructions is not None:
            system = [{"role": "system", "content": self.instructions}]
        wants_logprobs = LOGPROBS in (self.include or ())
        form = TextFormat() if self.text is None else self.text.format
        schema = ANY_OBJECT if form.schema_ is None else form.schema_
        shared = set(GenerationRequest.model_fields)
        fields = {
            "messages": [*system, *turns],
            "max_tokens": self.max_output_tokens,
            "logprobs": wants_logprobs,
            "top_logprobs": self.top_logprobs if wants_logprobs else None,
            "tools": [tool.for_chat() for tool in self.functions] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "answer_schema": None if form.type == "text" else schema,
        }
        common = self.model_dump(include=shared, exclude_unset=True, by_alias=True)
        return ResponsesChat.model_validate({**common, **fields})


def _append(turns: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Append an input item; reasoning and calls belong to the assistant's message around them."""
    kind = item.get("type", "message")
    if kind == "message":
        role, content = item.get("role"), _content(item.get("content"))
        if role == "assistant" and turns and turns[-1].get("content", "") is None:
            turns[-1]["content"] = content
        else:
            turns.append({"role": role, "content": content})
    elif kind == "reasoning":
        text = _text(item.get("content") or item.get("summary"))
        turn = _assistant(turns)
        thoughts = (turn.get("reasoning_content"), text or _decoded(item.get("encrypted_content")))
        turn["reasoning_content"] = "\n".join(filter(None, thoughts))
    elif kind in ("function_call", "custom_tool_call"):
        name, arguments = item.get("name"), item.get("arguments")
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
        elif item.get("namespace"):
            name = f"{item['namespace']}.{name}"
        call = chat_call(item.get("call_id"), name, arguments)
        _assistant(turns).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output, call_id = item.get("output"), item.get("call_id")
        parts = output if isinstance(output, list) else []
        images = [_image(part) for part in parts if _is_image(part)]
        if images:
            output = [part for part in parts if not _is_image(part)]
        turns.append({"role": "tool", "tool_call_id": call_id, "content": _text(output)})
        if images:  # templates read a tool's text alone
            turns.append({"role": "user", "content": images})
    else:
        raise bad_field("input", f"items of type {kind!r} are not supported")


def encoded_reasoning(text: str) -> str | None:
    """The reasoning as a client sends it back in `encrypted_content`."""
    return _ENCODED + b64encode(text.encode()).decode() if text else None


def _decoded(content: Any) -> str:
    """The reasoning in `encrypted_content`; none where another server has encrypted it."""
    if not isinstance(content, str) or not content.startswith(_ENCODED):
        return ""
    try:
        return b64decode(content.removeprefix(_ENCODED), validate=True).decode()
    except ValueError as error:
        raise bad_field("input", f"encrypted_content of a reasoning item: {error}") from error


def _assistant(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, made where there is none."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": None})
    return turns[-1]


def _content(content: Any) -> str | list[dict[str, Any]]:
    """A message's content: its text, or parts where there are images."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return _text(content)
    return [
        _image(part) if _is_image(part) else {"type": "text", "text": _text([part])}
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image(part: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(part.get("image_url"), str):
        problem = "content parts of type 'input_image' need image_url: no files are stored here"
        raise bad_field("input", problem)
    return image_part(part["image_url"])


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in (*_TEXT_PARTS, "reasoning_text", "summary_text"):
            raise bad_field("input", f"content parts of type {kind!r} are not supported")
        texts.append(str(part.get("text", "")))
    return "\n".join(texts)
