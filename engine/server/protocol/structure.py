"""Structured-output request fields: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ....quant.base.errors import BadInput
from ...base.logits import TokenMask
from .errors import ApiError
from .structural_tags import AnyFormat, StructuralTag, Structure, parse_structural_tag

if TYPE_CHECKING:
    from ...sampling.grammar import GrammarCompiler

MAX_GRAMMAR_CHARACTERS = 256 * 1024
"""Of a grammar, a pattern, or a schema as JSON: compiling takes about 5 µs a character."""
COMPILE_SECONDS = 10.0
NUM_COMPILERS = 2

Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=10_000)
]
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar constraint on the text of every choice, and the request field that it came from."""

    kind: Kind
    value: Any
    field: str


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`, and the fields of the Responses API's `text.format`."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


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
    def _is_a_structural_tag(self) -> ResponseFormat:
        given = {name: getattr(self, name) for name in ("format", "structures", "triggers")}
        if self.type == "structural_tag":
            StructuralTag(**given)
        elif any(value is not None for value in given.values()):
            raise ValueError("format, structures and triggers are for type 'structural_tag'")
        return self

    @model_validator(mode="after")
    def _holds_what_its_type_names(self) -> ResponseFormat:
        for name in ("json_schema", "regex", "grammar"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise ValueError(f"{name} is for type {name!r}, which needs it")
        return self

    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint("json_schema", ANY_OBJECT, "response_format")
        if self.type == "json_schema":
            assert self.json_schema is not None
            schema = self.json_schema.schema_
            value = ANY_OBJECT if schema is None else schema
            return Constraint("json_schema", value, "response_format.json_schema.schema")
        if self.type == "structural_tag":
            value = StructuralTag(
                format=self.format, structures=self.structures, triggers=self.triggers
            ).value
            return Constraint("structural_tag", value, "response_format")
        return Constraint(self.type, getattr(self, self.type), f"response_format.{self.type}")


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of these fields."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: (
        Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)] | dict[str, Any] | None
    ) = None

    def constraints(self) -> list[Constraint]:
        constraints = _constraints(
            self.json_, self.regex, self.choice, self.grammar, "structured_outputs."
        )
        if self.json_object:
            field = "structured_outputs.json_object"
            constraints.append(Constraint("json_schema", ANY_OBJECT, field))
        if self.structural_tag is not None:
            field = "structured_outputs.structural_tag"
            tag = parse_structural_tag(self.structural_tag, field)
            constraints.append(Constraint("structural_tag", tag.value, field))
        return constraints


class StructuredRequest(BaseModel):
    """Structured-output fields, including vLLM's older `guided_*`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    def constraint(self) -> Constraint | None:
        """The requested constraint; None without one.

        Raises:
            ApiError: more than one constraint, or a schema string that is not JSON.
        """
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
    values: list[tuple[Kind, Any]] = [("regex", regex), ("choice", choice), ("grammar", grammar)]
    constraints = [
        Constraint(kind, value, prefix + kind) for kind, value in values if value is not None
    ]
    if schema is not None:
        constraints.append(
            Constraint("json_schema", _parsed(schema, prefix + "json"), prefix + "json")
        )
    return constraints


def _parsed(schema: Any, field: str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"{field}: the schema is not valid JSON: {error}", param=field
        ) from error
    if not isinstance(parsed, dict):
        raise ApiError(400, f"{field}: a schema is an object", param=field)
    return parsed


class Constrainer:
    """Compiles grammar token masks on worker threads, because large schemas take long; llguidance compiles
    without Python's lock. A compilation that has not begun is dropped with its client."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._parts = tokenizer, vocab_size, end_token_ids
        self._worker = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="llmopt-grammar")
        self._lock = Lock()
        self._compiler: GrammarCompiler | None = None

    async def mask(self, constraint: Constraint, num_sequences: int) -> TokenMask:
        """Compile the token mask of one request.

        Raises:
            ApiError: 400, with the request field and the invalid place in it, or because it is too large or
                takes too long.
        """
        loop = asyncio.get_running_loop()
        if len(json.dumps(constraint.value)) > MAX_GRAMMAR_CHARACTERS:
            raise ApiError(
                400,
                f"{constraint.field}: more than {MAX_GRAMMAR_CHARACTERS} characters",
                param=constraint.field,
            )
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await loop.run_in_executor(
                    self._worker, self._mask, constraint, num_sequences
                )
        except TimeoutError:
            raise ApiError(
                400,
                f"{constraint.field}: not compiled after {COMPILE_SECONDS:g} s: simplify it",
                param=constraint.field,
            ) from None
        except BadInput as error:
            separator = "" if str(error).startswith("/") else ": "
            raise ApiError(
                400, f"{constraint.field}{separator}{error}", param=constraint.field
            ) from error

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _mask(self, constraint: Constraint, num_sequences: int) -> TokenMask:
        from ...sampling import grammar

        with self._lock:
            if self._compiler is None:
                self._compiler = grammar.GrammarCompiler(*self._parts)
        compiler, value = self._compiler, constraint.value
        match constraint.kind:
            case "json_schema":
                return compiler.json_schema_mask(value, num_sequences)
            case "regex":
                return compiler.mask(grammar.regex(value), num_sequences)
            case "choice":
                return compiler.mask(grammar.choice(value), num_sequences)
            case "grammar":
                return compiler.mask(grammar.context_free(value), num_sequences)
            case "structural_tag":
                return compiler.structural_tag_mask(value, num_sequences)
