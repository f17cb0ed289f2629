"""Memory of a deployment: weights, peak activations, overhead, and the KV-cache budget.

    usable = visible x utilization = weights + activation peak + fixed overhead + KV cache

All bytes are per rank: one GPU of a tensor-parallel group of `tp`, in one of `pp` pipeline stages. Under a
KV-cache budget (SnapKV, H2O) a sequence holds its whole prompt until it is computed, then the budget.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from math import ceil

from ...base.errors import BadInput
from ...quant.families.shapes import ModelShape
from ..config.compatibility import refuse
from ..scheduling.kv_eviction import KvEviction
from .cache_size import DEFAULT_UTILIZATION
from .engine_rules import RULES, CacheKnobs, EngineRule
from .offload import Offload
from .step_model import ACTIVATION_BYTES, Parallelism, check_counts
from .weights import WeightRecipe, weight_bytes_per_rank

GIB = 2**30
# Bytes of temporary memory per row and vocabulary entry while sampling, in float32 copies: fitted to
# seven of eight published vLLM start-ups within 2 %.
SAMPLER_COPIES = 9.70


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory limits and batch limits, which determine the memory besides weights and KV cache. `chunk_tokens`
    is max_num_batched_tokens, `max_num_seqs` the most sequences that a step samples. `kv_cache_bytes`, if
    set, caps the KV-cache budget."""

    utilization: float = DEFAULT_UTILIZATION
    chunk_tokens: int = 8192
    max_num_seqs: int = 1024
    kv_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise BadInput(
                f"--gpu-memory-utilization {self.utilization}: a fraction in (0, 1] is needed"
            )
        check_counts(max_num_batched_tokens=self.chunk_tokens, max_num_seqs=self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One pipeline stage on one rank: its weight bytes, and the shape that sizes its KV cache."""

    weight_bytes: int
    cache: ModelShape


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model in its weight and cache formats on `tp` x `pp` x `attention_dp` devices, in an engine.

    Each of `attention_dp` ranks of sequences holds all but the experts; those are split over all devices of a
    stage, `ep` ways by expert and the rest by width. `offload` is the part of the weights that is in RAM.
    Raises BadInput: heads or experts do not divide over the ranks, or there are fewer layers than stages."""

    shape: ModelShape
    recipe: WeightRecipe
    kv_bytes_per_element: float | Fraction = 2
    block_size: int = 16
    tp: int = 1
    pp: int = 1
    engine: EngineRule = RULES["llmopt"]
    ep: int = 1
    attention_dp: int = 1
    offload: Offload | None = None
    stages: tuple[PipelineStage, ...] = field(init=False)
    _kv: dict[tuple[int, int, int], int] = field(
        init=False, compare=False, repr=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        check_counts(tp=self.tp)
        self._check_experts()
        cache, stages = self.shape.cache_on_rank(self.tp), []
        for layers in self.shape.stages(self.pp):
            part, ranks = layers if self.pp > 1 else None, self.tp * self.attention_dp
            sizes = self.tp, part, ranks, self.ep
            weights = weight_bytes_per_rank(self.shape, self.recipe, *sizes)
            if self.offload is not None:
                weights -= self.offload.weight_bytes
                layers = layers[self.offload.whole_layers :]
            stages.append(PipelineStage(weights, cache.cache_of_stage(layers)))
        object.__setattr__(self, "stages", tuple(stages))

    def _check_experts(self) -> None:
        if self.ep == 1:
            return
        ranks, experts = self.tp * self.attention_dp, self.shape.experts
        if experts is None:
            raise BadInput(f"--ep {self.ep}: {self.shape.family} has no experts; leave it out")
        if experts.count % self.ep or ranks % self.ep:
            divide = [n for n in range(1, ranks + 1) if not (ranks % n or experts.count % n)]
            near = sorted(sorted(divide, key=lambda count: abs(count - self.ep))[:2])
            raise BadInput(
                f"--ep {self.ep}: {experts.count} experts on {ranks} devices of a stage (--tp x "
                f"--attention-dp) do not divide so; choose {' or '.join(map(str, near))}"
            )

    @property
    def parallel(self) -> Parallelism:
        return Parallelism(self.tp, self.pp, self.ep, self.attention_dp)

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.attention_dp

    @property
    def weight_bytes(self) -> int:
        return max(stage.weight_bytes for stage in self.stages)

    def kv_bytes(self, context: int, reserve: Reserve = Reserve()) -> int:
        """KV-cache bytes of one sequence on the fullest rank, by the engine's rule."""
        return max(self._stage_kv(stage, context, reserve) for stage in self.stages)

    def all_kv_bytes(self, context: int, reserve: Reserve = Reserve()) -> int:
        return self.tp * sum(self._stage_kv(stage, context, reserve) for stage in self.stages)

    def knobs(self, reserve: Reserve) -> CacheKnobs:
        return CacheKnobs(self.block_size, reserve.chunk_tokens, frees_windows=self.pp == 1)

    def _stage_kv(self, stage: PipelineStage, context: int, reserve: Reserve) -> int:
        key = id(stage), context, reserve.chunk_tokens
        if key not in self._kv:  # a search asks again and again, for each device
            self._kv[key] = self.engine.kv_bytes(
                stage.cache, context, self.kv_bytes_per_element, self.knobs(reserve)
            )
        return self._kv[key]

    def activation_terms(self, reserve: Reserve) -> tuple[int, int]:
        """Peak activation memory of a prefill chunk, and of the sampler. Prefill: T·2·(3·I/tp + 3·H): gate,
        up and their product, about three hidden-size tensors; routed tokens are copied per expert (that part
        is unverified). Sampling: rows × vocabulary × 4 × 9.7."""
        shape, ranks = self.shape, self.tp
        width = 3 * shape.intermediate_size / ranks
        if (experts := shape.experts) is not None:
            routed = experts.per_token * (3 * experts.width / ranks + shape.hidden_size)
            routed += 3 * experts.shared_width / ranks
            width = max(routed, width) if experts.dense_layers else routed
        prefill = reserve.chunk_tokens * ACTIVATION_BYTES * (width + 3 * shape.hidden_size)
        sampler = SAMPLER_COPIES * reserve.max_num_seqs * shape.vocab_size * 4
        return ceil(prefill), ceil(sampler)

    def activation_bytes(self, reserve: Reserve) -> int:
        return max(self.activation_terms(reserve))

    def overhead_bytes(self) -> int:
        """Memory of the runtime: 0.13 GiB alone, 0.55 GiB with communication between two ranks and
        0.60 GiB between more (published vLLM start-ups; NCCL takes 50 MiB more for four)."""
        return int({1: 0.13, 2: 0.55}.get(self.gpus, 0.60) * GIB)

    def kv_budget(self, memory_bytes: int, reserve: Reserve) -> int:
        """Bytes left for the cache on the fullest rank; negative if the weights alone do not fit."""
        return self._budget(self.weight_bytes, memory_bytes, reserve)

    def _budget(self, weights: int, memory_bytes: int, reserve: Reserve) -> int:
        used = weights + self.activation_bytes(reserve) + self.overhead_bytes()
        budget = int(memory_bytes * reserve.utilization) - used
        return budget if reserve.kv_cache_bytes is None else min(budget, reserve.kv_cache_bytes)

    def sequences_that_fit(self, memory_bytes: int, reserve: Reserve, context: int) -> int:
        """Sequences of `context` tokens whose KV caches fit concurrently, in every stage."""
        counts = []
        for stage in self.stages:
            budget = self._budget(stage.weight_bytes, memory_bytes, reserve)
            if per_sequence := self._stage_kv(stage, context, reserve):
                counts.append(max(0, budget) // per_sequence)
            else:  # MLP layers alone: the stage limits no sequence once its weights fit
                counts.append(sys.maxsize if budget >= 0 else 0)
        return self.attention_dp * min(counts)

    def max_sequences(self, memory_bytes: int, reserve: Reserve, context: int) -> int:
        """Sequences of `context` tokens that fit and run concurrently, at most `max_num_seqs`."""
        most = self.attention_dp * reserve.max_num_seqs
        return min(self.sequences_that_fit(memory_bytes, reserve, context), most)

    def max_context(self, memory_bytes: int, reserve: Reserve, sequences: int, limit: int) -> int:
        """The longest context, at most `limit` tokens, at which `sequences` sequences fit concurrently."""
        fitting = partial(self.sequences_that_fit, memory_bytes, reserve)
        return bisect_left(
            range(1, limit + 1), True, key=lambda length: fitting(length) < sequences
        )


def check_evictable(shape: ModelShape, budget: int) -> None:
    """Raises BadInput for a model that does not cache keys and values of every token, which alone the engine
    can evict."""
    because = f"kv_budget = {budget}"
    if shape.state_bytes:
        refuse({"kv-budget", "states"}, because)
    if shape.latent is not None:
        refuse({"kv-budget", "latents"}, because)
    if any(window is not None for window in shape.windows):
        refuse({"kv-budget", "windows"}, because)


@dataclass(frozen=True, slots=True)
class EvictedCache:
    """KV cache of one sequence with a prompt of `num_prompt` of its `num_tokens` tokens. The cache has the
    whole prompt until it is computed, then the budget and the answer."""

    rule: KvEviction
    deployment: Deployment
    reserve: Reserve
    num_prompt: int
    num_tokens: int

    @property
    def num_slots(self) -> int:
        return self.rule.held(self.num_prompt, self.num_tokens)

    @property
    def kv_bytes(self) -> int:
        return self.deployment.all_kv_bytes(self.num_slots, self.reserve)

    @property
    def prompt_kv_bytes(self) -> int:
        return self.deployment.all_kv_bytes(self.num_prompt, self.reserve)

    def max_sequences(self, memory_bytes: int) -> int:
        """Sequences that run concurrently, one of them in its prompt: at most `max_num_seqs`."""
        budget = self.deployment.kv_budget(memory_bytes, self.reserve)
        size = self.deployment.kv_bytes(self.num_slots, self.reserve)
        first = max(size, self.deployment.kv_bytes(self.num_prompt, self.reserve))
        if budget < first:
            return 0
        return min(self.reserve.max_num_seqs, 1 + (budget - first) // size)
