"""Options of a plan: workload, deployment, speculation, prices; unset ones are chosen by the solver.

Prices change by the month: those of `prices.json` are dated, and `--gpu-hour-price` replaces them.
Speculation follows Leviathan et al. (2023).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import inf
from typing import Self

from ...base.errors import BadInput
from ...quant.families.shapes import ModelShape
from ..scheduling.kv_eviction import KvEviction
from .cache_size import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULT_UTILIZATION,
    KvCacheBudget,
    kv_dtype,
)
from .devices import Device, HourPrice
from .engine_rules import engine_rule
from .load import ImageLoad, PlannedLoad, check_prefix_share
from .memory import GIB, Reserve
from .offload import Host
from .speed import Efficiency
from .step_model import check_counts, generation
from .step_parameters import OwnRows
from .weights import UNQUANTIZED_BYTES, ExpertPadding, WeightRecipe

# Default fraction of the context that is output, the rest is prompt.
OUTPUT_FRACTION = 0.25
SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24
MILLION = 1e6


# vLLM pads MXFP4 experts for the kernel that it chooses by the GPU: Marlin, TRT-LLM on Blackwell, ROCm's
# (`mxfp4_round_up_hidden_size_and_intermediate_size` in fused_moe/oracle/mxfp4.py @ 001eda3). On Hopper it is
# Triton's, whose layout pads inputs: inferred from two loads, 64.38 GiB of gpt-oss-120b (vllm#33155, v0.14.1)
# and 13.47 GiB of gpt-oss-20b (llm-d's memory document).
_MARLIN = ExpertPadding(256, 128)
MXFP4_PADDING = {
    "hopper": ExpertPadding(256, 256, inputs_only=True),
    "blackwell": ExpertPadding(256, 256),
    "amd": ExpertPadding(256, 256),
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """`draft_tokens` draft tokens per step, each accepted with probability `acceptance`; a step of the draft
    model takes `draft_cost` of a target step. The draft model's memory is not counted."""

    draft_tokens: int
    acceptance: float
    draft_cost: float = 0.1

    def __post_init__(self) -> None:
        check_counts(draft_tokens=self.draft_tokens)
        if not 0 <= self.acceptance <= 1:
            raise BadInput(f"--acceptance {self.acceptance}: a probability is needed")
        if not self.draft_cost >= 0:
            raise BadInput(f"--draft-cost {self.draft_cost}: a fraction of a step is needed")

    @classmethod
    def of_length(cls, draft_tokens: int, length: float, draft_cost: float) -> Self:
        """With the acceptance, to four digits, whose expected tokens of a step are `length`. Raises BadInput:
        no acceptance gives so many."""
        if not 1 <= length <= draft_tokens + 1:
            raise BadInput(
                f"--acceptance-length {length:g}: a step of --draft-tokens {draft_tokens} gives 1 to "
                f"{draft_tokens + 1} tokens"
            )
        parts = 10**6
        part = bisect_left(
            range(parts), length, key=lambda n: cls(draft_tokens, n / parts).expected_tokens
        )
        return cls(draft_tokens, round(part / parts, 4), draft_cost)

    @property
    def expected_tokens(self) -> float:
        """Expected tokens per verification: (1 - a^(k+1)) / (1 - a), the bonus token included."""
        if self.acceptance == 1:
            return self.draft_tokens + 1.0
        return (1 - self.acceptance ** (self.draft_tokens + 1)) / (1 - self.acceptance)

    def token_seconds(self, decode: float, verification: float) -> float:
        return (verification + self.draft_tokens * self.draft_cost * decode) / self.expected_tokens

    def speedup(self, verification: float = 1.0) -> float:
        """Speed-up over plain decoding, where a verification takes `verification` plain steps: nearly 1 if
        memory-bound, up to k + 1 if compute-bound."""
        return self.expected_tokens / (verification + self.draft_tokens * self.draft_cost)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in dollars: per GPU-hour (None: as published), and per million tokens in and out of an API.
    `duty_cycle` is the fraction of the day in which the GPUs have work; they are paid for all of it."""

    gpu_hour: float | None
    api_input: float | None = None
    api_output: float | None = None
    duty_cycle: float = 1.0

    def __post_init__(self) -> None:
        for option, value in (
            ("--gpu-hour-price", self.gpu_hour),
            ("--api-price-in", self.api_input),
            ("--api-price-out", self.api_output),
        ):
            if value is not None and not 0 <= value < inf:
                raise BadInput(f"{option} {value}: a price in dollars is needed")
        if not 0 < self.duty_cycle <= 1:
            raise BadInput(
                f"--duty-cycle {self.duty_cycle}: a fraction of the day in (0, 1] is needed"
            )
        if (self.api_input is None) != (self.api_output is None):
            raise BadInput("give --api-price-in and --api-price-out together")


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars per million tokens at the duty cycle, and the break-even against an API. `request` is the cost
    of one request, prompt and output. `break_even_requests_per_day` is the number of API requests that cost
    as much as the GPUs; `capacity_requests_per_day` is the most that the GPUs can serve. None without an API
    price."""

    input_per_million: float
    output_per_million: float
    request: float
    dollars_per_day: float
    capacity_requests_per_day: float
    api_request: float | None
    break_even_requests_per_day: float | None
    break_even_tokens_per_day: float | None
    break_even_duty_cycle: float | None
    cheaper: str | None


def cost_of(
    prices: Prices,
    *,
    gpus: int,
    input_tokens: int,
    output_tokens: int,
    input_tokens_per_second: float,
    output_tokens_per_second: float,
) -> Cost:
    """Cost of a workload on GPUs that alternate between prefill and decode at the given rates. A request
    takes in/rate_in + out/rate_out seconds of the GPUs; at a price p per hour for all of them and a duty
    cycle u, a busy second costs p / (3600·u)."""
    assert prices.gpu_hour is not None
    hourly = gpus * prices.gpu_hour
    second = hourly / SECONDS_PER_HOUR / prices.duty_cycle
    seconds = input_tokens / input_tokens_per_second + output_tokens / output_tokens_per_second
    per_day = hourly * HOURS_PER_DAY
    capacity = HOURS_PER_DAY * SECONDS_PER_HOUR / seconds
    api = even = tokens = duty = cheaper = None
    if prices.api_input is not None and prices.api_output is not None:
        api = (input_tokens * prices.api_input + output_tokens * prices.api_output) / MILLION
        if api > 0:
            even = per_day / api
            tokens = even * (input_tokens + output_tokens)
            duty = even / capacity
        cheaper = "own GPUs" if duty is not None and duty < prices.duty_cycle else "the API"
    return Cost(
        input_per_million=second / input_tokens_per_second * MILLION,
        output_per_million=second / output_tokens_per_second * MILLION,
        request=second * seconds,
        dollars_per_day=per_day,
        capacity_requests_per_day=capacity,
        api_request=api,
        break_even_requests_per_day=even,
        break_even_tokens_per_day=tokens,
        break_even_duty_cycle=duty,
        cheaper=cheaper,
    )


@dataclass(frozen=True, slots=True)
class PlannedWorkload:
    """Workload: `sequences` concurrent sequences of `context` tokens, prompt and output together, of which
    `output_tokens` are output. With `eviction` a budget of them stays in the KV cache. `images` are part of
    every prompt, of which the prefix cache holds `prefix_share`. `load` is simulated. Where
    `kv_dtype_is_default` other engines are sized by their own defaults."""

    context: int
    sequences: int = 1
    kv_dtype: str = "bf16"
    block_size: int = 16
    output_tokens: int | None = None
    eviction: KvEviction | None = None
    images: ImageLoad | None = None
    load: PlannedLoad | None = None
    prefix_share: float = 0.0
    kv_dtype_is_default: bool = False

    def __post_init__(self) -> None:
        kv_dtype(self.kv_dtype)
        check_counts(ctx=self.context, concurrency=self.sequences)
        if self.block_size < 1:
            raise BadInput(f"--block-size {self.block_size}: at least 1 token is needed")
        check_prefix_share(self.prefix_share)
        if self.output_tokens is not None and not 1 <= self.output_tokens < self.context:
            raise BadInput(
                f"--output-tokens {self.output_tokens}: the context of {self.context} holds prompt and "
                "output, at least a token of each"
            )
        if self.images is not None and self.images.num_tokens > self.prompt_tokens:
            raise BadInput(
                f"--images: {self.images.num_tokens} tokens, and a prompt of {self.prompt_tokens}: give a "
                "longer --ctx, or fewer --output-tokens"
            )

    @property
    def answer_tokens(self) -> int:
        return self.output_tokens or max(1, int(self.context * OUTPUT_FRACTION))

    @property
    def held_tokens(self) -> int:
        """Most tokens of a sequence in the KV cache while it decodes."""
        if self.eviction is None:
            return self.context
        return self.eviction.held(self.prompt_tokens, self.context)

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.context - self.answer_tokens)

    @property
    def cached_tokens(self) -> int:
        return min(self.prompt_tokens - 1, round(self.prefix_share * self.prompt_tokens))


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of the engine and the devices; None leaves one to the solver or its default. `cpu_plain_bytes`
    is the element size of llmopt's engine on a CPU; None: every weight is as stored. `keeps_float32`: an
    explicit `--dtype float32`, without which engines hold such weights in 16 bits. An empty `engine_version`
    is one that was not told. `host`: RAM that takes weights of a plan of one GPU."""

    tp: int | None = None
    pp: int | None = None
    ep: int = 1
    attention_dp: int = 1
    engine: str = "llmopt"
    engine_version: str = ""
    utilization: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_cache_bytes: int | None = None
    measured: Efficiency | None = None
    own: OwnRows | None = None
    prices: Prices | None = None
    speculation: Speculation | None = None
    cpu_plain_bytes: int | None = None
    keeps_float32: bool = False
    host: Host | None = None

    def __post_init__(self) -> None:
        engine_rule(self.engine)
        check_counts(tp=self.tp, pp=self.pp, ep=self.ep, attention_dp=self.attention_dp)

    @property
    def has_free_sizes(self) -> bool:
        unset = self.tp is None and self.pp is None and self.host is None
        return unset and self.ep == self.attention_dp == 1

    def run_recipe(self, recipe: WeightRecipe, shape: ModelShape, device: Device) -> WeightRecipe:
        plain_bytes = self.run_bytes(recipe, device.kind)
        run = recipe if plain_bytes is None else recipe.as_run(shape, plain_bytes)
        if run.name != "mxfp4" or self.engine != "vllm":
            return run
        is_amd = device.name.startswith("MI")
        kernel = "amd" if is_amd else generation(device)
        return replace(run, padding=MXFP4_PADDING.get(kernel, _MARLIN))

    def run_bytes(self, recipe: WeightRecipe, kind: str) -> int | None:
        """Bytes of the dtype that plain weights are held in; None: as they are stored. On GPUs the dtype
        `auto` of llmopt, vLLM and SGLang is 16 bits for float32 checkpoints too; llama.cpp runs what is in
        its file."""
        if kind == "cpu":
            return self.cpu_plain_bytes
        is_held_wide = self.keeps_float32 or self.engine == "llama.cpp"
        is_narrowed = recipe.plain_bytes > UNQUANTIZED_BYTES and not is_held_wide
        return UNQUANTIZED_BYTES if is_narrowed else None

    @property
    def duty_cycle(self) -> float:
        return 1.0 if self.prices is None else self.prices.duty_cycle

    def price_of(self, device: Device) -> HourPrice | None:
        """Price of a device for an hour: as given, else as published, if known."""
        if self.prices is None or self.prices.gpu_hour is None:
            return device.price
        return HourPrice(self.prices.gpu_hour, "--gpu-hour-price")

    def dollars_per_million(
        self, device: Device, gpus: int, tokens_per_second: float
    ) -> float | None:
        """Dollars of a million tokens, at the duty cycle."""
        if (price := self.price_of(device)) is None:
            return None
        return (
            gpus * price.dollars / self.duty_cycle * MILLION / tokens_per_second / SECONDS_PER_HOUR
        )

    def reserve(self, device: Device, weight_bytes: int) -> Reserve:
        """Memory limits on a device. On a CPU, the KV cache gets the engine's fraction of free memory."""
        if device.kind != "cpu":
            # Unset limits as servers commonly choose them, smaller below 70 GiB, and in vLLM on any A100
            # (`EngineArgs.get_batch_defaults`).
            is_large = device.memory_bytes >= 70 * GIB
            if self.engine == "vllm" and device.name.startswith("A100"):
                is_large = False
            tokens, sequences = (8192, 1024) if is_large else (2048, 256)
            return Reserve(
                DEFAULT_UTILIZATION if self.utilization is None else self.utilization,
                tokens if self.max_num_batched_tokens is None else self.max_num_batched_tokens,
                sequences if self.max_num_seqs is None else self.max_num_seqs,
                self.kv_cache_bytes,
            )
        budget = KvCacheBudget.on_cpu(max(0, device.memory_bytes - weight_bytes))
        sequences, tokens = self.max_num_seqs, self.max_num_batched_tokens
        sequences = DEFAULT_MAX_NUM_SEQS["cpu"] if sequences is None else sequences
        usual = max(DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu"], sequences)
        return Reserve(
            1.0 if self.utilization is None else self.utilization,
            usual if tokens is None else tokens,
            sequences,
            budget.num_bytes if self.kv_cache_bytes is None else self.kv_cache_bytes,
        )
