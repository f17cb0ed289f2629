"""Quantization recipes: quantize, verify, bench against the original, compare, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent
from ...quant.convert.verify import verify
from ...quant.manifest.manifest import MANIFEST_NAME
from ...quant.methods.base import MethodOptions
from ...quant.model.checkpoint import read_json
from ...quant.models import resolve_model
from ...quant.pipeline.pipeline import quantize
from ...quant.plan.plan import QuantizeRequest
from ...recipes import DEFAULT_MODEL
from ..gate.compare import Comparison, RunData, compare
from ..recipes.recipe import BASE_NAME, Recipe, Variant
from ..recipes.recipe_run import RecipeRun, VariantRun
from ..recipes.stages import Stages
from ..record.result import BenchRun, to_json
from ..report.recipe_page import write_recipe_report
from ..session.run_files import write_run
from ..session.run_sessions import run_bench, run_interleaved


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
    write_recipe_report(run)
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
