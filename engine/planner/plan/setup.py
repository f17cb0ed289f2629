"""Workload and deployment options of a plan; unset ones are chosen by the solver."""

from __future__ import annotations

from dataclasses import dataclass

from ....quant.base.errors import BadInput
from ...scheduling.kv_eviction import KvEviction
from ..device.devices import Device
from ..device.money import Prices
from ..device.speed import DEFAULT_EFFICIENCY, Efficiency
from ..images.image_load import ImageLoad
from ..memory.cache_size import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, KvCacheBudget
from ..memory.memory import Reserve
from ..model.engine_rules import engine_rule
from ..model.kv_dtypes import kv_dtype
from .speculation import Speculation

# Default fraction of the context that is output, the rest is prompt.
OUTPUT_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload: `sequences` concurrent sequences of `context` tokens, prompt and output together, of which
    `output_tokens` are output. With `eviction` a budget of them stays in the KV cache. `images` are part of
    every prompt."""

    context: int
    sequences: int = 1
    kv_dtype: str = "bf16"
    block_size: int = 16
    output_tokens: int | None = None
    eviction: KvEviction | None = None
    images: ImageLoad | None = None

    def __post_init__(self) -> None:
        kv_dtype(self.kv_dtype)
        for name, value in (("--ctx", self.context), ("--concurrency", self.sequences)):
            if value < 1:
                raise BadInput(f"{name} {value}: at least 1 is needed")
        if self.block_size < 1:
            raise BadInput(f"--block-size {self.block_size}: at least 1 token is needed")
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
        """Output tokens of a sequence."""
        return self.output_tokens or max(1, int(self.context * OUTPUT_FRACTION))

    @property
    def held_tokens(self) -> int:
        """Most tokens of a sequence in the KV cache while it decodes."""
        if self.eviction is None:
            return self.context
        return self.eviction.held(self.prompt_tokens, self.context)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of a sequence."""
        return max(1, self.context - self.answer_tokens)


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of the engine and the devices; None leaves one to the solver or its default."""

    tp: int | None = None
    pp: int | None = None
    engine: str = "llmopt"
    utilization: float | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_cache_bytes: int | None = None
    efficiency: Efficiency = DEFAULT_EFFICIENCY
    prices: Prices | None = None
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        engine_rule(self.engine)
        for option, value in (("--tp", self.tp), ("--pp", self.pp)):
            if value is not None and value < 1:
                raise BadInput(f"{option} {value}: at least 1 is needed")

    def reserve(self, device: Device, weight_bytes: int) -> Reserve:
        """Memory limits on a device. On a CPU, the KV cache gets the engine's fraction of free memory."""
        if device.kind != "cpu":
            return Reserve.for_memory(
                device.memory_bytes,
                self.utilization,
                self.max_num_batched_tokens,
                self.max_num_seqs,
                self.kv_cache_bytes,
            )
        budget = KvCacheBudget.on_cpu(max(0, device.memory_bytes - weight_bytes))
        sequences = self.max_num_seqs or DEFAULT_MAX_NUM_SEQS["cpu"]
        return Reserve(
            1.0 if self.utilization is None else self.utilization,
            self.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu"], sequences),
            sequences,
            budget.num_bytes if self.kv_cache_bytes is None else self.kv_cache_bytes,
        )
