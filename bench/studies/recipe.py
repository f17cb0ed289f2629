"""Recipes: the schema of YAML workflows that quantize, serve, bench and compare, or find a capacity.

The steps have the options of `quantize`, `bench` and `serve-local` under their names, from the definitions of
those commands.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ...base.errors import BadInput
from ...base.option import options_of, words_of
from ...engine.base.units import parse_bytes
from ...engine.config.config import EngineConfig
from ...engine.deploy.engine_commands import server_command
from ...engine.server.protocol.server_options import (
    HandoverOptions,
    ServedModelOptions,
    ServerOptions,
)
from ...quant.methods.options import MethodOptions
from ...quant.methods.registry import METHODS, formats_asked
from ...quant.plan.request import QuantizeRequest
from ...quant.source.models import is_local
from ...recipes import DEFAULT_MODEL
from ..gate.gate_options import GateSpeed, LimitOptions
from ..gate.limits import parse_gate
from ..machine.environment import without_secrets
from ..options.options import BenchFields, BenchOptions, checked, model_of
from ..options.values import parse_loads
from ..record.tracking import MlflowTracker, TrackingOptions

BASE_NAME = "original"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _given(step: BaseModel, *configs: type) -> dict[str, Any]:
    """The options that a step has, of some configs or all, by the names of their fields."""
    known = {name for config in configs for name in options_of(config)} if configs else None
    names = step.model_fields_set if known is None else step.model_fields_set & known
    return {name: getattr(step, name) for name in names}


class BenchStep(model_of(TrackingOptions), BenchOptions):
    """Options of `llmopt bench`, by the same names."""

    csv: bool = False

    @property
    def tracker(self) -> MlflowTracker | None:
        return TrackingOptions(**_given(self, TrackingOptions)).tracker()


class QuantizeStep(model_of(QuantizeRequest), _Strict):
    """Options of `llmopt quantize`, by the same names and with the same defaults."""

    @field_validator("target_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self.request(Path(), Path(), "")
        if len(formats_asked(self.format)) > 1:
            raise ValueError(
                f"--format {self.format}: a variant is one checkpoint, give one format"
            )
        return self

    @property
    def words(self) -> str:
        method = METHODS.get(self.method)
        width = f"{self.bits or (method and method.bits)} bits"
        if self.target_bpw is not None:
            width = f"{self.target_bpw:g} bits per weight"
        elif self.target_bytes is not None:
            width = f"{self.target_bytes:,} bytes"
        return f"{self.method}, {self.gguf_type or width}"

    def request(self, model: Path, output: Path, name: str) -> QuantizeRequest:
        """Quantization of `model` as by `llmopt quantize`. BadInput: options that no model fulfils."""
        usual: dict[str, Any] = {"rotations": None, "options": MethodOptions.asked()}
        given = usual | _given(self, QuantizeRequest)
        return QuantizeRequest(model=model, output=output, model_name=name, **given)


_SERVER = (HandoverOptions, ServedModelOptions, EngineConfig, ServerOptions)
_ANOTHER = ("pipeline_parallel_size", "ray")


class ServeStep(model_of(*_SERVER, but=("served_model_name", "print_command", "script")), _Strict):
    """Options of `llmopt serve-local` on a free port; `engine`: of vLLM, SGLang or TensorRT-LLM."""

    scripted_output: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_keys(cls, values: Any) -> Any:
        return _refuse(values, "host", "port", "served_model_name", "json", "print_command")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _ = self.arguments
        return self

    @property
    def arguments(self) -> str:
        """The server's words of these options. BadInput: they contradict, or it has no equivalent."""
        given: dict[str, Any] = {}
        for config in _SERVER:
            given |= words_of(config, _given(self, config))
        given.pop("engine", None)
        if self.engine != "llmopt":
            return shlex.join(server_command(self.engine).options(given))
        if others := [name for name in _ANOTHER if name in given]:
            raise BadInput(f"{others[0]} is for another engine")
        EngineConfig(**_given(self, EngineConfig))
        ServerOptions(**_given(self, ServerOptions))
        if self.scripted_output is not None:
            given["scripted_output"] = str(self.scripted_output)
        return shlex.join(server_words(given))


def server_words(params: Mapping[str, Any]) -> list[str]:
    """A command line of the words of options (`words_of`): `max_num_seqs: 8` is `--max-num-seqs 8`; true and
    false are `--x` and `--no-x`; a list repeats the option."""
    arguments: list[str] = []
    for key, value in params.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
            continue
        for item in value if isinstance(value, list) else [value]:
            arguments += [f"--{name}", str(item)]
    return arguments


def _refuse(values: Any, *keys: str) -> Any:
    """The values of a step, without keys that the recipe itself sets."""
    for key in keys:
        if isinstance(values, Mapping) and key in values:
            raise ValueError(f"{key!r} is set by the recipe itself")
    return values


class Variant(_Strict):
    """Another checkpoint, GGUF file, server or set of options, measured against the original.

    Attributes:
        model: a folder, a GGUF file, a bundled model's name or a hub id; by default the recipe's. For a
            server at `bench.base_url` the model's name there.
        quantize: makes a checkpoint of `model`. A variant of a name alone is quantized with the defaults.
        serve_local: options of the server to start; `bench.serve` names others.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    model: str | None = None
    quantize: QuantizeStep | None = None
    serve_local: ServeStep | None = None
    bench: BenchFields = BenchFields()

    @field_validator("name")
    @classmethod
    def _not_base(cls, name: str) -> str:
        if name in (BASE_NAME, "checkpoints"):
            raise ValueError(f"{name!r} is taken")
        return name

    @field_validator("bench", mode="before")
    @classmethod
    def _own_keys(cls, values: Any) -> Any:
        return _refuse(values, "model", "name")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.bench.base_url is not None and (self.quantize or self.serve_local):
            raise ValueError(
                "the server at base_url has its model: leave quantize and serve_local away"
            )
        if self.serve_local and self.bench.serve:
            raise ValueError("serve_local and bench.serve each start a server: give one")
        return self

    @property
    def made(self) -> QuantizeStep | None:
        is_alone = self.model_fields_set == {"name"}
        return QuantizeStep() if is_alone else self.quantize


_Values = Annotated[list[Any], Field(min_length=1)]


class Grid(_Strict):
    """Lists of values of what a variant has: each combination of them is a variant."""

    model: _Values | None = None
    quantize: dict[str, _Values] = Field(default_factory=dict)
    serve_local: dict[str, _Values] = Field(default_factory=dict)
    bench: dict[str, _Values] = Field(default_factory=dict)

    def variants(self) -> list[dict[str, Any]]:
        """The variants as a recipe has them; the options that a name begins with change slowest."""
        steps = {name: getattr(self, name) for name in ("quantize", "serve_local", "bench")}
        axes = [(step, key, values) for step, axes in steps.items() for key, values in axes.items()]
        if self.model is not None:
            axes.insert(0, ("", "model", self.model))
        variants = []
        for values in product(*(values for _, _, values in axes)):
            variant: dict[str, Any] = {}
            for (step, key, _), value in zip(axes, values, strict=True):
                (variant.setdefault(step, {}) if step else variant)[key] = value
            shown = (json.dumps(v) if isinstance(v, bool | Mapping | list) else v for v in values)
            labels = [f"{key}-{text}" for (_, key, _), text in zip(axes, shown, strict=True)]
            name = "_".join(re.sub(r"[^\w.-]+", "_", word) for word in labels)
            variants.append({"name": name, **variant})
        return variants


class CompareStep(_Strict):
    """How variants are compared (`llmopt compare`); `gate`: limits, true: from other keys, false: none. With
    `gate_speed` the run begins with the smallest change of speed that this machine can tell."""

    gate: bool | str = True
    threshold: str | float = "5%"
    max_ppl_increase: str | float | None = None
    max_kl: float | None = None
    min_top1: str | float | None = None
    gate_speed: GateSpeed | None = None

    @field_validator("gate", mode="before")
    @classmethod
    def _limits(cls, value: Any) -> Any:
        if value in ("true", "false"):
            return value == "true"
        if isinstance(value, str):
            parse_gate(value)
        return value

    @property
    def options(self) -> LimitOptions:
        gate = self.gate if isinstance(self.gate, str) else None
        return LimitOptions(**{**self.model_dump(), "threshold": str(self.threshold), "gate": gate})


class CapacityStep(_Strict):
    """Capacity of one model here: a sweep over users such as `1,2,4,8`, or `auto`, to `max_model_len`."""

    sweep_concurrency: str = Field(
        "auto", validation_alias=AliasChoices("sweep_concurrency", "loads")
    )
    max_model_len: Annotated[int, Field(ge=2)] | None = Field(
        None, validation_alias=AliasChoices("max_model_len", "context")
    )

    @property
    def users(self) -> str:
        """How many there are at once, in words."""
        loads = parse_loads(self.sweep_concurrency, "concurrency")
        if loads is None:
            return "1, 2, 4 ... users until throughput gains little"
        return f"{', '.join(f'{load:g}' for load in loads)} users"

    @field_validator("sweep_concurrency")
    @classmethod
    def _known(cls, text: str) -> str:
        parse_loads(text, "concurrency")
        return text


class Recipe(_Strict):
    """Quantize a model in one or several ways, verify each, bench them and other variants, compare, report;
    or find the `capacity` of one model.

    `interleave` loads all models, or starts all servers, at once and interleaves their passes (paired runs),
    so that drift of the machine affects all alike. `num_threads` are the CPU threads of every step here.
    `bench` and `serve_local` hold for the original and for each variant without its own. A `grid` becomes
    variants, after the others.
    """

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    model: str | None = None
    interleave: bool = False
    num_threads: Annotated[int, Field(ge=1)] | None = None
    bench: BenchStep = BenchStep()
    serve_local: ServeStep | None = None
    variants: tuple[Variant, ...] = ()
    grid: Grid | None = None
    capacity: CapacityStep | None = None
    compare: CompareStep = CompareStep()

    @field_validator("bench", mode="before")
    @classmethod
    def _own_keys(cls, values: Any) -> Any:
        return _refuse(values, "model", "name", "started_server")

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, values: Any) -> Any:
        """Put variants in the place of a grid; one of another form stays for its field to refuse."""
        if not isinstance(values, Mapping) or not isinstance(values.get("variants", []), list):
            return values
        try:
            variants = Grid.model_validate(values.get("grid")).variants()
        except ValidationError:
            return values
        others = {key: value for key, value in values.items() if key != "grid"}
        return {**others, "variants": [*values.get("variants", []), *variants]}

    @field_validator("variants")
    @classmethod
    def _distinct(cls, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
        names = [variant.name for variant in variants]
        if len(set(names)) < len(names):
            raise ValueError(f"two variants have the same name among {', '.join(names)}")
        return variants

    @model_validator(mode="after")
    def _one_purpose(self) -> Self:
        if bool(self.variants) == (self.capacity is not None):
            raise ValueError("give variants to compare, or a capacity to find")
        if self.serve_local and (self.bench.serve or self.bench.base_url):
            raise ValueError(
                "serve_local, bench.serve and bench.base_url each name a server: give one"
            )
        is_served = self.serve_local or self.bench.serve or self.bench.base_url
        if self.capacity is not None and is_served:
            raise ValueError("capacity is of the engine in this process: leave servers away")
        return self

    @property
    def model_name(self) -> str:
        return self.model or DEFAULT_MODEL

    @property
    def threads(self) -> int | None:
        return self.bench.num_threads or self.num_threads

    def dump(self, *, exclude_unset: bool = False) -> dict[str, Any]:
        """The recipe as plain values, without keys and headers, which are secret."""
        secret: Any = {
            "bench": {"api_key": True, "header": True},
            "serve_local": {"api_keys": True, "admin_api_key": True},
        }
        hidden = {**secret, "variants": {"__all__": secret}}
        return json.loads(self.model_dump_json(exclude_unset=exclude_unset, exclude=hidden))


_WHERE = ("serve", "serve_args", "serve_program", "base_url", "endpoint", "backend")


def bench_of(recipe: Recipe, variant: Variant | None, model: str | None = None) -> BenchOptions:
    """The benchmark of the original, or with a variant's options. BadInput: contradictory options."""
    given, serve = _given(recipe.bench), recipe.serve_local
    given = {key: value for key, value in given.items() if key in BenchOptions.model_fields}
    name, own = BASE_NAME, {}
    model = recipe.model if variant is None else model or variant.model or recipe.model
    if variant is not None:
        name, own = variant.name, _given(variant.bench)
        serve = variant.serve_local or serve
        at_url = "base_url" in given and variant.made is not None
        if variant.serve_local or at_url or {"serve", "base_url"} & own.keys():
            given = {key: value for key, value in given.items() if key not in _WHERE}
    if {"serve", "base_url"} & own.keys() or "base_url" in given:
        serve = None
    given |= own
    if serve is not None:
        extra = given.get("serve_args") or ""
        given |= {"serve": serve.engine, "serve_args": f"{serve.arguments} {extra}".strip() or None}
    if recipe.num_threads is not None:
        given.setdefault("num_threads", recipe.num_threads)
    if given.get("serve") == "llmopt" and given.get("num_threads") is not None:
        serve_args = given.get("serve_args") or ""
        given["serve_args"] = f"--num-threads {given['num_threads']} {serve_args}".strip()
    if given.get("base_url") is not None and variant is not None:
        model = variant.model  # asked of the server if it is not named
        if is_local(recipe.model_name):
            given.setdefault("tokenizer", recipe.model_name)
    where = "bench" if variant is None else f"variants.{name}.bench"
    return checked(BenchOptions, {**given, "model": model, "name": name}, where)


def steps_of(recipe: Recipe) -> list[str]:
    """The steps of a recipe as text, one line per step (dry run). Nothing is loaded."""
    model = recipe.model_name
    if recipe.capacity is not None:
        return [
            f"bench {model} with 1 user: the ceilings of this machine and the efficiency reached",
            f"plan {model} with those ceilings",
            f"bench {model} with {recipe.capacity.users}: {recipe.bench.dataset}, "
            f"{recipe.bench.num_prompts} prompts at each load",
            "write report.html: the plan beside the measured knee",
        ]
    lines = []
    for variant in recipe.variants:
        if (step := variant.made) is not None:
            source = variant.model or model
            lines.append(f"quantize {source} to checkpoints/{variant.name}: {step.words}")
            lines.append(f"verify checkpoints/{variant.name}")
    for variant in (None, *recipe.variants):
        options = bench_of(recipe, variant)
        if options.serve is not None:
            serve_args = " ".join(without_secrets((options.serve_args or "").split(" ")))
            is_made = variant is not None and variant.made is not None
            served = f"checkpoints/{options.name}" if is_made else options.model
            name = options.name if served is None else f"{options.name} ({served})"
            lines.append(f"serve {name} by {options.serve} {serve_args}".rstrip())
        elif options.base_url is not None:
            lines.append(f"take {options.name} from {options.base_url}")
    names = ", ".join([BASE_NAME, *(variant.name for variant in recipe.variants)])
    order = "in turns" if recipe.interleave else "one after another"
    bench = recipe.bench
    lines.append(
        f"bench {names} {order}: {bench.dataset}, {bench.num_prompts} prompts, {bench.num_runs} passes"
    )
    for variant in recipe.variants:
        gate = recipe.compare.gate
        limits = gate if isinstance(gate, str) else f"threshold {recipe.compare.threshold}"
        lines.append(f"compare {variant.name} with {BASE_NAME}, {limits}")
    verdicts = "decide" if recipe.compare.gate else "do not decide"
    return [*lines, f"write report.html; the verdicts {verdicts} the exit code"]
