"""Run identity in the record: what was measured and how, which decides comparability; and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.config.config import EngineConfig
from ...quant.source.models import open_checkpoint
from ..load.inprocess import InProcessTarget
from ..load.load import ROUND_ROBIN
from ..machine.environment import checkpoint_hash, hardware_facts, machine_name
from ..metrics.metrics import turn_figures
from ..metrics.trace import LoadPass
from ..options.options import BenchOptions
from ..workloads.datasets import arrival_words
from ..workloads.workload import Workload

if TYPE_CHECKING:
    from ...engine.core.engine import Engine
    from ...engine.scheduling.outputs import EngineStats


IDENTITY = ("model", "model_hash", "quantization", "dtype", "target", "workload", "workload_sha256")
IDENTITY += ("load", "engine", "device", "machine", "hardware")


def identity_part(options: BenchOptions, workload: Workload, **target: Any) -> dict[str, Any]:
    """`llmopt.identity`: what was measured and how, which decides whether two results are comparable.

    `target` holds the keys of `IDENTITY` that are not of the workload.
    """
    words = {"workload": workload.name, "workload_sha256": workload.sha256}
    known = {**target, **words, "load": load_words(options, workload)}
    return {key: known[key] for key in IDENTITY}


def engine_identity(
    options: BenchOptions, engine: Engine, model: Path, workload: Workload
) -> dict[str, Any]:
    """The identity of a run on an in-process engine."""
    quantization = open_checkpoint(model).quantization_config
    overlaps = engine.config.overlaps(engine.device.type)  # which depends on the device by default
    return identity_part(
        options,
        workload,
        model=options.model or model.name,
        model_hash=checkpoint_hash(model),
        quantization=quantization.get("quant_method") if quantization else None,
        dtype=str(engine.dtype).removeprefix("torch."),
        target=InProcessTarget.name,
        engine={
            "max_model_len": engine.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "block_size": options.block_size,
            "enable_prefix_caching": options.enable_prefix_caching,
            "num_threads": options.num_threads,
            **({"cpu_activations": 8} if engine.activation_bits == 8 else {}),
            **({"overlapped_loop": True} if overlaps else {}),
            **_unusual(options),
        },
        device=str(engine.device),
        machine=machine_name(str(engine.device)),
        hardware=hardware_facts(str(engine.device)),
    )


def load_words(options: BenchOptions, workload: Workload) -> dict[str, Any]:
    """The load settings: requests, arrivals, sampling."""
    return {
        "num_prompts": options.num_prompts,
        "request_rate": options.rate if options.request_rate else "inf",
        "burstiness": options.burstiness,
        **arrival_words(options, workload),
        "max_concurrency": options.concurrency,
        **({"duration": options.duration} if options.duration is not None else {}),
        **conversation_words(workload),
        "ignore_eos": options.ignore_eos,
        "temperature": options.temperature,
        "seed": options.seed,
    }


def _unusual(options: BenchOptions) -> dict[str, Any]:
    """Engine options with non-default values only, so that older results stay comparable."""
    later = (
        "tensor_parallel_size",
        "scheduling_policy",
        "enforce_eager",
        "prefill_chunk_size",
        "swap_space_bytes",
        "kv_cache_dtype",
        "window",
        "attention_sinks",
        "kv_budget",
        "kv_eviction",
    )
    engine, usual = options.engine, EngineConfig()
    options_set = {
        name: getattr(engine, name)
        for name in later
        if getattr(engine, name) != getattr(usual, name)
    }
    if options.loras:
        options_set["lora"] = list(options.loras)
        if options.lora_assignment != ROUND_ROBIN:
            options_set["lora_assignment"] = options.lora_assignment
    if options.speculation is not None:
        options_set["speculation"] = asdict(options.speculation)
    return options_set


def speculation_part(options: BenchOptions, stats: EngineStats) -> dict[str, Any] | None:
    """Speculative-decoding statistics; None without speculation."""
    if options.speculation is None:
        return None
    return {
        "method": options.speculation.method,
        "num_guesses": stats.num_draft_tokens,
        "num_accepted": stats.num_accepted_tokens,
        "acceptance": stats.num_accepted_tokens / max(1, stats.num_draft_tokens),
    }


def conversations_part(
    passes: Sequence[LoadPass], workload: Workload, block_size: int | None
) -> dict[str, Any]:
    """`{"conversations": …}` for the record; empty for a workload of single requests.

    `block_size` is that of an engine in this process with prefix caching, else None.
    """
    if not workload.is_multi_turn:
        return {}
    part = {
        "num_conversations": len(workload.items),
        **conversation_words(workload),
        **turn_figures(passes, block_size),
    }
    return {"conversations": part}


def conversation_words(workload: Workload) -> dict[str, Any]:
    """History and think time of conversations; empty for a workload of single requests."""
    if not workload.is_multi_turn:
        return {}
    return {"history": workload.history, "mean_think_seconds": workload.mean_think_seconds}
