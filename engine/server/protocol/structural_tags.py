"""`response_format` of type `structural_tag`, in the two forms that vLLM takes, as strict models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from .errors import ApiError

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(max_length=1024)]
Count = Annotated[int, Field(ge=0, le=1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ConstString(_Strict):
    """This text."""

    type: Literal["const_string"]
    value: str


class JsonSchema(_Strict):
    """A JSON text by a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]
    style: Literal["json"] = "json"


class Regex(_Strict):
    """A match of a pattern."""

    type: Literal["regex"]
    pattern: Text
    excludes: Texts = []


class Grammar(_Strict):
    """A text by a grammar, in Lark's dialect or GBNF."""

    type: Literal["grammar"]
    grammar: Text


class AnyText(_Strict):
    """Free text, up to the end of the tag around it."""

    type: Literal["any_text"]
    excludes: Texts = []


class Sequence(_Strict):
    """One format after the other."""

    type: Literal["sequence"]
    elements: Annotated[list[AnyFormat], Field(min_length=1)]


class Or(_Strict):
    """One of several formats."""

    type: Literal["or"]
    elements: Annotated[list[AnyFormat], Field(min_length=1)]


class Repeated(_Strict):
    """A format that may be left out, or comes several times."""

    type: Literal["optional", "plus", "star"]
    content: AnyFormat


class Repeat(_Strict):
    """A format, `min` to `max` times; without `max` as often as it likes."""

    type: Literal["repeat"]
    content: AnyFormat
    min: Count = 0
    max: Count | None = None


class Tag(_Strict):
    """A format between a begin and one of its ends."""

    type: Literal["tag"] = "tag"
    begin: str
    content: AnyFormat
    end: str | Annotated[list[str], Field(min_length=1, max_length=64)]


class TriggeredTags(_Strict):
    """Free text in which each trigger begins a tag."""

    type: Literal["triggered_tags"]
    triggers: Annotated[Texts, Field(min_length=1)]
    tags: Annotated[list[Tag], Field(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Texts = []


class TagsWithSeparator(_Strict):
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
    | Sequence
    | Or
    | Repeated
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]


class Structure(_Strict):
    """A tag of the older form: a JSON text by `schema` between `begin` and `end`."""

    begin: Text
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    end: str


class StructuralTag(_Strict):
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
        """The JSON object, with defaults filled in."""
        return self.model_dump(by_alias=True, exclude_none=True)


def parse_structural_tag(given: str | dict[str, Any], field: str) -> StructuralTag:
    """A structural tag from JSON text, as vLLM's `structured_outputs` has it, or an object.

    Raises:
        ApiError: it is none, with the place.
    """
    adapter = TypeAdapter(StructuralTag)
    try:
        return (
            adapter.validate_json(given)
            if isinstance(given, str)
            else adapter.validate_python(given)
        )
    except ValidationError as error:
        first = max(error.errors(), key=lambda e: len(e["loc"]))
        where = ".".join([field, *map(str, first["loc"])])
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{where}: {message}", param=field) from error
