"""Recipes: quantize, verify, serve, bench, compare, report; or a capacity plan and a measured sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ...base.atomic_io import expanded, write_atomically
from ...base.errors import BadInput
from ...base.progress import Progress, Silent
from ...engine.planner.cache_size import OF_ENGINE
from ...engine.planner.catalog import find_model
from ...engine.planner.plan_json import WrittenPlan, plan_as_dict, read_plan
from ...engine.planner.plan_request import PlanRequest, plan_for
from ...quant.convert.verify import VerifyReport, verify
from ...quant.model.checkpoint import gguf_file_of, read_json
from ...quant.pipeline.pipeline import quantize
from ...quant.plan.manifest import MANIFEST_NAME
from ...quant.source.models import resolve_model
from ...recipes import DEFAULT_MODEL
from ..gate.compare import RunData, compare_by
from ..gate.limits import speed_limits, with_waiting
from ..gate.outputs import write_outputs
from ..gate.speed_gate import by_processor, is_hosted_runner, speed_reach
from ..load.started_server import served
from ..options.options import BenchOptions
from ..options.values import parse_loads
from ..record.result import RESULT_NAME, BenchRun, plain, to_json
from ..record.tracking import log_run, of_result, of_sweep
from ..report.parts import write_page
from ..report.run_report import SWEEP_NAME, write_sweep
from ..session.run_sessions import run_bench, run_interleaved, write_run
from ..session.sweep import SweepTarget, sweep_loads
from .recipe import BASE_NAME, Variant, bench_of
from .recipe_files import IN_TURNS, REACH_NAME, CapacityRun, RecipeRun, Stages, VariantRun
from .recipe_page import recipe_page

SINGLE, SWEEP, PLAN_NAME, JUNIT_NAME = "single", "sweep", "plan.json", "verdict.xml"
REACH_PASSES = 5
"""Passes of the original before a recipe with `gate_speed`: four steps between passes tell their noise."""


def run_recipe(stages: Stages, progress: Progress | None = None) -> RecipeRun:
    """Run a recipe's unfinished stages; outputs are atomic, for interrupts."""
    progress = progress or Silent()
    recipe, folder = stages.recipe, stages.folder
    _ = recipe.bench.tracker  # which may not be there, before anything is measured
    if recipe.num_threads is not None:
        torch.set_num_threads(recipe.num_threads)
    proofs = []
    for variant in recipe.variants:
        make_checkpoint(stages, variant, progress)
        proofs.append(verified_files(bench_options(stages, variant), progress))
    runs = [bench_options(stages, variant) for variant in (None, *recipe.variants)]
    for options in runs:
        if options.base_url is None and options.serve is None:
            resolve_model(options.model)
    progress.note(f"bench {', '.join(str(options.name) for options in runs)}")
    for together in [runs] if recipe.interleave else [[run] for run in runs]:
        measure(stages, together, progress)
    base, *others = [RunData.read(folder / str(options.name)) for options in runs]
    variants = tuple(
        VariantRun(
            variant, manifest, verified, data, compare_by(recipe.compare.options, base, data)
        )
        for variant, (manifest, verified), data in zip(recipe.variants, proofs, others, strict=True)
    )
    run = RecipeRun(recipe, folder, base, variants)
    write_atomically(folder / "result.json", to_json(run.record()))
    for variant in variants:
        verdict_file = folder / variant.variant.name / JUNIT_NAME
        write_outputs(variant.data, variant.comparison, verdict_file, None)
    write_page(recipe_page(run), folder)
    return run


def run_variant(stages: Stages, variant: Variant, progress: Progress) -> tuple[RunData, VariantRun]:
    """Do the stages that are left of the original and of one variant; the runs of both."""
    with stages.alone():
        make_checkpoint(stages, variant, progress)
        manifest, verified = verified_files(bench_options(stages, variant), progress)
        for measured in (None, variant):
            measure(stages, [bench_options(stages, measured)], progress)
    base, data = (RunData.read(stages.folder / name) for name in (BASE_NAME, variant.name))
    comparison = compare_by(stages.recipe.compare.options, base, data)
    return base, VariantRun(variant, manifest, verified, data, comparison)


def bench_options(stages: Stages, variant: Variant | None) -> BenchOptions:
    model = None
    if variant is not None and variant.made is not None:
        folder = stages.checkpoint(variant.name)
        model = str(gguf_file_of(folder) or folder)  # llama.cpp's server asks for the file
    return bench_of(stages.recipe, variant, model)


def measure(stages: Stages, runs: Sequence[BenchOptions], progress: Progress) -> None:
    """Run a benchmark into its folder, on a server started for it, if asked; several, the original's first,
    with passes that alternate; unless that is done."""
    is_alone = len(runs) == 1
    name = f"bench {runs[0].name if is_alone else IN_TURNS}"
    results = [stages.folder / str(run.name) / RESULT_NAME for run in runs if is_alone]
    if stages.is_done(name) and all(path.is_file() for path in results):
        return
    with ExitStack() as stack:
        ready = [stack.enter_context(served(run, progress)) for run in runs]
        original = bench_options(stages, None) if is_alone else ready[0]
        if ready[0].name == BASE_NAME:
            say_speed_reach(stages, ready[0], progress)
        paired = [with_reference(run, original) for run in ready]
        done = [run_bench(paired[0], progress)] if is_alone else run_interleaved(paired, progress)
        keep(done, stages, progress)
    stages.finish(name)


def verified_files(
    options: BenchOptions, progress: Progress
) -> tuple[Mapping[str, Any] | None, VerifyReport | None]:
    """(manifest, fresh verification) of a checkpoint that llmopt made, else None."""
    path = expanded(options.model or "")
    folder = path.parent if path.is_file() else path
    if options.model is None or not (folder / MANIFEST_NAME).is_file():
        return None, None
    verified = verify(folder, progress)
    progress.note(f"verify {options.name}: {verified.status}")
    return read_json(folder / MANIFEST_NAME), verified


def say_speed_reach(stages: Stages, original: BenchOptions, progress: Progress) -> None:
    """Measure the original for some passes, and say the smallest change that its noise lets this machine
    tell under each limit on speed; only for a recipe with `gate_speed`, once."""
    limit_options, path = stages.recipe.compare.options, stages.folder / REACH_NAME
    if limit_options.gate_speed in (None, "off") or path.is_file():
        return
    few = original.model_copy(update={"num_runs": REACH_PASSES, "quality": False})
    run = run_bench(few, progress)
    data = RunData(run.result)
    limits = with_waiting(limit_options.limits) or speed_limits(limit_options.share)
    if limit_options.gate_speed == "auto" and is_hosted_runner():
        limits = by_processor(limits, data)
        progress.note("a runner of GitHub: speed is judged by the processor's work and waiting")
    reaches = speed_reach(limits, data, stages.recipe.bench.num_runs)
    for reach in reaches:
        progress.note(f"this machine: {reach['words']}")
    write_atomically(path, to_json(reaches))


def with_reference(options: BenchOptions, base: BenchOptions) -> BenchOptions:
    """The options with the original as reference of quality: its model, or its server for a server."""
    if options.name == BASE_NAME or options.reference is not None or not options.quality:
        return options
    if options.base_url is not None:
        reference = base.base_url
    elif base.base_url is None or base.started_server is not None:
        # A server that was started: `tokenizer` is where its model lies.
        reference = base.tokenizer if base.started_server else base.model or DEFAULT_MODEL
    else:
        reference = None
    return options.model_copy(update={"reference": reference})


def keep(runs: Sequence[BenchRun], stages: Stages, progress: Progress) -> None:
    """Write and log every run's folder; an interrupted run with finished requests ends the recipe."""
    wanted = stages.recipe.bench
    for run in runs:
        if any(load.traces for load in run.passes):
            folder = stages.clear(run.result["llmopt"]["name"])
            write_run(run, folder, with_csv=wanted.csv, with_report=wanted.report)
            log_run(wanted.tracker, of_result(run.result, folder), progress.note)
    if any(run.interrupted for run in runs):
        raise KeyboardInterrupt


def make_checkpoint(stages: Stages, variant: Variant, progress: Progress) -> None:
    """Quantize the model of a variant into the recipe's folder, unless that is done or nothing to do."""
    if variant.made is None:
        return
    name, output = variant.model or stages.recipe.model_name, stages.checkpoint(variant.name)
    if not (output / MANIFEST_NAME).is_file():  # written atomically: one that exists is complete
        progress.note(f"quantize: {variant.name}")
        output.parent.mkdir(exist_ok=True)
        try:
            quantize(variant.made.request(resolve_model(name), output, name), progress)
        except BadInput as error:
            raise BadInput(f"variant {variant.name}: {error}") from error
    stages.finish(f"quantize {variant.name}")


def run_capacity(stages: Stages, progress: Progress | None = None) -> CapacityRun:
    """Run a capacity recipe in its folder, skipping finished stages. An interrupt keeps the finished ones."""
    progress = progress or Silent()
    recipe, folder = stages.recipe, stages.folder
    step = recipe.capacity
    assert step is not None
    _ = recipe.bench.tracker
    limit = recipe.bench.max_model_len or step.max_model_len
    given = {"model": recipe.model, "num_threads": recipe.threads, "max_model_len": limit}
    options = recipe.bench.model_copy(update=given)
    if not stages.is_done(SINGLE):
        alone = options.model_copy(update={"max_concurrency": 1, "name": SINGLE, "num_runs": 1})
        keep([run_bench(alone, progress)], stages, progress)
        stages.finish(SINGLE)
    written = planned(stages, options)
    if not stages.is_done(SWEEP):
        named = options.model_copy(update={"name": recipe.name})
        loads = parse_loads(step.sweep_concurrency, "concurrency")
        record = sweep_loads(SweepTarget(named, "concurrency", progress), loads)
        write_sweep(record, stages.clear(SWEEP))
        log_run(recipe.bench.tracker, of_sweep(record, folder / SWEEP), progress.note)
        if record["interrupted"]:
            raise KeyboardInterrupt
        stages.finish(SWEEP)
    sweep = read_json(folder / SWEEP / SWEEP_NAME)
    record = plain(
        {
            "recipe": recipe.dump(exclude_unset=True),
            "exit_code": 1 if sweep["knee"] is None else 0,
            "knee": sweep["knee"],
            **planned_and_measured(written, sweep),
        }
    )
    write_atomically(folder / "result.json", to_json(record))
    return CapacityRun(folder, sweep, record)


def planned(stages: Stages, options: BenchOptions) -> WrittenPlan:
    """The plan with the ceilings measured in the single-user run; written once, into the recipe's folder."""
    path = stages.folder / PLAN_NAME
    stored = options.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    model, kv_bytes = str(resolve_model(options.model)), options.kv_cache_memory_bytes
    if not stages.is_done(PLAN_NAME):
        ask = PlanRequest(
            model=model,
            context=None if options.max_model_len is None else str(options.max_model_len),
            output_tokens=options.output_len,
            kv_dtype=OF_ENGINE.get(stored),
            block_size=options.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            kv_cache_memory=None if kv_bytes is None else str(kv_bytes),
            measured=stages.folder / SINGLE,
        )
        write_atomically(path, json.dumps(plan_as_dict(plan_for(ask)), indent=2) + "\n")
        stages.finish(PLAN_NAME)
    return read_plan(path, find_model(model))


def planned_and_measured(plan: WrittenPlan, sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted and measured values: how many sequences fit, and a row for each load."""
    workload = sweep["workload"]
    requests = workload["num_requests"]
    prompt = max(1, round(workload["prompt_tokens"] / requests))
    context = prompt + round(workload["output_tokens"] / requests / 2)
    rows = []
    for point in sweep["points"]:
        users, measured = point["concurrency"], point["median_tpot_ms"]
        _, predicted = plan.times(prompt, context, users) or (None, None)
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
