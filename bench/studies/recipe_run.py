"""Recipes: quantize, verify, bench, compare, report; or a capacity plan beside a measured sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...engine.planner.catalog import find_model
from ...engine.planner.kv_dtypes import OF_ENGINE
from ...engine.planner.plan_json import WrittenPlan, plan_as_dict, read_plan
from ...engine.planner.plan_request import PlanRequest, plan_for
from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent
from ...quant.convert.verify import verify
from ...quant.methods.options import MethodOptions
from ...quant.model.checkpoint import read_json
from ...quant.models import resolve_model
from ...quant.pipeline.pipeline import quantize
from ...quant.plan.manifest import MANIFEST_NAME
from ...quant.plan.request import QuantizeRequest
from ...recipes import DEFAULT_MODEL
from ..gate.compare import Comparison, RunData, compare
from ..options.options import BenchOptions
from ..options.values import parse_loads
from ..record.result import BenchRun, plain, to_json
from ..report.parts import write_page
from ..report.sweep import SWEEP_NAME, write_sweep
from ..session.run_sessions import run_bench, run_interleaved, write_run
from ..session.sweep import SweepTarget, sweep_loads
from .recipe import BASE_NAME, CapacityRun, Recipe, RecipeRun, Stages, Variant, VariantRun
from .recipe_page import recipe_page

SINGLE, SWEEP, PLAN_NAME = "single", "sweep", "plan.json"


def run_recipe(stages: Stages, progress: Progress | None = None) -> RecipeRun:
    """Run a recipe with variants in its folder, skipping finished stages.

    Outputs are written atomically, so an interrupt keeps the finished stages.

    Raises:
        BadInput: a step of the recipe is impossible.
        KeyboardInterrupt: interrupted.
    """
    progress = progress or Silent()
    recipe, folder = stages.recipe, stages.folder
    model = recipe.model or DEFAULT_MODEL
    resolve_model(model)
    if recipe.num_threads is not None:
        torch.set_num_threads(recipe.num_threads)
    names, proofs = {BASE_NAME: model}, []
    for variant in recipe.variants:
        output = folder / "checkpoints" / variant.name
        # Checkpoints are written atomically: one that exists is complete, in the journal or not.
        if not (output / MANIFEST_NAME).is_file():
            progress.note(f"quantize: {variant.name}")
            make_checkpoint(recipe, variant, output, progress)
            stages.finish(f"quantize {variant.name}")
        # A resumed run verifies again, so that exactly the measured files are verified.
        verified = verify(output, progress)
        progress.note(f"verify {variant.name}: {verified.status}")
        proofs.append((read_json(output / MANIFEST_NAME), verified))
        names[variant.name] = str(output)
    progress.note(f"bench {', '.join(names)}")
    base, *others = measure(stages, names, progress)
    variants = tuple(
        VariantRun(variant, manifest, verified, data, judge(recipe, base, data))
        for variant, (manifest, verified), data in zip(recipe.variants, proofs, others, strict=True)
    )
    run = RecipeRun(recipe, folder, base, variants)
    write_atomically(folder / "result.json", to_json(run.record()))
    write_page(recipe_page(run), folder)
    return run


def judge(recipe: Recipe, base: RunData, new: RunData) -> Comparison:
    """The recipe's comparison of one variant."""
    return compare(base, new, threshold=recipe.compare.share, gate=recipe.compare.quality_gate)


def measure(stages: Stages, models: Mapping[str, str], progress: Progress) -> list[RunData]:
    """Bench every model of {name: model} under the recipe's load, the first being the reference, into
    `folder/name`, skipping finished stages. Interleaved models are one stage."""
    recipe = stages.recipe
    reference = next(iter(models.values()))
    options = [
        recipe.bench.model_copy(
            update={
                "model": model,
                "name": name,
                "reference": None if name == BASE_NAME else reference,
                "num_threads": recipe.num_threads,
            }
        )
        for name, model in models.items()
    ]
    if recipe.interleave:
        if not stages.is_done("bench in turns"):
            keep(run_interleaved(options, progress), stages)
            stages.finish("bench in turns")
    else:
        for name, one in zip(models, options, strict=True):
            if not stages.is_done(f"bench {name}"):
                keep([run_bench(one, progress)], stages)
                stages.finish(f"bench {name}")
    return [RunData.read(stages.folder / name) for name in models]


def keep(runs: Sequence[BenchRun], stages: Stages) -> None:
    """Write the folder of every run, named like the run. An interrupted run with finished requests is written
    too, and then ends the recipe."""
    for run in runs:
        if any(one.traces for one in run.passes):
            write_run(run, stages.clear(run.result["llmopt"]["name"]))
    if any(run.interrupted for run in runs):
        raise KeyboardInterrupt


def make_checkpoint(recipe: Recipe, variant: Variant, output: Path, progress: Progress) -> None:
    """Quantize the recipe's model with the options of `variant`."""
    output.parent.mkdir(exist_ok=True)
    step = variant.quantize.model_dump()
    request = QuantizeRequest(
        model=resolve_model(recipe.model),
        output=output,
        model_name=recipe.model or DEFAULT_MODEL,
        rotations=None,
        options=MethodOptions(asymmetric=None),
        **step,
    )
    try:
        quantize(request, progress)
    except BadInput as error:
        raise BadInput(f"variant {variant.name}: {error}") from error


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
