"""Options of dataclasses as fields of a pydantic model, with the same names, defaults and limits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    create_model,
)

from ...quant.base.errors import BadInput
from ...quant.base.option import Option, options_of

Model = TypeVar("Model", bound=BaseModel)


def model_of(*configs: type, only: Collection[str] = ()) -> type[BaseModel]:
    """A pydantic model with a field for each option of the configs; values may also be text.

    Args:
        only: of these fields; empty: of all.
    """
    definitions: dict[str, Any] = {}
    for config in configs:
        hints, options = get_type_hints(config), options_of(config)
        for field in fields(config):
            if field.name not in options or (only and field.name not in only):
                continue
            one = options[field.name]
            names = AliasChoices(field.name, *one.former_names)
            default: dict[str, Any] = (
                {"default_factory": field.default_factory}
                if field.default_factory is not MISSING
                else {"default": field.default}
            )
            kind = Annotated[
                hints[field.name], BeforeValidator(one.value), AfterValidator(_within(one))
            ]
            info = Field(validation_alias=names, repr=not one.secret, **default)
            definitions[field.name] = (kind, info)
    return create_model(f"{configs[0].__name__}Fields", **definitions)


def _within(known: Option) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if value is not None and known.limit is not None and (complaint := known.limit(value)):
            raise ValueError(complaint)
        return value

    return checked


def checked(model: type[Model], values: dict[str, Any], where: str) -> Model:
    """`model` built from `values`.

    Raises:
        BadInput: an invalid value or an unknown key; the message names `where`, the key and the reason.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise BadInput(f"{where}: unknown key {key!r}") from error
        reason = first["msg"].removeprefix("Value error, ")
        if not key:  # a constraint over several options
            raise BadInput(f"{where}: {reason}") from error
        raise BadInput(f"{where}: {key}: {reason} (given: {first.get('input')!r})") from error
