"""Bodies of requests: JSON, its bounds, and the models that it is validated by."""

from __future__ import annotations

import gc
import math
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator, from_json

from .errors import ApiError, as_api_error, bad_field

MAX_ITEMS = 1 << 14
"""Keys of an object and values of a list, but for a list of token ids."""


Model = TypeVar("Model", bound=BaseModel)


def parsed(model: type[Model], body: bytes) -> Model:
    """The model of a body. Raises `ApiError`: it is not JSON, too much stands in one list or object, or it is
    not of that form."""
    was_enabled = gc.isenabled()
    gc.disable()  # it would look through the new lists again and again
    try:
        return _validator(model).validate_python(read_json(body))
    except ValidationError as error:
        raise as_api_error(error) from None
    finally:
        if was_enabled:
            gc.enable()


def read_json(body: bytes) -> Any:
    """The value of a JSON text with finite numbers, valid Unicode and fewer than 200 levels, the limit of
    https://github.com/pydantic/jiter. Raises `ApiError`."""
    try:
        value = from_json(body.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON of Unicode text: {error}") from None
    for field, inner in value.items() if isinstance(value, dict) else [("the body", value)]:
        _check_bounds(field, inner)
    return value


def _check_bounds(field: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() | list() as inner if len(inner) > MAX_ITEMS:
                # Token ids are bounded by the context; all other values are looked at one by one.
                if isinstance(inner, dict) or set(map(type, inner)) != {int}:
                    kind = "an object" if isinstance(inner, dict) else "a list"
                    problem = f"{len(inner)} values in {kind}: at most {MAX_ITEMS}"
                    raise bad_field(field[:64], problem)
            case dict() as inner:
                waiting += inner.values()
            case list() as inner:
                waiting += inner
            case float() as number if not math.isfinite(number):
                raise bad_field(field[:64], "a number is too large")  # 1e999


@cache
def _validator(model: type[BaseModel]) -> SchemaValidator:
    return SchemaValidator(_failing_fast(model.__pydantic_core_schema__))


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(map(_failing_fast, schema))
    if not isinstance(schema, dict):
        return schema
    copied = {key: _failing_fast(value) for key, value in schema.items()}
    return copied | ({"fail_fast": True} if copied.get("type") == "list" else {})
