"""The options of `EngineConfig` as fields of a pydantic model, with the same names, defaults and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field, create_model

from ...engine.config.option import Option, options_of


def model_of(config: type) -> type[BaseModel]:
    """A pydantic model with a field for each option of a config; values may also be text."""
    hints, options = get_type_hints(config), options_of(config)
    definitions: dict[str, Any] = {}
    for field in fields(config):
        if field.name not in options:
            continue
        known = options[field.name]
        names = AliasChoices(field.name, *known.former_names)
        default: dict[str, Any] = (
            {"default_factory": field.default_factory}
            if field.default_factory is not MISSING
            else {"default": field.default}
        )
        kind = Annotated[
            hints[field.name], BeforeValidator(known.value), AfterValidator(_within(known))
        ]
        definitions[field.name] = (kind, Field(validation_alias=names, **default))
    return create_model(f"{config.__name__}Fields", **definitions)


def _within(known: Option) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if value is not None and known.limit is not None and (complaint := known.limit(value)):
            raise ValueError(complaint)
        return value

    return checked
