"""Residuals of a run from its capacity plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...engine.planner.cache_size import OF_ENGINE
from ...engine.planner.catalog import find_model
from ...engine.planner.own_runs import OwnRow
from ...engine.planner.plan_json import WrittenPlan, read_plan
from ..metrics.trace import LoadPass, RequestTrace

if TYPE_CHECKING:
    from ...engine.core.engine import Engine


def plan_for_folder(path: Path, folder: Path) -> WrittenPlan:
    """Read a plan file and check it against the model in a folder. Raises BadInput: the file is not a plan,
    or it is for another model."""
    return read_plan(path, find_model(str(folder)))


def residuals(
    plan: WrittenPlan,
    engine: Engine,
    passes: Sequence[LoadPass],
    metrics: Mapping[str, Any],
    clients: int | None,
) -> dict[str, Any]:
    """`llmopt.plan` of a result: a row per quantity, the settings that differ from the plan, and the run as a
    row of this machine for `kv-plan --measured` (None unless `clients` sent a closed loop).

    `metrics` are the distributions of the run, in milliseconds. Times are predicted again for its mean prompt
    and for the mean batch and context of its decode steps, so that a residual reflects the machine model and
    not a different load. A first token that waited for other prompts shows as a residual: the prediction is
    for an idle engine.
    """
    traces = [trace for load_pass in passes for trace in load_pass.traces if trace.success]
    steps = [step for load_pass in passes for step in load_pass.steps if step.decode_only]
    times = None
    prompt = batch = context = 0
    if traces and steps:
        prompt = max(1, round(fmean(trace.prompt_len for trace in traces)))
        batch = max(1, round(fmean(step.num_sequences for step in steps)))
        context = round(fmean(step.context_tokens / step.num_sequences for step in steps))
        times = plan.times(prompt, context, batch)
    ttft, tpot = times or (None, None)
    config, loaded = engine.scheduler.config, engine.memory.weight_bytes
    planned, is_plain = plan.held_weight_bytes, plan.model.as_stored().bits >= 16
    layouts = "" if loaded == planned or is_plain else "kernels keep layouts of their own"
    tokens = engine.stats.kv_blocks_total * config.block_size
    load = f"a prompt of {prompt} tokens"
    step = f"{batch} sequences of {context} tokens"
    return {
        "file": str(plan.path),
        "rows": [
            _row("weights in the checkpoint", "bytes", plan.weight_bytes, plan.model.stored_bytes),
            _row("weights in memory", "bytes", planned, loaded, layouts),
            _row("KV cache", "tokens", plan.kv_tokens, tokens),
            _row("TTFT", "ms", ttft and 1e3 * ttft, metrics["ttft"].get("median"), load),
            _row("TPOT", "ms", tpot and 1e3 * tpot, metrics["tpot"].get("median"), step),
        ],
        "differs": _differences(plan, engine),
        "row": None if clients is None else _own_row(plan, engine, traces, metrics, clients),
    }


def _own_row(
    plan: WrittenPlan,
    engine: Engine,
    traces: Sequence[RequestTrace],
    metrics: Mapping[str, Any],
    clients: int,
) -> dict[str, Any] | None:
    """The run as `OwnRow`; None without times, or on another kind of device than the planned one."""
    on_cpu, model = engine.device.type == "cpu", plan.model
    ttft, tpot = (metrics[name].get("mean") for name in ("ttft", "tpot"))
    if not ttft or not tpot or on_cpu != (plan.values.get("gpu_kind") == "cpu"):
        return None
    prompt, output = (
        max(1, round(fmean(getattr(trace, name) for trace in traces)))
        for name in ("prompt_len", "output_len")
    )
    config = engine.scheduler.config
    capacity = engine.stats.kv_blocks_total * config.block_size // (prompt + output)
    return asdict(
        OwnRow(
            model=plan.values["model"],
            path=model.source,
            weights=model.as_stored().label,
            gpu=plan.values["gpu"],
            engine="llmopt",
            kv_bytes_per_element=plan.values["kv_bytes_per_element"],
            block_size=config.block_size,
            prompt_tokens=prompt,
            output_tokens=output,
            clients=clients,
            resident=max(1, min(config.max_num_seqs, capacity)),
            ttft_ms=ttft,
            tpot_ms=tpot,
        )
    )


def _row(
    quantity: str, unit: str, predicted: float | None, measured: float | None, load: str = ""
) -> dict[str, Any]:
    residual = measured / predicted - 1 if predicted and measured is not None else None
    row = {"quantity": quantity, "unit": unit, "predicted": predicted, "measured": measured}
    return {**row, "residual": residual, "load": load}


def _differences(plan: WrittenPlan, engine: Engine) -> list[str]:
    """Settings of the run that differ from the plan, each with the option that changes it."""
    values, config = plan.values, engine.scheduler.config
    dtype = OF_ENGINE[engine.stats.kv_dtype]
    pairs = (
        ("tokens of a block", values["block_size"], config.block_size, "--block-size"),
        ("tokens of a sequence", values["context"], config.max_model_len, "--max-model-len"),
        ("type of the KV cache", values["kv_dtype"], dtype, "--kv-cache-dtype"),
    )
    return [
        f"{what}: {planned} in the plan, {actual} here ({option})"
        for what, planned, actual, option in pairs
        if planned != actual
    ]
