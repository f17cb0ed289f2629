"""Construction of an engine from its config: model, profile run, KV cache, runner, scheduler, step loop."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...base.errors import BadInput, DoesNotFit
from ...quant.source.load_processor import load_tokenizer
from ...quant.source.models import open_checkpoint, resolve_model
from ..base.device import choose_device, choose_dtype, enter_device, say_on_cpu
from ..base.host import available_memory_bytes
from ..cache.compaction import Evictor
from ..cache.kv_cache import (
    KvCache,
    check_fits_memory,
    choose_num_blocks,
    choose_num_host_blocks,
    kv_block_bytes,
    stored_dtype,
)
from ..config.compatibility import refuse
from ..config.config import EngineConfig
from ..execution.decode_graphs import StepGraphs, graph_sizes
from ..execution.graph_setting import GraphSetting, capture_on
from ..execution.model_runner import ModelRunner
from ..execution.start_up import (
    PROFILE_BLOCKS,
    explaining_out_of_memory,
    memory_of,
    profile_run,
    warm_up,
)
from ..execution.step_loop import StepLoop, open_loop
from ..execution.token_graphs import TokenGraphs, replay_drafts, token_graph_sizes
from ..execution.worker import GraphSizes, bind_shard, machine
from ..execution.workers import Workers, open_shards
from ..kernels.attention.paged_tensor import CacheDtype
from ..kernels.linear.native_linear import native_linear
from ..model.adapter.open import CausalModel
from ..model.decoder.decoder import Decoder
from ..model.layers.projection import LEAST_RANK
from ..model.layers.spec import KvLayout, LoadingOptions
from ..model.layers.state import StateCache, state_bytes_per_sequence
from ..multimodal.open import ImageRules, ImageSupport, open_images
from ..planner.cache_size import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULT_UTILIZATION,
    KvCacheBudget,
    StateSlots,
    size_states,
)
from ..scheduling.block_pool import BlockPool, PrefixCache
from ..scheduling.extensions import SwapSpace
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.state_pool import StatePool
from ..speculation.open import Draft, draft_length, open_draft, open_proposer
from ..speculation.proposer import CachedProposer, Proposer


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes held by the engine and read per step, over all shards; caches of drafts are `draft_bytes`."""

    weight_bytes: int
    kv_cache_bytes: int
    weight_bytes_per_step: int
    kv_bytes_per_token: int
    draft_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The loaded weights, and what follows from the checkpoint and the device alone. `model` is the target,
    or its first shard, with `workers` of the others. `draft` and `images` are None without. `activation_bits`
    are those of quantized linears on a CPU; 16 for a plain checkpoint."""

    folder: Path
    config: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    eos_token_ids: frozenset[int]
    model: CausalModel
    max_model_len: int
    workers: Workers | None
    draft: Draft | None
    images: ImageSupport
    image_rules: ImageRules
    activation_bits: int


EngineParts = tuple[LoadedModel, ModelRunner, Scheduler, StepLoop, EngineMemory]
"""The parts of an engine, ready to serve."""


def build_engine(config: EngineConfig) -> EngineParts:
    """Load the model, size the cache, and capture steps; on the CPU, if a GPU not asked for is too small.
    Raises BadInput as `Engine`."""
    try:
        return _build_on(config)
    except DoesNotFit as problem:
        if config.device != "auto" or choose_device("auto").type == "cpu":
            raise
        say_on_cpu(str(problem))
    gc.collect()  # what the exception's frames held of the GPU
    return _build_on(replace(config, device="cpu"))


def _build_on(config: EngineConfig) -> EngineParts:
    loaded = load_model(config)
    limits = scheduler_limits(config, loaded)
    layouts = [*loaded.model.kv_layouts, *(loaded.draft.kv_layouts if loaded.draft else ())]
    dtype = stored_dtype(config, loaded.device, loaded.dtype)
    num_host_blocks = choose_num_host_blocks(config, layouts, limits.block_size, dtype)
    builder = _Builder(config, loaded, limits, layouts, dtype)
    slots, num_blocks = builder.sizes()
    with explaining_out_of_memory(f"a KV cache of {num_blocks} blocks", loaded.device):
        cache = builder.open_cache(num_blocks, num_host_blocks, slots.num_slots)
        proposer = open_proposer(
            config.speculation,
            loaded.draft,
            num_blocks,
            limits.block_size,
            loaded.device,
            loaded.dtype,
            dtype,
            num_host_blocks,
        )
    runner = builder.open_runner(cache, proposer)
    with explaining_out_of_memory("the graphs of its steps", loaded.device):
        runner.capture_graphs()
        if loaded.device.type == "cuda":
            warm_up(runner, limits)
    pool = BlockPool(num_blocks)
    prefixes = PrefixCache(pool, limits.block_size, enabled=config.enable_prefix_caching)
    swap = SwapSpace(num_host_blocks, limits.block_size)
    states = StatePool(slots.num_sequences, slots.num_checkpoints, limits.block_size)
    scheduler = Scheduler(limits, pool, prefixes, swap, states)
    loop = open_loop(runner, loaded.device, overlapped=config.overlaps(loaded.device.type))
    return loaded, runner, scheduler, loop, engine_memory(loaded, cache, proposer)


def load_model(config: EngineConfig) -> LoadedModel:
    """Load the tokenizer and the weights of the model, its shards and its draft."""
    folder = resolve_model(None if config.model is None else str(config.model))
    device = choose_device(config.device)
    enter_device(device)
    if device.type == "cpu":
        shards = config.tensor_parallel_size
        torch.set_num_threads(bind_shard(machine(), 0, shards, config.num_threads))
    trusted = config.trust_remote_code
    checkpoint = open_checkpoint(folder, trust_remote_code=trusted)
    checkpoint.read_ahead()
    dtype = choose_dtype(config.dtype, device)
    tokenizer = load_tokenizer(folder, trust_remote_code=trusted)
    ends = {*checkpoint.end_token_ids(), tokenizer.eos_token_id}
    eos_token_ids = frozenset(token for token in ends if token is not None)
    with explaining_out_of_memory("the model", device):
        model, max_model_len, workers = open_shards(config, checkpoint, device, dtype)
        if not config.enforce_eager and model.is_capturable:
            _make_lora_slots(config, model)
    if model.state_layouts:
        refuse({"states", *config.features}, "layers of this model keep a constant state")
    if config.kv_budget is not None:
        from ..planner.memory import check_evictable

        if not isinstance(model, Decoder):
            refuse({"kv-budget", "transformers"}, f"kv_budget = {config.kv_budget}")
        else:
            check_evictable(model.spec.shape, config.kv_budget)
    stored = stored_dtype(config, device, dtype)
    draft = None
    if config.speculation is not None:
        loading = LoadingOptions(device, dtype, max_model_len, cache_dtype=stored)
        draft = open_draft(config.speculation, tokenizer, model, loading)
    with explaining_out_of_memory("the vision tower", device):
        images = open_images(
            checkpoint,
            tokenizer,
            device,
            dtype,
            max_cache_bytes=config.encoder_cache_bytes,
            language_model_only=config.language_model_only,
            through_transformers=not isinstance(model, Decoder),
        )
    method = (checkpoint.quantization_config or {}).get("quant_method")
    return LoadedModel(
        checkpoint.path,
        checkpoint.config,
        device,
        dtype,
        tokenizer,
        eos_token_ids,
        model,
        max_model_len,
        workers,
        draft,
        images,
        ImageRules(model.image_spec, checkpoint.config, streams="streams" in config.features),
        _activation_bits(config, method, device, dtype),
    )


def _make_lora_slots(config: EngineConfig, model: CausalModel) -> None:
    """Slots of captured adapters: one above `max_loras`, as a replaced adapter may be in use."""
    if model.lora_bank is None or config.tensor_parallel_size > 1:
        return
    if config.max_loras is None:
        model.lora_bank.make_slots(len(config.loras))
    else:
        model.lora_bank.make_slots(config.max_loras + 1, LEAST_RANK)


def _activation_bits(
    config: EngineConfig, quant_method: str | None, device: torch.device, dtype: torch.dtype
) -> int:
    """Bits of activations that the kernels take: 16 without those in C, and in float16."""
    multiplies = native_linear().reason is None and dtype in (torch.bfloat16, torch.float32)
    if quant_method is None or device.type != "cpu" or not multiplies:
        return 16
    return config.activation_bits(quant_method)


def scheduler_limits(config: EngineConfig, loaded: LoadedModel) -> SchedulerConfig:
    """The scheduler's limits; what the config leaves open depends on the device."""
    kind = loaded.device.type
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[kind]
    block_size = config.block_size or DEFAULT_BLOCK_SIZE[kind]
    return SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens
        or max(DEFAULT_MAX_NUM_BATCHED_TOKENS[kind], max_num_seqs),
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        max_model_len=loaded.max_model_len,
        prefill_chunk_size=config.prefill_chunk_size,
        window=loaded.model.window,
        drafting=draft_length(config.speculation, loaded.draft, loaded.model),
        policy=config.scheduling_policy,
        eviction=config.eviction(block_size),
    )


def engine_memory(loaded: LoadedModel, cache: KvCache, proposer: Proposer | None) -> EngineMemory:
    """Memory of all shards; each has a cache of the same size."""
    shards = [loaded.model, *(() if loaded.workers is None else loaded.workers.loaded)]
    per_block = kv_block_bytes(loaded.model.kv_layouts, cache.dtype, cache.block_size)
    return EngineMemory(
        weight_bytes=sum(shard.bytes_held for shard in shards) + loaded.images.bytes_held,
        kv_cache_bytes=cache.num_bytes * len(shards),
        weight_bytes_per_step=sum(shard.bytes_per_step for shard in shards),
        kv_bytes_per_token=-(-per_block * len(shards) // cache.block_size),
        draft_bytes=0 if proposer is None else proposer.bytes_held,
        state_bytes=0 if cache.states is None else cache.states.num_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Builder:
    """Sizes and opens the parts of an engine around loaded weights.

    Attributes:
        layouts: KV layouts of the target's layers and the draft's, which share block ids.
        dtype: dtype of stored keys and values.
    """

    config: EngineConfig
    loaded: LoadedModel
    limits: SchedulerConfig
    layouts: Sequence[KvLayout]
    dtype: CacheDtype

    def open_cache(self, num_blocks: int, num_host_blocks: int = 0, num_slots: int = 0) -> KvCache:
        """Allocate the target's KV cache, in the workers as well, and its state slots."""
        loaded, states = self.loaded, self.loaded.model.state_layouts
        cache = KvCache(
            loaded.model.kv_layouts,
            num_blocks,
            self.limits.block_size,
            loaded.device,
            self.dtype,
            num_host_blocks,
            StateCache(states, num_slots, loaded.device) if states else None,
        )
        if loaded.workers is not None:
            loaded.workers.attach(loaded.model, cache, num_blocks)
        return cache

    def open_runner(self, cache: KvCache, proposer: Proposer | None = None) -> ModelRunner:
        """The model runner on a KV cache, whose decode steps are captured at some batch sizes."""
        loaded, limits, speculation = self.loaded, self.limits, self.config.speculation
        sizes: Sequence[int] = ()
        if not self.config.enforce_eager:
            sizes = graph_sizes(loaded.device, limits.max_num_seqs)
        token_sizes = token_graph_sizes(
            loaded.device, limits.max_num_batched_tokens if sizes else 0
        )
        setting = self._graph_setting(cache, sizes, token_sizes)
        if isinstance(proposer, CachedProposer):
            of_draft = sizes if loaded.device.type == "cuda" else ()
            replay_drafts(proposer, setting, of_draft, token_sizes)
        return ModelRunner(
            loaded.model,
            cache,
            loaded.device,
            loaded.dtype,
            loaded.eos_token_ids,
            proposer,
            graphs=StepGraphs(setting, sizes),
            token_graphs=TokenGraphs(setting, token_sizes) if token_sizes else None,
            by_rejection=speculation is not None and speculation.acceptance == "rejection",
            evictor=None if limits.eviction is None else Evictor(limits.eviction, cache),
            encoders=loaded.images.encoders,
        )

    def _graph_setting(
        self, cache: KvCache, sizes: Sequence[int], token_sizes: Sequence[int]
    ) -> GraphSetting:
        model, device, dtype = self.loaded.model, self.loaded.device, self.loaded.dtype
        workers, max_blocks = self.loaded.workers, self.limits.max_blocks(self.loaded.max_model_len)
        cached = model, cache.layers, self.limits.block_size, max_blocks
        if workers is None or not sizes or not model.is_capturable:
            states = () if cache.states is None else cache.states.tensors
            return GraphSetting(*cached, device, dtype, capture_on(device), states=states)
        workers.open_graphs(GraphSizes(tuple(sizes), tuple(token_sizes), max_blocks), dtype)
        capture = capture_on(device, workers.group.silent)
        return GraphSetting(*cached, device, dtype, capture, workers)

    def sizes(self) -> tuple[StateSlots, int]:
        """State slots, and KV blocks with the null block, by the config or a profile run."""
        config, loaded, limits = self.config, self.loaded, self.limits
        budget = cache(self._kv_cache_budget)
        is_fixed = config.num_blocks is not None or config.kv_cache_memory_bytes is not None
        slot_bytes = state_bytes_per_sequence(loaded.model.state_layouts)
        with explaining_out_of_memory("the largest step", loaded.device):
            slots = size_states(
                slot_bytes,
                limits.max_num_seqs,
                caching=config.enable_prefix_caching,
                memory_bytes=None if is_fixed or not slot_bytes else budget().num_bytes,
            )
            num_blocks = choose_num_blocks(
                config,
                limits,
                self.layouts,
                self.dtype,
                lambda: budget().less("states", slots.num_bytes),
            )
        block_bytes = kv_block_bytes(self.layouts, self.dtype, limits.block_size)
        check_fits_memory(num_blocks * block_bytes * config.tensor_parallel_size, loaded.device)
        return slots, num_blocks

    def _kv_cache_budget(self) -> KvCacheBudget:
        """Budget of one of the ranks, by a profile run on a GPU. BadInput: utilization of a CPU."""
        loaded, utilization = self.loaded, self.config.gpu_memory_utilization
        if (memory := memory_of(loaded.device)) is None:
            if utilization is not None:
                raise BadInput(
                    f"gpu_memory_utilization = {utilization} is for CUDA: on a CPU give the size of the KV "
                    "cache"
                )
            return KvCacheBudget.on_cpu(
                available_memory_bytes() // self.config.tensor_parallel_size
            )
        activations = memory.peak_of(self._profile)
        free, total = memory.free_and_total()
        share = DEFAULT_UTILIZATION if utilization is None else utilization
        weights = loaded.model.bytes_held + loaded.images.bytes_held
        weights += loaded.draft.bytes_held if loaded.draft else 0
        others = max(0, total - free - weights)
        budget = KvCacheBudget.on_cuda(total, share, weights, activations, others)
        # Not with the weights: what is not allocated yet would be taken off the other processes' share.
        return budget.less("encoder cache", loaded.images.cache_bytes)

    def _profile(self) -> None:
        runner = self.open_runner(self.open_cache(PROFILE_BLOCKS))
        profile_run(runner, self.limits)
        # The graphs' pool, with its split-KV buffers, beside what the eager steps have taken.
        runner.capture_graphs()
        self.loaded.images.profile_run(self.limits.max_num_batched_tokens)
