"""An OpenAPI document with the values that clients send: fields by name, in whatever body they are.

A document allows any string where a model or a grammar is named, and any number of tokens. Of bodies made
from it alone almost all are refused. Fields that are not named here stay as the document has them.
"""

from __future__ import annotations

import copy
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "maxLength": 60}
_FLAG: Schema = {"type": "boolean"}
_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": 500}
_TOKENS: Schema = {"type": "array", "items": _TOKEN, "minItems": 1, "maxItems": 30}
_TEXTS: Schema = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3}
_PROMPT: Schema = {"anyOf": [_TEXT, _TOKENS, _TEXTS]}
_OBJECT: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_CALL: Schema = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_ASKED: Schema = {
    "type": "object",
    "properties": {"role": {"enum": ["user"]}, "content": _TEXT},
    "required": ["role", "content"],
    "additionalProperties": False,
}
_ANSWERED = {**_ASKED, "properties": {"role": {"enum": ["assistant"]}, "content": _TEXT}}
_MESSAGES: Schema = {"type": "array", "items": {"anyOf": [_ASKED, _ANSWERED]}, "minItems": 1}
_MESSAGES |= {"maxItems": 4}


def _one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _count(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


FIELDS: dict[str, Schema] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _count(1, 3)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _number(-2, 2)),
    **dict.fromkeys(("stop", "stop_sequences"), _TEXTS),
    **dict.fromkeys(("system", "instructions", "name", "description", "content", "text"), _TEXT),
    **dict.fromkeys(("prompt", "input", "query", "documents"), _PROMPT),
    **dict.fromkeys(("text_1", "text_2"), _TEXT),
    "min_tokens": _count(0, 1),
    "temperature": _number(0, 2),
    "top_p": _number(0.1, 1),
    "min_p": _number(0, 1),
    "top_k": _count(1, 50),
    "repetition_penalty": _number(0.5, 2),
    "seed": _count(0, 1 << 31),
    "n": _count(1, 2),
    "top_n": _count(1, 3),
    "logprobs": _count(0, 5),
    "top_logprobs": _count(0, 5),
    "prompt_logprobs": _count(0, 5),
    "stop_token_ids": _TOKENS,
    "tokens": _TOKENS,
    "messages": _MESSAGES,
    "reasoning_effort": _one_of("none", "low", "high"),
    "guided_json": _one_of(_OBJECT),
    "guided_regex": _one_of("[ab]{1,3}", "x|yz"),
    "guided_choice": _one_of(["yes", "no"], ["a"]),
    "guided_grammar": _one_of('start: "a" | "b"'),
    "structured_outputs": _one_of({"json": _OBJECT}, {"regex": "[0-9]+"}, {"choice": ["a", "b"]}),
    "thinking": _one_of({"type": "disabled"}),
    "metadata": _one_of({}, {"a": "b"}),
    "keep_alive": _one_of("5m", 0),
}
"""Values of a field. Where the document has only a flag, the flag stays."""
DROPPED = frozenset(
    (
        *(
            "logit_bias",
            "best_of",
            "dimensions",
            "chat_template_kwargs",
            "container",
            "mcp_servers",
        ),
        *("output_config", "include", "tool_choice", "parallel_tool_calls", "reasoning", "format"),
        *("images", "suffix", "template", "context", "raw"),
    )
)
"""Fields that fit only what a body of random values does not have."""
_CONSTRAINTS = ("response_format", "structured_outputs", "guided_json", "guided_regex")
_CONSTRAINTS += ("guided_choice", "guided_grammar")


def tightened(document: Schema, model: str) -> Schema:
    """The document with `FIELDS`, no others than those it names, and the served model."""
    document = copy.deepcopy(document)
    fields = {**FIELDS, "model": _one_of(model), "previous_response_id": _TEXT}
    for name, schema in document["components"]["schemas"].items():
        properties = schema.get("properties")
        if properties is None or (not name.endswith("Request") and name not in ("Prompt",)):
            continue
        schema["additionalProperties"] = False
        for field in list(properties):
            is_unsupported = name.startswith("Responses") and field in (
                "max_tokens",
                "response_format",
            )
            if is_unsupported or (field in DROPPED and field not in schema.get("required", ())):
                del properties[field]
            elif field in fields and not _is_flag(properties[field]):
                properties[field] = fields[field]
        properties |= _whole(name, properties)
        if name.startswith("Tokenize"):
            schema["required"] = ["prompt"]
    return document


def _whole(name: str, properties: Schema) -> Schema:
    """Fields whose form is the endpoint's own."""
    function = {"name": "f", "description": "Does.", "parameters": _OBJECT}
    tool: Schema = {"type": "function", "function": function}
    if name.startswith("Responses"):
        tool = {"type": "function", **function}
    if name.startswith(("Messages", "Prompt")):
        tool = {"name": "f", "input_schema": _OBJECT}
    forms: Schema = {"tools": _one_of([tool]), "response_format": _one_of({"type": "json_object"})}
    if name.startswith("Responses"):
        forms["text"] = _one_of({"format": {"type": "text"}})
        forms["input"] = {"anyOf": [_TEXT, _MESSAGES]}
    if name.startswith("Tokenize"):
        forms["prompt"] = _TEXT
    return {field: form for field, form in forms.items() if field in properties}


def _is_flag(schema: Schema) -> bool:
    return any(part.get("type") == "boolean" for part in [schema, *schema.get("anyOf", ())])


def mended(body: Schema, known_id: str) -> Schema:
    """The body without what contradicts itself: fields that need another one, or exclude it."""
    body = {name: _whole_numbers(value) for name, value in body.items()}
    if not body.get("stream"):
        body.pop("stream_options", None)
    else:
        body.pop("prompt_logprobs", None)
    if "top_logprobs" in body and "logprobs" in body:
        body["logprobs"] = True
    elif "messages" in body:
        body.pop("top_logprobs", None)
    if body.get("messages") is not None:
        body.pop("prompt", None)
    for extra in [name for name in _CONSTRAINTS if body.get(name) is not None][1:]:
        del body[extra]
    if "previous_response_id" in body:
        body["previous_response_id"] = known_id if known_id.startswith("resp") else None
    if set(body) == {"id"}:
        body["id"] = known_id
    return body


def bounded(body: Schema, operation: str) -> Schema:
    """The body with few tokens to generate: without a number, a chat goes on to the end of its context."""
    fields = {
        "completions": "max_tokens",
        "responses": "max_output_tokens",
        "messages": "max_tokens",
    }
    field = fields.get(operation.rpartition("/")[2])
    bounds = {"n": 2, "best_of": 2, "max_completion_tokens": 3} | ({field: 3} if field else {})
    return body | {
        name: 3 if body.get(name) is None else min(body[name], most)
        for name, most in bounds.items()
        if (name == field or name in body) and isinstance(body.get(name, 3), int | float | None)
    }


def _whole_numbers(value: Any) -> Any:
    """JSON Schema's integers may be written 5.0, which clients do not."""
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
