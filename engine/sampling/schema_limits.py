"""JSON schemas as llguidance enforces them: what it would let pass is written another way, or refused.

llguidance refuses most of what it lacks (`not`, `if`, `uniqueItems`, ...). What it takes in silence was found
by random outputs under its masks: see tests/engine/sampling/test_schema_kinds.py.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ...base.errors import BadInput

Schema = Mapping[str, Any]

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_ONES = ("items", "additionalProperties", "additionalItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_BROKEN = {
    "minimum": operator.lt,
    "exclusiveMinimum": operator.le,
    "maximum": operator.gt,
    "exclusiveMaximum": operator.ge,
}
"""The comparison of a number with each bound that holds where it breaks the bound."""
_OPENING = {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"}
_EXACT = 2**53
"""llguidance reads numbers as float64: integers above this one are rounded."""
MAX_REMAINDERS, MAX_STATES = 4096, 2**17
"""Limits of the automata's states for `multipleOf`, without factors of 2 and 5 and with them: llguidance
makes them all, up to 450 B and 20 µs each, whatever its limits say."""
MAX_NAMES = 10_000
"""Limit of the pairs of a pattern of `patternProperties` and a name of `properties`."""
_SHIFTS = (0, 1, -1, 2, -2, Decimal("0.1"), Decimal("-0.1"), Decimal("0.001"), Decimal("-0.001"))


_ANY_NAME = (True, {}, {"type": "string"})
"""Values of `propertyNames` that allow every name."""
_LACKING = ("uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else")
_LACKING += ("dependentRequired", "dependentSchemas", "dependencies", "propertyNames")
_LACKING += ("unevaluatedProperties", "unevaluatedItems")
"""Keywords that llguidance lacks, without which a schema allows more."""


def without_lacking(schema: Schema) -> tuple[Schema, set[str]]:
    """The schema without keywords that llguidance would refuse, and those keywords."""
    try:
        text = json.dumps(schema)
    except (ValueError, RecursionError):
        return schema, set()  # `enforceable` says why
    if not any(f'"{key}"' in text for key in _LACKING):
        return schema, set()
    schema, removed = json.loads(text), set[str]()
    for _, part in _subschemas(schema):
        for key in (key for key in _LACKING if key in part):
            value = part.pop(key)
            if (key, value) != ("uniqueItems", False) and (
                key != "propertyNames" or value not in _ANY_NAME
            ):
                removed.add(key)
    return schema, removed


def enforceable(schema: Schema, path: str = "") -> Schema:
    """The schema, with patterns that llguidance enforces, and objects closed that name their properties;
    outputs satisfy the one that was given. Raises BadInput: a keyword whose outputs might not satisfy the
    schema, with its JSON pointer after `path`, or the schema is nested too deep or contains numbers that are
    not finite."""
    try:
        schema = json.loads(json.dumps(schema, allow_nan=False))
    except RecursionError as error:
        raise BadInput("the schema is nested too deep") from error
    except ValueError as error:
        raise BadInput(f"the schema is not JSON: {error}") from error
    parts = dict(_subschemas(schema))
    if problem := _too_many_remainders(schema):
        raise BadInput(f"{path}: {problem}" if path else problem)
    is_draft4 = "draft-04" in str(schema.get("$schema"))
    for pointer, part in parts.items():
        for problem in _problems(part, is_draft4):
            where = path + pointer
            raise BadInput(f"{where}: {problem}" if where else problem)
    if (pointer := _cycle(parts)) is not None:
        raise BadInput(f"{path}{pointer or '/'}: $ref leads back to itself")
    for part in parts.values():
        if part.get("uniqueItems") is False:  # llguidance refuses the name alone
            del part["uniqueItems"]
        if part.get("propertyNames") in _ANY_NAME:
            del part["propertyNames"]
        if isinstance(part.get("pattern"), str):
            part["pattern"] = _tight(part["pattern"])
        if isinstance(names := part.get("patternProperties"), dict):
            part["patternProperties"] = {_tight(name): inner for name, inner in names.items()}
    if not any(map(_is_joined, parts.values())):
        for part in filter(_has_its_names, parts.values()):
            part["additionalProperties"] = False
    return schema


def _is_joined(part: Schema) -> bool:
    """True if several schemas are for the same object, so that none of them names all its properties."""
    beside = {"properties", "required", "maxProperties", *_OPENING}
    joining = [key for key in ("$ref", *_IN_PLACE) if key in part]
    several = len(joining) > 1 or (joining and beside & part.keys()) or "oneOf" in part
    return bool(several) or len(part.get("allOf") or ()) > 1


def _has_its_names(part: Schema) -> bool:
    """True for an object whose schema names properties and does not say whether there may be others: a model
    would add some without end. XGrammar in vLLM and llama.cpp take it as closed too."""
    names = part.get("properties")
    if not isinstance(names, dict) or not names or {*_OPENING, "enum", "const"} & part.keys():
        return False
    return {*map(str, part.get("required") or ())} <= names.keys()


def _subschemas(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON pointer, schema) of the schema and of all below it."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        pointer, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield pointer, part
        for key in _LISTS:
            if isinstance(part.get(key), list):
                waiting += [(f"{pointer}/{key}/{n}", inner) for n, inner in enumerate(part[key])]
        waiting += [(f"{pointer}/{key}", part[key]) for key in _ONES if key in part]
        for key in _MAPS:
            if isinstance(part.get(key), Mapping):
                waiting += [
                    (f"{pointer}/{key}/{pointer_token(name)}", inner)
                    for name, inner in part[key].items()
                ]


def pointer_token(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")  # RFC 6901


def _problems(part: Schema, is_draft4: bool) -> Iterator[str]:
    if "x-guidance" in part:
        yield "x-guidance: no keyword of JSON Schema"
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(part.get(key), bool) and not is_draft4:
            yield f"{key}: a boolean is of draft 4, which $schema has to name"
    for key in ("enum", "const"):
        if any(isinstance(v, int) and abs(v) > _EXACT for v in _values(part.get(key))):
            yield f"{key}: integers beyond 2^53 are not supported"
    bounds = {
        key: part[key]
        for key in _BROKEN
        if isinstance(part.get(key), int | float) and not isinstance(part[key], bool)
    }
    is_risky = any(key.startswith("e") or abs(bound) > _EXACT for key, bound in bounds.items())
    if is_risky and (key := _unenforced(json.dumps(part.get("type")), json.dumps(bounds))):
        yield f"{key} {part[key]}: not supported with these bounds, which an output could pass"
    names, patterns = part.get("properties"), part.get("patternProperties")
    if isinstance(names, Mapping) and isinstance(patterns, Mapping):
        if len(patterns) * len(names) > MAX_NAMES:
            yield f"patternProperties: more than {MAX_NAMES} pairs of a pattern and a property"
            return
        for pattern in patterns:
            if _is_finite(pattern) and _matches_any(pattern, names):
                yield f"patternProperties: {pattern!r} matches names of properties: write it there"
    least, required = part.get("minProperties"), part.get("required")
    num_required = len({*required}) if isinstance(required, list) else 0
    if isinstance(least, int) and least - num_required > 1:
        # Of two free names the second may repeat the first.
        yield f"minProperties {least}: at most one more than the required properties is supported"


def _cycle(parts: Mapping[str, Schema]) -> str | None:
    """Pointer of a schema whose `$ref` leads back to it without an array or an object between."""
    names = {f"#{pointer}": pointer for pointer in parts}
    for pointer, part in parts.items():
        names |= {str(part["$id"]): pointer} if "$id" in part else {}
        names |= {f"#{part['$anchor']}": pointer} if "$anchor" in part else {}
    # Depth first: a schema is open until all that it leads to is closed.
    opened, closed = set[str](), set[str]()
    waiting = [(pointer, False) for pointer in parts]
    while waiting:
        pointer, is_left = waiting.pop()
        if is_left:
            closed.add(pointer)
        elif pointer not in closed:
            if pointer in opened:
                return pointer
            opened.add(pointer)
            waiting.append((pointer, True))
            following = _in_place(pointer, parts[pointer], names)
            waiting += [(inner, False) for inner in following if inner in parts]
    return None


def _in_place(pointer: str, part: Schema, names: Mapping[str, str]) -> Iterator[str]:
    if isinstance(ref := part.get("$ref"), str) and ref in names:
        yield names[ref]
    for key in _IN_PLACE:  # keywords whose schemas describe the same value as `part`
        if isinstance(part.get(key), list):
            yield from (f"{pointer}/{key}/{number}" for number in range(len(part[key])))


def _values(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        yield (value := waiting.pop())
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _matcher(schema: Schema) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher(_bytes(), grammar, log_level=0)


@lru_cache(1024)
def _unenforced(kind: str, bounds_text: str) -> str | None:
    """Bound that llguidance's grammar does not enforce, found by numbers near it; None if all hold.

    llguidance 1.9 lets 0 pass `exclusiveMinimum: 0` below a maximum under 1, and rounds large integers.
    """
    bounds = json.loads(bounds_text, parse_float=Decimal)
    matcher = _matcher({"type": json.loads(kind) or "number", **json.loads(bounds_text)})
    if matcher.is_error():
        return None  # llguidance says why
    numbers = [bound + shift for bound in bounds.values() for shift in _SHIFTS]
    for text in ("0", "-0", *(f"{number:f}" for number in map(Decimal, numbers))):
        number = Decimal(text)
        passed = next((key for key, bound in bounds.items() if _BROKEN[key](number, bound)), None)
        if passed and _accepts(matcher, text):
            return passed
    return None


def _multiples(schema: Any) -> list[int]:
    """Numerators of all values of `multipleOf`, in all objects, because `$ref` may lead to any."""
    objects = (value for value in _values(schema) if isinstance(value, dict))
    values = (inner["multipleOf"] for inner in objects if "multipleOf" in inner)
    numbers = (value for value in values if isinstance(value, int | float) and value > 0)
    return [Decimal(str(number)).as_integer_ratio()[0] for number in numbers]


def num_states(schema: Any) -> int:
    """Bound of the states of each automaton, because `allOf` may join all values of `multipleOf`. Powers of
    ten, and twice or five times one, cost none: the last digits tell them."""
    common = 1
    for number in _multiples(schema):
        common = math.lcm(common, number)
        if common.bit_length() > 2048:
            break
    return 0 if re.fullmatch("[125]0*", str(common)) else common


def _too_many_remainders(schema: Any) -> str | None:
    total = num_states(schema)
    odd = total // math.gcd(total, 10 ** total.bit_length()) if total else 0
    odd *= (odd > 1) * len(_multiples(schema))
    for count, limit in ((odd, MAX_REMAINDERS), (total, MAX_STATES)):
        if count > limit:
            return f"multipleOf: {count} remainders in the schema, at most {limit}"
    return None


def _tight(pattern: str) -> str:
    """A pattern whose character classes have not all control characters.

    In a JSON text llguidance 1.9 lets such a class match escaped quotes and backslashes too, so that `[^"]`
    is no limit. Without U+001F it is one.
    """
    return "".join(map(_tight_class, _PIECE.findall(pattern)))


def _tight_class(text: str) -> str:
    if text[0] != "[" or "[" in text[1:]:
        return text
    try:
        matches = re.compile(text).fullmatch
    except re.error:
        return text
    if not all(matches(chr(code)) for code in range(32)) or (matches('"') and matches("\\")):
        return text
    return f"[{text}&&[^\\x1f]]"


_PIECE = re.compile(r"\\.?|\[\^?\]?(?:\\.?|[^\]\\])*\]?|.", re.DOTALL)
"""A character of a pattern, where an escape or a character class is one."""


def _is_finite(pattern: str) -> bool:
    """True where a pattern seems to match finitely many names.

    None may be left next to those of `properties`, and llguidance 1.9 then ends an object after a comma.
    """
    plain = "".join(piece for piece in _PIECE.findall(pattern) if len(piece) == 1)
    return pattern[:1] == "^" and pattern[-1:] == "$" and not re.search(r"[*+]|,\}", plain)


def _matches_any(pattern: str, names: Iterable[str]) -> bool:
    matcher = _matcher({"type": "string", "pattern": pattern})
    return matcher.is_error() or any(_accepts(matcher, json.dumps(name)) for name in names)


def _accepts(matcher: LLMatcher, text: str) -> bool:
    tokens, state = [*text.encode()], matcher.deep_copy()
    return (
        state.validate_tokens(tokens) == len(tokens)
        and state.consume_tokens(tokens)
        and state.is_accepting()
    )
