"""`BenchOptions`: a benchmark's options, validated in one place for the command line and recipes.

`model_of` makes pydantic fields of the definitions, with the same names, defaults and limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import partial
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from ...base.errors import BadInput
from ...base.option import Option, offer, options_of, spellings, word_name
from ...engine.base.units import parse_slo
from ...engine.config.config import EngineConfig
from ..metrics.names import METRICS
from ..quality.passage import ProtocolOptions
from . import definitions as of
from .values import BACKENDS, POOLING, ThinkTime, check_dataset

Model = TypeVar("Model", bound=BaseModel)


def model_of(*configs: type, but: Collection[str] = ()) -> Any:
    """A pydantic model with a field for each option of the configs, all `but` some; values may be text.

    A key may be any spelling of the option. The options of a nested config are fields too, as on a command
    line, and make it where they are given. The class is made when a module is loaded, so it is opaque to type
    checkers.
    """
    definitions: dict[str, Any] = {}
    nested: dict[str, type] = {}
    for config in configs:
        hints, options = get_type_hints(config), options_of(config)
        for field in fields(config):
            known = options.get(field.name)
            if known is None or field.name in but:
                continue
            kind, info = _field_of(field, hints[field.name], known)
            if known.config is not None:
                nested[field.name], kind = known.config, SkipJsonSchema[kind]
                definitions |= _words_of_nested(known.config)
            definitions[field.name] = (kind, info)
    name = configs[0].__name__
    gathered: Any = model_validator(mode="after")(_gathering(nested))
    validators = {f"gathered_{name}": gathered} if nested else {}
    return create_model(f"{name}Fields", __validators__=validators, **definitions)


def _field_of(field: Any, hint: Any, option: Option, **more: Any) -> tuple[Any, Any]:
    if not more and field.default_factory is not MISSING:
        more = {"default_factory": field.default_factory}
    elif not more:
        more = {"default": field.default}
    parsed = option.word is not None and get_origin(hint) is not Literal
    read = BeforeValidator(
        partial(_value, option), json_schema_input_type=hint | option.word if parsed else hint
    )
    names = AliasChoices(*spellings(field.name, option))
    info = Field(validation_alias=names, repr=not option.secret, description=option.help, **more)
    return Annotated[hint, read, AfterValidator(_within(option))], info


def _words_of_nested(config: type) -> dict[str, Any]:
    """Optional fields for the options of a nested config, by the names of their flags."""
    hints, options = get_type_hints(config), options_of(config)
    optional: dict[str, Any] = {"default": None, "exclude": True}
    made = {}
    for field in fields(config):
        own, hint = options[field.name], hints[field.name] | None
        made[word_name(field.name, own)] = _field_of(field, hint, own, **optional)
    return made


def _gathering(nested: Mapping[str, type]) -> Callable[[Any], Any]:
    """A validator that makes nested configs of the fields of their options, and unsets those fields."""

    def gathered(self: Any) -> Any:
        given = {word: getattr(self, word) for word in self.model_fields_set}
        for field, config in nested.items():
            names = {word_name(name, known): name for name, known in options_of(config).items()}
            if own := {names[word]: value for word, value in given.items() if word in names}:
                make: Any = getattr(config, "asked", config)
                values = {name: value for name, value in own.items() if value is not None}
                self.__dict__.update({field: make(**values)}, **dict.fromkeys(names))
                self.model_fields_set.difference_update(names)
                self.model_fields_set.add(field)
        return self

    return gathered


def _value(option: Option, value: Any) -> Any:
    """The value of a field; a text may stand for a list of one value."""
    is_list = get_origin(option.word) is list and isinstance(value, str)
    return option.value([value] if is_list else value)


def _within(known: Option) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if value is not None and known.limit is not None and (complaint := known.limit(value)):
            raise ValueError(complaint)
        return value

    return checked


def checked(model: type[Model], values: dict[str, Any], where: str) -> Model:
    """`model` built from `values`. Raises BadInput: an invalid value or an unknown key; the message names
    `where`, if any, the key and the reason."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        start = f"{where}: " if where else ""
        raise BadInput(start + words_of_error(model, error)) from error


def words_of_error(model: type[BaseModel], error: ValidationError) -> str:
    """The first error in one line: the key, the fault, and for an unknown key the nearest one."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        for step in first["loc"][:-1]:
            former = next(
                (f for name, f in model.model_fields.items() if step in _names(name, f)), None
            )
            model = model if former is None else _model_in(former.annotation) or model
        known = [key for name, field in model.model_fields.items() for key in _names(name, field)]
        near = get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.0)
        return f"unknown key {key!r}: the nearest is {near[0]}"
    reason = first["msg"].removeprefix("Value error, ")
    if not key:  # a constraint over several options
        return reason
    given = repr(first.get("input"))
    return f"{key}: {reason}" + ("" if given in reason else f" (given: {given})")


def _names(name: str, field: FieldInfo) -> list[Any]:
    alias = field.validation_alias
    return alias.choices if isinstance(alias, AliasChoices) else [alias or name]


def _model_in(kind: Any) -> type[BaseModel] | None:
    """The pydantic model in a type such as `tuple[Model, ...]`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((model for part in get_args(kind) if (model := _model_in(part))), None)


DEFAULT_CONCURRENCY = 8

# `BenchOptions.engine` returns the typed config.
_EngineFields = model_of(EngineConfig)
if TYPE_CHECKING:

    class _Load(of.DataOptions, of.ConversationOptions, of.ArrivalOptions, of.LoadOptions): ...

    class _Scores(of.MetricOptions, of.QualityOptions, of.RecordOptions): ...

    class _Fields(_Load, of.TargetOptions, _Scores, BaseModel, frozen=True):
        def __init__(self, **values: Any) -> None: ...

else:
    _Fields = model_of(*of.BENCH_GROUPS)


class BenchFields(_Fields, _EngineFields, BaseModel):
    """The options of a benchmark, each valid by itself."""

    # JSON has no infinity: a rate without limit is the text that is read back as one.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class BenchOptions(BenchFields):
    """Options of one benchmark: those of `EngineConfig`, plus data set, load, measurement and output.

    With neither `request_rate` nor `max_concurrency` the load is a closed loop of 8 users. With a rate
    and no limit it is an open loop; a rate of infinity then sends everything at once. A ramp-up is an
    open loop too, and so is a data set that brings its own arrival times.
    """

    model: str | None = None
    # Set internally for a server that was started for this run; not an option.
    started_server: SkipJsonSchema[dict[str, Any] | None] = None

    @field_validator("think_time", mode="before")
    @classmethod
    def _pauses(cls, value: Any) -> str:
        ThinkTime.parse(str(value))
        return str(value)

    @field_validator("dataset", "backend", "percentile_metrics", "goodput", "api_key")
    @classmethod
    def _known(cls, value: Any, field: ValidationInfo) -> Any:
        if field.field_name == "dataset":
            check_dataset(value)
        elif field.field_name == "backend" and value not in BACKENDS:
            raise ValueError(f"no --backend {value!r}: {offer(value, BACKENDS)}")
        elif field.field_name == "goodput":
            parse_slo(value)
        elif field.field_name == "percentile_metrics":
            for name in value:
                if name not in METRICS:
                    raise ValueError(f"{name!r} is none of {', '.join(METRICS)}")
        elif field.field_name == "api_key":
            return value and value.strip()  # a file's last line feed is no part of a key
        return value

    @model_validator(mode="after")
    def _options_go_together(self) -> Self:
        _ = self.engine
        ProtocolOptions(self.quality_protocol, self.quality_window, self.quality_stride)
        if complaint := self._load_complaint() or self._target_complaint():
            raise ValueError(complaint)
        return self

    def _load_complaint(self) -> str | None:
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if None in ramp and ramp != (None, None, None):
            return "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
        if self.ramp_up_strategy is not None and self.request_rate is not None:
            return "give --request-rate or a ramp-up, not both"
        fewest, most = self.multi_turn_min_turns, self.multi_turn_max_turns
        if most is not None and most < fewest:
            return f"--multi-turn-max-turns {most} is below --multi-turn-min-turns {fewest}"
        if self.duration is not None and self.ramp_up_strategy is not None:
            return "a ramp lasts as long as its prompts: leave --duration away"
        for name in ("tasks_limit", "num_fewshot", "apply_chat_template", "system_instruction"):
            if getattr(self, name) not in (None, False) and not self.task_names:
                return f"--{name.replace('_', '-')} is for --tasks: name some"
        return None

    def _target_complaint(self) -> str | None:
        """The first contradiction between options of the model, the server and the scores."""
        is_served = self.base_url is not None or self.serve is not None
        if self.reference is not None:
            is_url = self.reference.startswith(("http://", "https://"))
            if is_url != is_served:
                return (
                    "--reference is a model beside a model of this process, and the URL of a server beside "
                    "--base-url or --serve"
                )
        if self.speculation and is_served:
            return (
                "--speculative is for the model in this process: leave --base-url away, or give it to "
                "the server"
            )
        if self.quality_kv and (is_served or not self.quality or not self.quality_depth):
            return (
                "--quality-kv compares KV caches of the model in this process at --quality-depth: give one, "
                "and leave --base-url, --serve and --no-quality away"
            )
        if self.tool_responses is not None and "tool_calls" not in self.task_names:
            return "--tool-responses is for --tool-calls: give bundled, or the file of the items"
        if "needles" in self.tasks and not self.quality_depth:
            return "--tasks needles are asked at --quality-depth: give one, such as 4k,32k"
        if self.loras and self.task_names:
            return "--tasks and needles score the model without adapters: leave --lora away"
        if len(self.loras) > 1 and self.quality and not is_served:
            return "quality is scored of one adapter: give one --lora, or --no-quality"
        if not self.is_pooling:
            is_batched = self.random_batch_size > 1
            return (
                f"--random-batch-size is for --backend {' or '.join(POOLING)}"
                if is_batched
                else None
            )
        if not is_served:
            return f"--backend {self.backend} needs a server: give --base-url or --serve"
        if self.task_names:
            return f"--tasks needs a model that generates: --backend {self.backend} does not"
        if set(parse_slo(self.goodput)) - {"e2el"}:
            return f"--goodput of --backend {self.backend} has one metric, e2el"
        return None

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(**{name: getattr(self, name) for name in options_of(EngineConfig)})

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks, with those of `--tool-calls` and `--quality-depth`."""
        tools = ("tool_calls",) if self.tool_calls is not None else ()
        needles = ("needles",) if self.quality_depth and self.needles else ()
        return tuple(dict.fromkeys((*self.tasks, *tools, *needles)))

    @property
    def is_pooling(self) -> bool:
        return self.backend in POOLING

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """The metrics at the top level; of pooling requests E2EL, as in vLLM."""
        usual = type(self).model_fields["percentile_metrics"].default
        is_usual = self.percentile_metrics == usual
        return ("e2el",) if self.is_pooling and is_usual else self.percentile_metrics

    @property
    def rate(self) -> float:
        return math.inf if self.request_rate is None else self.request_rate

    @property
    def concurrency(self) -> int | None:
        """Maximum requests in flight, or None for no limit."""
        unpaced = self.request_rate is None and self.ramp_up_strategy is None
        if self.max_concurrency is None and unpaced:
            return DEFAULT_CONCURRENCY
        return self.max_concurrency

    @property
    def warmups(self) -> int:
        if self.num_warmups is not None:
            return self.num_warmups
        return min(self.concurrency or DEFAULT_CONCURRENCY, self.num_prompts)
