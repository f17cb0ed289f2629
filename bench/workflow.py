"""Carrying out a recipe: quantize, verify, bench beside the original, compare, one report over it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..quant.errors import BadInput
from ..quant.models import resolve_model
from ..quant.pipeline import QuantizeResult, quantize
from ..quant.plan import QuantizeRequest
from ..quant.progress import Progress, Silent
from ..quant.verify import VerifyReport, verify
from ..recipes import DEFAULT_MODEL
from .compare import Comparison, RunData, compare
from .recipe import BASE_NAME, Recipe, Variant
from .recipe_page import write_recipe_report
from .recipe_run import RecipeRun, VariantRun
from .result import BenchRun, to_json
from .run_folder import write_whole
from .session import run_bench, run_interleaved, write_run


def run_recipe(recipe: Recipe, folder: Path, progress: Progress | None = None) -> RecipeRun:
    """Carry out `recipe` inside `folder`, which is made.

    Each part is written whole when it is finished, so an interrupt leaves what was done.

    Raises:
        BadInput: a step cannot be done as the recipe asks.
        KeyboardInterrupt: it was interrupted.
    """
    progress = progress or Silent()
    model = recipe.model or DEFAULT_MODEL
    resolve_model(model)
    folder.mkdir(parents=True)
    if recipe.num_threads is not None:
        torch.set_num_threads(recipe.num_threads)
    made: list[tuple[QuantizeResult, VerifyReport]] = []
    for variant in recipe.variants:
        progress.note(f"quantize: {variant.name}")
        quantized = make_checkpoint(
            recipe, variant, folder / "checkpoints" / variant.name, progress
        )
        verified = verify(quantized.output, progress)
        progress.note(f"verify {variant.name}: {verified.status}")
        made.append((quantized, verified))
    names = {BASE_NAME: model}
    names |= {v.name: str(q.output) for v, (q, _) in zip(recipe.variants, made, strict=True)}
    progress.note(f"bench {', '.join(names)}")
    base, *others = measure(recipe, names, folder, progress)
    variants = tuple(
        VariantRun(variant, quantized, verified, data, judge(recipe, base, data))
        for variant, (quantized, verified), data in zip(recipe.variants, made, others, strict=True)
    )
    run = RecipeRun(recipe, folder, base, variants)
    write_whole(folder / "result.json", to_json(run.record()))
    write_recipe_report(run)
    return run


def judge(recipe: Recipe, base: RunData, new: RunData) -> Comparison:
    """The recipe's comparison of one variant."""
    return compare(base, new, threshold=recipe.compare.share, gate=recipe.compare.quality_gate)


def measure(
    recipe: Recipe, models: Mapping[str, str], folder: Path, progress: Progress
) -> list[RunData]:
    """Bench every model of {name: model} under the recipe's load, the first being the reference, into
    `folder/name`."""
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
        return keep(run_interleaved(options, progress), folder)
    return [data for one in options for data in keep([run_bench(one, progress)], folder)]


def keep(runs: Sequence[BenchRun], folder: Path) -> list[RunData]:
    """Write every run's folder, named like the run. Interrupted ones are written too, if a request
    finished, and then end the recipe."""
    for run in runs:
        if any(one.traces for one in run.passes):
            write_run(run, folder / run.result["llmopt"]["name"])
    if any(run.interrupted for run in runs):
        raise KeyboardInterrupt
    return [RunData.of_run(run) for run in runs]


def make_checkpoint(
    recipe: Recipe, variant: Variant, output: Path, progress: Progress
) -> QuantizeResult:
    """Quantize the recipe's model as `variant` says."""
    output.parent.mkdir(exist_ok=True)
    step = variant.quantize.model_dump()
    request = QuantizeRequest(
        model=resolve_model(recipe.model),
        output=output,
        model_name=recipe.model or DEFAULT_MODEL,
        **step,
    )
    try:
        return quantize(request, progress)
    except BadInput as error:
        raise BadInput(f"variant {variant.name}: {error}") from error
