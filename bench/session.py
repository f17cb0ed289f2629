"""One benchmark from options to a run folder: load, warm up, measure, score, place, write."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..quant.checkpoint import Checkpoint
from ..quant.models import resolve_model
from ..quant.progress import Progress, Silent
from . import result as record
from .ceilings import measure_ceilings
from .datasets import build_workload, warmup_workload
from .environment import (
    checkpoint_hash,
    describe,
    machine_name,
    peak_memory_bytes,
    restart_peak_memory,
)
from .inprocess import InProcessTarget
from .load import Load, drive
from .options import BenchOptions
from .quality import EVALUATION_TEXT, Passage, log_probabilities, read_passage, score
from .roofline import roofline_part
from .trace import LoadPass
from .workload import Workload

if TYPE_CHECKING:
    import torch

    from ..engine.engine import Engine

# Enough cache for one window of text at a time.
SCORING_SEQUENCES = 1


@dataclass(slots=True)
class BenchRun:
    """A finished benchmark: its record and what it was made from."""

    result: dict[str, Any]
    passes: list[LoadPass]

    @property
    def interrupted(self) -> bool:
        return self.result["llmopt"]["interrupted"]


def run_bench(options: BenchOptions, progress: Progress | None = None) -> BenchRun:
    """Measure one model under one load. Nothing is written.

    An interrupt during the load ends it: the record holds what finished and says `interrupted`.

    Raises:
        BadInput: the model, the data set or an option is unusable.
    """
    progress = progress or Silent()
    load = Load(options.rate, options.burstiness, options.concurrency)
    model = resolve_model(options.model)
    restart_peak_memory()
    engine = load_engine(options, model)
    workload = build_workload(options, engine.tokenizer, engine.max_model_len)
    for note in workload.notes:
        progress.note(f"{workload.name}: {note}")
    target = InProcessTarget(
        engine,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        seed=options.seed,
        slowdown=options.slowdown,
    )
    warmup = warmup_workload(workload, options.warmups, engine.tokenizer, seed=options.seed)
    if warmup is not None:
        drive(target, warmup, load.max_concurrency, progress=progress, description="warm-up")
    passes, caches = measure(target, engine, workload, load, options, progress)
    peak_bytes = peak_memory_bytes()
    interrupted = any(one.interrupted for one in passes)

    quality = None
    if options.quality and not interrupted:
        try:
            quality = score_quality(options, engine, model, progress)
        except KeyboardInterrupt:
            interrupted = True
    found = record.vllm_part(
        options,
        passes,
        model_id=options.model or model.name,
        date=datetime.now().strftime("%Y%m%d-%H%M%S"),
    )
    found["llmopt"] = {
        "schema": record.SCHEMA_VERSION,
        "run_id": uuid.uuid4().hex,
        "name": options.name or options.label or model.name,
        "interrupted": interrupted,
        "slowdown": options.slowdown,
        "identity": identity(options, engine, model, workload),
        "workload": {
            "name": workload.name,
            "source": workload.source,
            "is_stand_in": workload.is_stand_in,
            "notes": workload.notes,
            "num_requests": len(workload.items),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
        },
        "num_warmups": options.warmups,
        "num_runs": len(passes),
        "runs": [
            {**record.of_one_run(one), "prefix_cache_hit_rate": cache}
            for one, cache in zip(passes, caches, strict=True)
        ],
        "metrics": record.distributions(passes, options.seed),
        "spread": record.spread([record.of_one_run(one) for one in passes]),
        "peaks": record.peaks(passes),
        "client_lag_ms": record.client_lag(passes),
        "phases": phases(passes),
        "preemptions": engine.stats.num_preemptions,
        "prefix_cache_hit_rate": sum(caches) / len(caches),
        "memory": {
            "weight_bytes": engine.memory.weight_bytes,
            "checkpoint_bytes": Checkpoint(model).weight_bytes,
            "kv_cache_bytes": engine.memory.kv_cache_bytes,
            "peak_resident_bytes": peak_bytes,
        },
        "quality": quality,
        "roofline": place_on_roofline(engine, model, passes),
        "environment": describe(str(engine.device)),
    }
    return BenchRun(record.plain(found), passes)


def load_engine(options: BenchOptions, model: Path, **overrides: Any) -> Engine:
    """The engine that `options` describe, for the model in a folder."""
    from ..engine.config import EngineConfig
    from ..engine.engine import Engine

    settings = {
        "dtype": options.dtype,
        "device": options.device,
        "block_size": options.block_size,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "enable_prefix_caching": options.enable_prefix_caching,
        "seed": options.seed,
        "num_threads": options.num_threads,
    }
    return Engine(EngineConfig(model=model, **{**settings, **overrides}))


def measure(
    target: InProcessTarget,
    engine: Engine,
    workload: Workload,
    load: Load,
    options: BenchOptions,
    progress: Progress,
) -> tuple[list[LoadPass], list[float]]:
    """The passes and, per pass, the share of prompt tokens that the prefix cache gave."""
    passes: list[LoadPass] = []
    caches: list[float] = []
    for number in range(options.num_runs):
        # What one pass leaves in the cache must not speed up the next.
        engine.reset_prefix_cache()
        target.take_steps(0.0)
        queries, hits = engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits
        said = f"run {number + 1} of {options.num_runs}" if options.num_runs > 1 else "run"
        passes.append(
            drive(target, workload, load.max_concurrency, progress=progress, description=said)
        )
        queries = engine.stats.prefix_cache_queries - queries
        caches.append((engine.stats.prefix_cache_hits - hits) / queries if queries else 0.0)
        if passes[-1].interrupted:
            break
    return passes, caches


def identity(
    options: BenchOptions, engine: Engine, model: Path, workload: Workload
) -> dict[str, Any]:
    """What was measured and how: the part that decides whether two results may be compared."""
    quantization = Checkpoint(model).quantization_config
    return {
        "model": options.model or model.name,
        "model_hash": checkpoint_hash(model),
        "quantization": quantization.get("quant_method") if quantization else None,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "target": InProcessTarget.name,
        "workload": workload.name,
        "workload_sha256": workload.sha256,
        "load": {
            "num_prompts": options.num_prompts,
            "request_rate": options.rate if options.request_rate else "inf",
            "burstiness": options.burstiness,
            "max_concurrency": options.concurrency,
            "ignore_eos": options.ignore_eos,
            "temperature": options.temperature,
            "seed": options.seed,
        },
        "engine": {
            "max_model_len": engine.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "block_size": options.block_size,
            "enable_prefix_caching": options.enable_prefix_caching,
            "num_threads": options.num_threads,
        },
        "device": str(engine.device),
        "machine": machine_name(str(engine.device)),
    }


def score_quality(
    options: BenchOptions, engine: Engine, model: Path, progress: Progress
) -> dict[str, Any]:
    """Perplexity of the model, and its distance from the reference where one was given."""
    passage = read_passage(
        engine.tokenizer,
        max_model_len=engine.max_model_len,
        num_tokens=options.quality_tokens,
        path=options.quality_text or EVALUATION_TEXT,
    )
    own = log_probabilities(engine, passage, progress=progress)
    if options.reference is None:
        return score(passage, own).as_dict()
    reference = resolve_model(options.reference)
    theirs = reference_log_probabilities(options, reference, passage, progress)
    return score(passage, own, theirs, options.reference).as_dict()


def reference_log_probabilities(
    options: BenchOptions, reference: Path, passage: Passage, progress: Progress
) -> list[torch.Tensor]:
    """The reference model's distributions, from an engine of its own with a small cache."""
    engine = load_engine(
        options, reference, max_num_seqs=SCORING_SEQUENCES, kv_cache_memory_bytes=None
    )
    return log_probabilities(engine, passage, progress=progress, what="reference")


def phases(passes: Sequence[LoadPass]) -> dict[str, float]:
    """Where the time of the passes went, in seconds: steps that only decode, steps that compute
    prompts (decoding beside them), and everything outside the steps."""
    steps = [step for one in passes for step in one.steps]
    decode = sum(step.seconds for step in steps if step.decode_only)
    prefill = sum(step.seconds for step in steps) - decode
    whole = sum(one.duration for one in passes)
    return {
        "decode_seconds": decode,
        "prefill_seconds": prefill,
        "between_steps_seconds": max(0.0, whole - decode - prefill),
        "num_steps": len(steps),
    }


def place_on_roofline(
    engine: Engine, model: Path, passes: Sequence[LoadPass]
) -> dict[str, Any] | None:
    """Measured roofs and points; None for a model whose shape the planner does not know."""
    from ..engine.planner.shapes import ModelShape
    from ..quant.errors import BadInput

    try:
        shape = ModelShape.from_config(Checkpoint(model).config)
    except BadInput:
        return None
    memory = engine.memory
    # A tied embedding is the output head too, and the planner counts it once, as read.
    weight_bytes = memory.weight_bytes_per_step if shape.tied else memory.weight_bytes
    return roofline_part(
        [step for one in passes for step in one.steps],
        shape,
        measure_ceilings(engine.device, engine.dtype, weight_bytes),
        weight_bytes=weight_bytes,
        kv_bytes_per_element=engine.dtype.itemsize,
        unquantized_bytes=engine.dtype.itemsize,
    )


def write_run(run: BenchRun, target: Path) -> Path:
    """Write the run folder `target`, whole or not at all; returns it."""
    from .report import write_report
    from .run_folder import whole_folder

    with whole_folder(target) as folder:
        (folder / record.RESULT_NAME).write_text(record.to_json(run.result), encoding="utf-8")
        (folder / "environment.json").write_text(
            record.to_json(run.result["llmopt"]["environment"]), encoding="utf-8"
        )
        record.write_requests(folder / record.REQUESTS_NAME, run.passes)
        write_report(run.result, run.passes, folder)
    return target
