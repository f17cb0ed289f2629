"""Grammar of an output with tools, as a structural tag: in free text a call, once it has begun, names a
declared tool and has arguments by its schema. An answer by a grammar may have reasoning before it.

A call begins with the marker of its format. Formats that know calls without one, at the beginning of an
output, are told by how those begin, and no text begins so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....base.errors import BadInput
from .argument_schemas import Schema, type_of, types_of, values_of, variants
from .formats import HARMONY, CallShape, Piece, ReasoningFormat, Tags, ToolFormat
from .parser import CHANNEL, ENDS, MESSAGE, START

Form = dict[str, Any]

_SHARED = ("$defs", "definitions")
_ELSEWHERE = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
_SPACE = r"[ \n]{0,2}"
_KEY = r"[A-Za-z0-9_.\-]{1,64}"
_ANY: Form = {"type": "any_text"}
_FREE = "(?s:.*)"
_INTEGER = "-?(?:0|[1-9][0-9]*)"
_LITERALS = {
    "null": "null",
    "boolean": "true|false",
    "integer": _INTEGER,
    "number": _INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
_ANSWER, _CALLS = " answer", " calls"
_SPOKEN: Form = {"type": "any_text", "excludes": [CHANNEL, START, MESSAGE, *ENDS]}
_TURN: Form = {"type": "const_string", "value": f"{START}assistant"}
_BEGINS = {"json": r'\s*\{ ?"name"', "python": r"\s*\[ ?[A-Za-z_][A-Za-z0-9_.]*\("}
"""Beginning of a call without a marker, by the style of its format."""


def calls_in_text(
    form: ToolFormat,
    tools: Mapping[str, Schema | None],
    reasoning: ReasoningFormat | None = None,
    *,
    in_reasoning: bool = False,
) -> Form:
    """Write the structural tag of an output in which these tools alone are called, by the schemas of their
    parameters. Reasoning before it is free, and has begun where `in_reasoning`. BadInput: a schema that is
    none."""
    rules: dict[str, Form] = {}
    for name, schema in tools.items():
        parameters = _closed(schema or {})
        if form.style == "tags":
            assert form.tags is not None
            rules[name] = _elements(form.tags, parameters)
        elif form.style == "python":
            _add_keywords(rules, name, parameters)
        else:
            rules[name] = {"type": "json_schema", "json_schema": parameters}
    if form is HARMONY:
        return {"type": "structural_tag", "format": _messages(tools), "rules": rules}
    shapes = form.shapes or (_shape_of(form),)
    section = _either([_section(shape, tools) for shape in shapes])
    rules[_CALLS] = _tag("", section, form.end or "")
    text: Form = {
        "type": "triggered_tags",
        "triggers": [form.start],
        "tags": [_tag(form.start, _named(_CALLS), "")],
        # Where nothing ends a section, what follows would be read as more calls.
        "stop_after_first": form.end is None,
        "begins_unlike": [_BEGINS[form.style]] if form.bare else [],
    }
    whole = text
    if form.bare:
        bare = [_section(shape, tools, r"\s*") for shape in shapes]
        if form.end is not None:
            bare = [_sequence(calls, _optional(_const(form.end))) for calls in bare]
        whole = _either([*bare, text])
    if reasoning is not None:
        text["begins_unlike"].append(_begins(reasoning, r"\s*"))
        # Models call without an end of the reasoning.
        thought = _tag("", {**_ANY, "excludes": [reasoning.end]}, form.start)
        called = _sequence(thought, _named(_CALLS), *([] if form.end is None else [text]))
        whole = _after(reasoning, in_reasoning, whole, rules, r"\s*", unended=(form.start, called))
    return {"type": "structural_tag", "format": whole, "rules": rules}


def shaped_answer(answer: Form, reasoning: ReasoningFormat | None, *, in_reasoning: bool) -> Form:
    """Write the structural tag of free reasoning and an answer of that form; without a format of reasoning it
    is harmony's last message."""
    rules: dict[str, Form] = {_ANSWER: answer}
    if reasoning is None:
        thought = _sequence(
            *_channel("analysis", "commentary"), _tag("", _SPOKEN, "<|end|>"), _TURN
        )
        channel, name, message = _channel("final")
        kind = _optional(_const(" <|constrain|>json"))
        final = _sequence(channel, name, kind, message, _named(_ANSWER))
        whole = _sequence({"type": "star", "content": thought}, final)
    else:
        space = r"\s{0,4}"  # bounded: a model would write white space for ever
        whole = _after(reasoning, in_reasoning, answer, rules, space, _pattern(space))
    return {"type": "structural_tag", "format": whole, "rules": rules}


def _begins(reasoning: ReasoningFormat, space: str) -> str:
    return space + re.escape(reasoning.start)


def _after(
    reasoning: ReasoningFormat,
    has_begun: bool,
    answer: Form,
    rules: dict[str, Form],
    space: str,
    *between: Form,
    unended: tuple[str, Form] | None = None,
) -> Form:
    """Reasoning up to its end, and an answer; one that has not begun may be left out. `unended`: a marker
    that reasoning may also end with, and the form of such reasoning and what follows."""
    rules[_ANSWER] = answer
    begins = _begins(reasoning, space)
    excluded, others = ([], []) if unended is None else ([unended[0]], [unended[1]])
    ended = _tag("", {**_ANY, "excludes": excluded}, reasoning.end)
    thought = _either([_sequence(ended, *between, _named(_ANSWER)), *others])
    if has_begun:
        return thought
    # The marker is a special token in some tokenizers, and in others text.
    marker = _either([_pattern(begins), _sequence(_pattern(space), _const(reasoning.start))])
    return _either([_sequence(marker, thought), _named(_ANSWER)])


def _closed(schema: Schema) -> dict[str, Any]:
    """The schema of an object of the declared arguments alone, unless it permits others or says elsewhere."""
    if _ELSEWHERE & schema.keys():
        return {"type": "object", **schema}
    return {"type": "object", "additionalProperties": False, **schema}


def _section(shape: CallShape, names: Iterable[str], lead: str | None = None) -> Form:
    """Calls in that shape. With a `lead` no marker is before them: what tells a call from a text, its name
    included, is then one lexeme."""
    calls = [_sequence(*_call(shape, name)) for name in names]
    between = shape.between
    several = {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": between or "",
        "at_least_one": True,
        "stop_after_first": between is None,
    }
    end = [_pattern(shape.end)] if shape.end else []
    if lead is None:
        return _sequence(*([_pattern(shape.begin)] if shape.begin else []), several, *end)
    firsts = []
    for name in names:
        opening, *rest = _call(shape, name)
        begins = opening.get("pattern") or re.escape(opening["value"])
        firsts.append(_sequence(_pattern(lead + shape.begin + begins), *rest))
    more = _sequence(_const(between or ""), _either(calls))
    return _sequence(_either(firsts), {"type": "star", "content": more}, *end)


def _call(shape: CallShape, name: str) -> list[Form]:
    before, after = [_piece(p, name) for p in shape.before], [_piece(p, name) for p in shape.after]
    return [*before, _named(name), *after]


def _piece(piece: Piece, name: str) -> Form:
    if isinstance(piece, str):
        return _const(piece.replace("NAME", name))
    if isinstance(piece, tuple):
        return _optional(_sequence(*(_piece(part, name) for part in piece)))
    return _pattern(piece.pattern.replace("NAME", re.escape(name)))


def _shape_of(form: ToolFormat) -> CallShape:
    tags = form.tags
    assert tags is not None
    before, space = (f"{tags.name_open}NAME{tags.name_ends[0]}",), re.compile(_SPACE)
    if tags.call_close == form.end:
        return CallShape((*before, space), (space,), begin=_SPACE)
    return CallShape((*before, space), (space, tags.call_close, space), "", begin=_SPACE)


def _elements(tags: Tags, schema: dict[str, Any]) -> Form:
    """Arguments as elements, in the order in which they are declared."""
    properties, required = _arguments(schema)
    parts = []
    for key, declared in properties.items():
        element = _sequence(_element(tags, key, declared, schema), _pattern(_SPACE))
        parts.append(element if key in required else _optional(element))
    if schema.get("additionalProperties") or _ELSEWHERE & schema.keys():
        key = _sequence(_const(tags.key_open), _pattern(_KEY))
        mark = '" string="true' if tags.typed else ""
        free = _sequence(key, _value(tags, mark + tags.key_close, _ANY), _pattern(_SPACE))
        parts.append({"type": "star", "content": free})
    return _sequence(*parts)


def _arguments(schema: Schema) -> tuple[Mapping[str, Any], Sequence[str]]:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise BadInput("need an object as properties, and a list as required")
    return properties, required


def _element(tags: Tags, key: str, declared: Any, root: dict[str, Any]) -> Form:
    schemas, margin = variants(declared, root), r"\n?" if tags.strips_newlines else ""
    types = types_of(schemas)
    value: Form = {"type": "json_schema", "json_schema": _with_shared(declared, root)}
    if margin:
        value = _sequence(_pattern(margin), value, _pattern(margin))
    if not tags.typed:
        content = _raw(schemas, margin, value) if "string" in types else value
        return _value(tags, f"{tags.key_open}{key}{tags.key_close}", content)
    texts = [{**schema, "type": "string"} for schema in schemas if "string" in types_of([schema])]
    contents = {"true": _raw(texts, margin, value)} if texts else {}
    if types != {"string"}:
        contents["false"] = value
    opening = f'{tags.key_open}{key}" string="'
    return _either(
        _value(tags, opening + mark + tags.key_close, content) for mark, content in contents.items()
    )


def _value(tags: Tags, opening: str, content: Form) -> Form:
    """A value after the name of its argument."""
    if not tags.value_open:
        return _tag(opening, content, tags.value_close)
    value = _tag(tags.value_open, content, tags.value_close)
    return _sequence(_const(opening), _pattern(_SPACE), value)


def _raw(schemas: Sequence[Schema], margin: str, value: Form) -> Form:
    """Strings as they are, without quotes, or a `value` of another type; formats are not looked at."""
    bodies = [body for schema in schemas for body in _bodies(schema)]
    limited = types_of([schema for schema in schemas if values_of(schema) is None])
    has_lists = not limited.isdisjoint(("array", "object"))
    # The lexer cannot go back from a pattern to a list that begins as one of its strings.
    if _FREE in bodies or (has_lists and "string" in limited):
        return _ANY
    text = _pattern(f"{margin}(?:{'|'.join(bodies)}){margin}")
    return _either([text, value]) if has_lists else text


def _bodies(schema: Schema) -> Iterator[str]:
    """Patterns of the raw texts of strings and of constants that the schema allows."""
    types, pattern = types_of([schema]), schema.get("pattern")
    if (values := values_of(schema)) is not None:
        for value in values:
            if type_of(value) in types:
                yield re.escape(value if isinstance(value, str) else json.dumps(value))
        return
    yield from (literal for name, literal in _LITERALS.items() if name in types)
    if "string" not in types:
        return
    if isinstance(pattern, str):
        begins, ends = pattern.startswith("^"), pattern.endswith("$")
        inner = pattern[begins : len(pattern) - ends]
        yield f"{'' if begins else _FREE}(?:{inner}){'' if ends else _FREE}"
    elif "minLength" in schema or "maxLength" in schema:
        yield f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
    else:
        yield _FREE


def _add_keywords(rules: dict[str, Form], name: str, schema: dict[str, Any]) -> None:
    """Add the rule of arguments as Python's keywords, in the order of their declaration, joined by commas:
    for each place a rule for what may follow another argument, and one for what comes first."""
    properties, required = _arguments(schema)
    first = following = _const("")
    for index, (key, declared) in reversed([*enumerate(properties.items())]):
        rules[f"{name} {key}"] = _sequence(
            _const(f"{key}="), _python_value(_with_shared(declared, schema))
        )
        argument, rest = _named(f"{name} {key}"), following
        begin, more = _sequence(argument, rest), _sequence(_const(", "), argument)
        first = begin if key in required else _either([begin, first])
        rules[f"{name} {index}"] = _sequence(more if key in required else _optional(more), rest)
        rules[f"{name} {index} first"] = first
        following, first = _named(f"{name} {index}"), _named(f"{name} {index} first")
    rules[name] = first


def _python_value(declared: Any) -> Form:
    """A value as a literal of Python's, which JSON is too; a string may stand in single quotes."""
    value = {"type": "json_schema", "json_schema": declared}
    if not isinstance(declared, Mapping) or "pattern" in declared:
        return value
    if declared.get("type") == "boolean":
        return _pattern("True|False")
    if declared.get("type") != "string":
        return value
    if (values := declared.get("enum")) is not None:
        body = "|".join(re.escape(text) for text in map(str, values) if text.isprintable())
        return _either([value, _pattern(f"'(?:{body})'")])
    length = f"{{{declared.get('minLength', 0)},{declared.get('maxLength', '')}}}"
    return _either([value, _pattern(rf"'(?:[^'\\\x00-\x1f]|\\['\"\\nt]){length}'")])


def _messages(names: Iterable[str]) -> Form:
    """Messages in channels, of which the last is a call, or the answer."""
    spoken = _sequence(*_channel("analysis", "commentary", "final"))
    message = _sequence(spoken, _tag("", _SPOKEN, "<|end|>"), _TURN)
    channel = _sequence(_const(CHANNEL), _either(map(_const, ("commentary", "analysis"))))
    calls = []
    for name in names:
        header = _sequence(channel, _const(f" to=functions.{name}"))
        kind = _sequence(_const(" "), _optional(_const("<|constrain|>")), _const("json"))
        body = _sequence(_const(MESSAGE), _named(name), _optional(_const("<|call|>")))
        calls.append(_sequence(header, _optional(kind), body))
    last = _either([*calls, _sequence(spoken, _SPOKEN), _SPOKEN])
    return _sequence({"type": "star", "content": message}, last)


def _channel(*names: str) -> tuple[Form, ...]:
    """The header of a message in one of the channels."""
    return _const(CHANNEL), _either(map(_const, names)), _const(MESSAGE)


def _with_shared(declared: Any, schema: dict[str, Any]) -> Any:
    """The schema of an argument, with the definitions that stand at the root."""
    shared = {key: schema[key] for key in _SHARED if key in schema}
    return {**declared, **shared} if shared and isinstance(declared, Mapping) else declared


def _const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _pattern(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def _named(rule: str) -> Form:
    return {"type": "rule", "name": rule}


def _tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _optional(content: Form) -> Form:
    return {"type": "optional", "content": content}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": [*elements]} if elements else _const("")


def _either(elements: Iterable[Form]) -> Form:
    return {"type": "or", "elements": [*elements]}
