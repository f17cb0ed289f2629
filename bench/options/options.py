"""Benchmark options, validated in one place for the command line and recipes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...engine.config.config import EngineConfig
from ...engine.config.option import options_of
from ...quant.base.errors import BadInput
from ...quant.base.names import offer
from ..metrics.metrics import METRICS, parse_goodput
from ..quality.passage import ProtocolName, ProtocolOptions
from .dataset_names import check_dataset
from .durations import parse_duration
from .engine_fields import model_of
from .think_time import ThinkTime

DEFAULT_CONCURRENCY = 8
POOLING_BACKENDS = ("openai-embeddings", "vllm-rerank", "vllm-pooling")
BACKEND_NAMES = ("openai", "vllm", "llmopt", "openai-chat", "transformers", *POOLING_BACKENDS)
Model = TypeVar("Model", bound=BaseModel)
PositiveInt = Annotated[int, Field(ge=1)]
PositiveRate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


# A dynamic model, opaque to type checkers; `BenchOptions.engine` returns the typed config.
EngineFields: Any = model_of(EngineConfig)


class BenchOptions(EngineFields, BaseModel):
    """Options of one benchmark: those of `EngineConfig`, plus data set, load, measurement and output.
    Names follow `vllm bench serve` where it has them.

    With neither `request_rate` nor `max_concurrency` the load is a closed loop of 8 users. With a rate
    and no limit it is an open loop; a rate of infinity then sends everything at once. A ramp-up is an
    open loop too, and so is a data set that brings its own arrival times.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    dataset: str = "sharegpt"
    dataset_path: Path | None = None
    num_prompts: PositiveInt = 48
    output_len: PositiveInt | None = None
    random_input_len: PositiveInt | None = None
    random_output_len: PositiveInt | None = None
    random_prefix_len: Annotated[int, Field(ge=0)] = 0
    random_batch_size: PositiveInt = 1
    random_range_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    random_mm_base_items_per_request: Annotated[int, Field(ge=0)] = 1
    random_mm_num_mm_items_range_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    random_mm_limit_mm_per_prompt: str | None = None
    random_mm_bucket_config: str | None = None
    prefix_repetition_prefix_len: Annotated[int, Field(ge=0)] | None = None
    prefix_repetition_suffix_len: PositiveInt | None = None
    prefix_repetition_num_prefixes: PositiveInt = 10
    prefix_repetition_output_len: PositiveInt | None = None
    sonnet_input_len: PositiveInt | None = None
    sonnet_output_len: PositiveInt | None = None
    sonnet_prefix_len: Annotated[int, Field(ge=0)] | None = None
    hf_subset: str | None = None
    hf_split: str = "train"
    trace_start: Annotated[float, Field(ge=0)] = 0.0
    trace_speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    trace_lengths: Literal["clip", "scale"] | None = None
    disable_shuffle: bool = False
    no_oversample: bool = False

    multi_turn: bool = False
    multi_turn_min_turns: PositiveInt = 2
    multi_turn_max_turns: PositiveInt | None = None
    multi_turn_history: Literal["model", "dataset"] = "model"
    think_time: str = "0"
    agentic_num_turns: PositiveInt | None = None
    agentic_system_len: PositiveInt | None = None
    agentic_task_len: PositiveInt | None = None
    agentic_tool_output_len: PositiveInt | None = None
    agentic_tool_output_growth: Annotated[float, Field(gt=0, le=10)] | None = None
    agentic_output_len: PositiveInt | None = None

    request_rate: Annotated[float, Field(gt=0)] | None = None
    burstiness: Annotated[float, Field(gt=0)] = 1.0
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    ramp_up_start_rps: PositiveRate | None = None
    ramp_up_end_rps: PositiveRate | None = None
    max_concurrency: PositiveInt | None = None
    duration: PositiveRate | None = None
    num_warmups: Annotated[int, Field(ge=0)] | None = None
    num_runs: PositiveInt = 5
    max_redone_passes: Annotated[int, Field(ge=0)] = 2
    lora_assignment: Literal["random", "round-robin"] = "round-robin"
    ignore_eos: bool = True
    temperature: Annotated[float, Field(ge=0)] = 0.0
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    slowdown_where: Literal["step", "sampler"] = "step"

    serve: str | None = None
    serve_args: str | None = None
    serve_program: Path | None = None
    serve_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    # Set internally for a server that was started for this run; not an option.
    started_server: dict[str, Any] | None = None
    base_url: str | None = None
    backend: str = "openai"
    endpoint: str | None = None
    tokenizer: str | None = None
    api_key: str | None = Field(default=None, repr=False)
    header: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    insecure: bool = False
    request_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    client_workers: PositiveInt | None = None
    check_client: bool = True
    server_gpu: str | None = None
    client_burden_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0

    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    metric_percentiles: tuple[Annotated[float, Field(ge=0, le=100)], ...] = (99.0,)
    goodput: tuple[str, ...] = ()

    quality: bool = True
    quality_tokens: Annotated[int, Field(ge=2)] = 4096
    quality_text: Path | None = None
    quality_protocol: ProtocolName = "documents"
    quality_window: PositiveInt | None = None
    quality_stride: PositiveInt | None = None
    reference: str | None = None
    tasks: tuple[str, ...] = ()
    tasks_limit: PositiveInt | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None

    plan: Path | None = None
    gpu_hour_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    label: str | None = None
    name: str | None = None
    metadata: dict[str, str] = {}
    save_detailed: bool = False
    report: bool = True

    @field_validator("percentile_metrics", "metric_percentiles", "tasks", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [word.strip() for word in value.split(",")] if isinstance(value, str) else value

    @field_validator("dataset")
    @classmethod
    def _located(cls, name: str) -> str:
        check_dataset(name)
        return name

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, name: str) -> str:
        if name not in BACKEND_NAMES:
            raise ValueError(f"no --backend {name!r}: {offer(name, BACKEND_NAMES)}")
        return name

    @field_validator("percentile_metrics")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in METRICS:
                raise ValueError(f"{name!r} is none of {', '.join(METRICS)}")
        return names

    @field_validator("duration", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        return parse_duration(value) if isinstance(value, str) else value

    @field_validator("think_time", mode="before")
    @classmethod
    def _pauses(cls, value: Any) -> str:
        ThinkTime.parse(str(value))
        return str(value)

    @field_validator("goodput")
    @classmethod
    def _limits(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        parse_goodput(words)
        return words

    @model_validator(mode="after")
    def _engine_options_go_together(self) -> Self:
        _ = self.engine
        return self

    @model_validator(mode="after")
    def _quality_options_go_together(self) -> Self:
        ProtocolOptions(self.quality_protocol, self.quality_window, self.quality_stride)
        return self

    @model_validator(mode="after")
    def _whole_ramp(self) -> Self:
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if None in ramp and ramp != (None, None, None):
            raise ValueError(
                "a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
            )
        if self.ramp_up_strategy is not None and self.request_rate is not None:
            raise ValueError("give --request-rate or a ramp-up, not both")
        return self

    @model_validator(mode="after")
    def _sensible_turns(self) -> Self:
        most = self.multi_turn_max_turns
        if most is not None and most < self.multi_turn_min_turns:
            raise ValueError(
                f"--multi-turn-max-turns {most} is below --multi-turn-min-turns {self.multi_turn_min_turns}"
            )
        return self

    @model_validator(mode="after")
    def _bounded_duration(self) -> Self:
        if self.duration is None:
            return self
        if self.ramp_up_strategy is not None:
            raise ValueError("a ramp lasts as long as its prompts: leave --duration away")
        return self

    @model_validator(mode="after")
    def _task_options_need_tasks(self) -> Self:
        for name in ("tasks_limit", "num_fewshot", "apply_chat_template", "system_instruction"):
            if getattr(self, name) not in (None, False) and not self.tasks:
                raise ValueError(f"--{name.replace('_', '-')} is for --tasks: name some")
        return self

    @model_validator(mode="after")
    def _reference_is_of_the_same_kind(self) -> Self:
        if self.reference is None:
            return self
        is_url = self.reference.startswith(("http://", "https://"))
        if is_url != (self.base_url is not None or self.serve is not None):
            raise ValueError(
                "--reference is a model beside a model of this process, and the URL of a server beside "
                "--base-url or --serve"
            )
        return self

    @model_validator(mode="after")
    def _adapters_and_speculation(self) -> Self:
        is_served = self.base_url is not None or self.serve is not None
        if self.speculation and is_served:
            raise ValueError(
                "--speculative is for the model in this process: leave --base-url away, or give it to "
                "the server"
            )
        if self.loras and self.tasks:
            raise ValueError("--tasks scores the model without adapters: leave --lora away")
        if len(self.loras) > 1 and self.quality and not is_served:
            raise ValueError("quality is scored of one adapter: give one --lora, or --no-quality")
        return self

    @model_validator(mode="after")
    def _pooling_over_http(self) -> Self:
        if not self.is_pooling:
            if self.random_batch_size > 1:
                raise ValueError(
                    f"--random-batch-size is for --backend {' or '.join(POOLING_BACKENDS)}"
                )
            return self
        if self.base_url is None and self.serve is None:
            raise ValueError(f"--backend {self.backend} needs a server: give --base-url or --serve")
        if self.tasks:
            raise ValueError(
                f"--tasks needs a model that generates: --backend {self.backend} does not"
            )
        if set(parse_goodput(self.goodput)) - {"e2el"}:
            raise ValueError(f"--goodput of --backend {self.backend} has one metric, e2el")
        return self

    @property
    def engine(self) -> EngineConfig:
        """The engine configuration (without the model)."""
        return EngineConfig(**{name: getattr(self, name) for name in options_of(EngineConfig)})

    @property
    def is_pooling(self) -> bool:
        """Whether requests are for embeddings, scores or pooled states, not for tokens."""
        return self.backend in POOLING_BACKENDS

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """The metrics at the top level; of pooling requests E2EL, as in vLLM."""
        usual = type(self).model_fields["percentile_metrics"].default
        is_usual = self.percentile_metrics == usual
        return ("e2el",) if self.is_pooling and is_usual else self.percentile_metrics

    @property
    def rate(self) -> float:
        """Requests per second; infinity when no rate is set."""
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
        """Number of warm-up requests; by default the measured concurrency."""
        if self.num_warmups is not None:
            return self.num_warmups
        return min(self.concurrency or DEFAULT_CONCURRENCY, self.num_prompts)


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
