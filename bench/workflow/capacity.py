"""Capacity recipes: the planner's prediction beside a measured sweep over users."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ...engine.planner.model.catalog import find_model
from ...engine.planner.model.kv_dtypes import OF_ENGINE
from ...engine.planner.plan.plan_json import plan_as_dict
from ...engine.planner.plan.plan_request import PlanRequest, plan_for
from ...engine.planner.plan.replay import WrittenPlan, read_plan
from ...quant.base.atomic_io import write_atomically
from ...quant.base.progress import Progress, Silent
from ...quant.model.checkpoint import read_json
from ...quant.models import resolve_model
from ..options.options import BenchOptions
from ..options.sweep_loads import parse_loads
from ..recipes.capacity_run import CapacityRun
from ..recipes.stages import Stages
from ..record.result import plain, to_json
from ..report.sweep_page import SWEEP_NAME, write_sweep
from ..session.run_sessions import run_bench
from ..session.sweep import SweepTarget, sweep_loads
from .workflow import keep

SINGLE, SWEEP, PLAN_NAME = "single", "sweep", "plan.json"


def run_capacity(stages: Stages, progress: Progress | None = None) -> CapacityRun:
    """Run a capacity recipe in its folder, skipping finished stages.

    Raises:
        BadInput: a step of the recipe is impossible.
        KeyboardInterrupt: interrupted; finished stages are kept.
    """
    progress = progress or Silent()
    recipe, folder = stages.recipe, stages.folder
    step = recipe.capacity
    assert step is not None
    if recipe.num_threads is not None:
        torch.set_num_threads(recipe.num_threads)
    options = recipe.bench.model_copy(
        update={
            "model": recipe.model,
            "num_threads": recipe.num_threads,
            "max_model_len": recipe.bench.max_model_len or step.context,
        }
    )
    if not stages.is_done(SINGLE):
        alone = options.model_copy(update={"max_concurrency": 1, "name": SINGLE, "num_runs": 1})
        keep([run_bench(alone, progress)], stages)
        stages.finish(SINGLE)
    written = planned(stages, options)
    if not stages.is_done(SWEEP):
        sweep_target = SweepTarget(
            options.model_copy(update={"name": recipe.name}), "concurrency", progress
        )
        found = sweep_loads(sweep_target, parse_loads(step.loads, "concurrency"))
        write_sweep(found.as_dict(), stages.clear(SWEEP))
        if found.interrupted:
            raise KeyboardInterrupt
        stages.finish(SWEEP)
    sweep = read_json(folder / SWEEP / SWEEP_NAME)
    record = plain(
        {
            "recipe": recipe.model_dump(mode="json", exclude_unset=True),
            "exit_code": 1 if sweep["knee"] is None else 0,
            "knee": sweep["knee"],
            **beside(written, sweep),
        }
    )
    write_atomically(folder / "result.json", to_json(record))
    return CapacityRun(folder, sweep, record)


def planned(stages: Stages, options: BenchOptions) -> WrittenPlan:
    """The plan with the ceilings measured in the single-user run; written once, into the recipe's folder."""
    path = stages.folder / PLAN_NAME
    stored = options.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    model = str(resolve_model(options.model))
    if not stages.is_done(PLAN_NAME):
        ask = PlanRequest(
            model=model,
            context=None if options.max_model_len is None else str(options.max_model_len),
            output_tokens=options.output_len,
            kv_dtype=OF_ENGINE.get(stored),
            block_size=options.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            kv_cache_memory=None
            if options.kv_cache_memory_bytes is None
            else str(options.kv_cache_memory_bytes),
            measured=stages.folder / SINGLE,
        )
        write_atomically(path, json.dumps(plan_as_dict(plan_for(ask)), indent=2) + "\n")
        stages.finish(PLAN_NAME)
    return read_plan(path, find_model(model))


def beside(plan: WrittenPlan, sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted beside measured: how many sequences fit, and a row for each load."""
    workload = sweep["workload"]
    requests = workload["num_requests"]
    prompt = max(1, round(workload["prompt_tokens"] / requests))
    context = prompt + round(workload["output_tokens"] / requests / 2)
    rows = []
    for point in sweep["points"]:
        users = point["concurrency"]
        times = plan.times(prompt, context, users)
        predicted = None if times is None else times[1]
        measured = point["median_tpot_ms"]
        rows.append(
            {
                "users": users,
                "predicted_tpot_ms": None if predicted is None else predicted * 1000,
                "measured_tpot_ms": measured,
                "residual": measured / (predicted * 1000) - 1 if predicted and measured else None,
                "predicted_tokens_per_second": users / predicted if predicted else None,
                "measured_tokens_per_second": point["output_throughput"],
            }
        )
    sequence, tokens = plan.values["context"], plan.kv_tokens
    return {
        "sequence_tokens": sequence,
        "kv_tokens": tokens,
        "predicted_sequences": None if tokens is None else tokens // sequence,
        "mean_prompt_tokens": prompt,
        "mean_context_tokens": context,
        "rows": rows,
    }
