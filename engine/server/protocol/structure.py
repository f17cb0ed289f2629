"""Structured-output request fields: OpenAI's `response_format`, vLLM's `structured_outputs`.

A structural tag comes in the two forms that vLLM takes, read by strict models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .body import parsed
from .errors import ApiError, bad_field

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(max_length=1024)]
Count = Annotated[int, Field(ge=0, le=1024)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ConstString(_StrictModel):
    """This text."""

    type: Literal["const_string"]
    value: str


class JsonSchema(_StrictModel):
    """A JSON text by a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]
    style: Literal["json"] = "json"


class Regex(_StrictModel):
    """A match of a pattern."""

    type: Literal["regex"]
    pattern: Text
    excludes: Texts = []


class Grammar(_StrictModel):
    """A text by a grammar, in Lark's dialect or GBNF."""

    type: Literal["grammar"]
    grammar: Text


class AnyText(_StrictModel):
    """Free text, up to the end of the tag around it."""

    type: Literal["any_text"]
    excludes: Texts = []


class Elements(_StrictModel):
    """One format after the other, or one of several."""

    type: Literal["sequence", "or"]
    elements: Annotated[list[AnyFormat], Field(min_length=1)]


class Repeated(_StrictModel):
    """A format that may be left out, or comes several times."""

    type: Literal["optional", "plus", "star"]
    content: AnyFormat


class Repeat(_StrictModel):
    """A format, `min` to `max` times; without `max` as often as it likes."""

    type: Literal["repeat"]
    content: AnyFormat
    min: Count = 0
    max: Count | None = None


class Tag(_StrictModel):
    """A format between a begin and one of its ends."""

    type: Literal["tag"] = "tag"
    begin: str
    content: AnyFormat
    end: str | Annotated[list[str], Field(min_length=1, max_length=64)]


class TriggeredTags(_StrictModel):
    """Free text in which each trigger begins a tag."""

    type: Literal["triggered_tags"]
    triggers: Annotated[Texts, Field(min_length=1)]
    tags: Annotated[list[Tag], Field(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Texts = []


class TagsWithSeparator(_StrictModel):
    """Tags with a text between them."""

    type: Literal["tags_with_separator"]
    tags: Annotated[list[Tag], Field(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


AnyFormat = Annotated[
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | Elements
    | Repeated
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]


class Structure(_StrictModel):
    """A tag of the older form: a JSON text by `schema` between `begin` and `end`."""

    begin: Text
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    end: str


class StructuralTag(_StrictModel):
    """A structural tag: a `format`, or `structures` with the `triggers` that begin them."""

    type: Literal["structural_tag"] = "structural_tag"
    format: AnyFormat | None = None
    structures: Annotated[list[Structure], Field(min_length=1)] | None = None
    triggers: Annotated[Texts, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> StructuralTag:
        older = (self.structures is not None, self.triggers is not None)
        if older not in ((False, False), (True, True)) or older[0] == (self.format is not None):
            raise ValueError("a structural tag has a format, or structures and triggers")
        return self

    @property
    def value(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)


def parse_structural_tag(given: str | dict[str, Any], field: str) -> StructuralTag:
    """A structural tag from JSON text, as vLLM's `structured_outputs` has it, or an object. Raises
    `ApiError`: it is none, with the place."""
    text = given if isinstance(given, str) else json.dumps(given)
    try:
        return parsed(StructuralTag, text.encode())
    except ApiError as error:
        raise bad_field(field, str(error)) from error


Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]


MAX_GRAMMAR_CHARACTERS = 256 * 1024
"""Limit of a grammar, a pattern, or a schema as JSON: compiling takes about 5 µs a character."""
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=10_000)
]
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar constraint on the text of every choice, and the request field that it came from.

    Attributes:
        sent: value as the client sent it, where `value` was made of that.
    """

    kind: Kind
    value: Any
    field: str
    sent: Any = None

    @property
    def num_characters(self) -> int:
        return len(json.dumps(self.value if self.sent is None else self.sent))

    @property
    def is_form(self) -> bool:
        """False for a structural tag, which shapes the reasoning too."""
        return self.kind != "structural_tag"

    @property
    def form(self) -> dict[str, Any]:
        """The constraint as a format of a structural tag."""
        if self.kind == "choice":
            texts = [{"type": "const_string", "value": text} for text in self.value]
            return {"type": "or", "elements": texts}
        name = "pattern" if self.kind == "regex" else self.kind
        return {"type": self.kind, name: self.value}


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`, and the fields of the Responses API's `text.format`."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


_OF_A_TAG = ("format", "structures", "triggers")


class ResponseFormat(BaseModel):
    """`response_format`: OpenAI's three types, a regular expression, a grammar, or a structural tag."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None
    format: AnyFormat | None = None
    structures: list[Structure] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _holds_what_its_type_names(self) -> ResponseFormat:
        given = {name: getattr(self, name) for name in _OF_A_TAG}
        if self.type == "structural_tag":
            StructuralTag(**given)
        elif any(value is not None for value in given.values()):
            raise ValueError("format, structures and triggers are for type 'structural_tag'")
        for name in ("json_schema", "regex", "grammar"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"{name} is for type {name!r}, which needs it")
        return self

    def constraint(self) -> Constraint | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return Constraint("json_schema", ANY_OBJECT, "response_format")
            case "json_schema":
                schema = self.json_schema.schema_ if self.json_schema else None
                value = ANY_OBJECT if schema is None else schema
                return Constraint("json_schema", value, "response_format.json_schema.schema")
            case "structural_tag":
                tag = StructuralTag(**{name: getattr(self, name) for name in _OF_A_TAG})
                return Constraint("structural_tag", tag.value, "response_format")
        return Constraint(self.type, getattr(self, self.type), f"response_format.{self.type}")


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of these fields."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[dict[str, Any] | GrammarText | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: GrammarText | dict[str, Any] | None = None

    def constraints(self) -> list[Constraint]:
        prefix = "structured_outputs."
        constraints = _constraints(self.json_, self.regex, self.choice, self.grammar, prefix)
        if self.json_object:
            constraints.append(Constraint("json_schema", ANY_OBJECT, f"{prefix}json_object"))
        if self.structural_tag is not None:
            tag = parse_structural_tag(self.structural_tag, field := f"{prefix}structural_tag")
            constraints.append(Constraint("structural_tag", tag.value, field))
        return constraints


class StructuredRequest(BaseModel):
    """Structured-output fields, including vLLM's older `guided_*`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    def constraint(self) -> Constraint | None:
        """The requested constraint; None without one. Raises `ApiError`: more than one constraint, or a
        schema string that is not JSON."""
        constraints = _constraints(
            self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, "guided_"
        )
        if self.response_format is not None:
            constraint = self.response_format.constraint()
            constraints += [] if constraint is None else [constraint]
        if self.structured_outputs is not None:
            constraints += self.structured_outputs.constraints()
        if len(constraints) > 1:
            names = " and ".join(constraint.field for constraint in constraints[:2])
            raise ApiError(400, f"{names}: ask for one structure", param=constraints[1].field)
        return constraints[0] if constraints else None


def _constraints(
    schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None, prefix: str
) -> list[Constraint]:
    field = prefix + "json"
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise bad_field(field, f"the schema is not valid JSON: {error}") from error
        if not isinstance(schema, dict):
            raise bad_field(field, "a schema is an object")
    constraints = [
        Constraint("regex", regex, f"{prefix}regex"),
        Constraint("choice", choice, f"{prefix}choice"),
        Constraint("grammar", grammar, f"{prefix}grammar"),
        Constraint("json_schema", schema, field),
    ]
    return [constraint for constraint in constraints if constraint.value is not None]
