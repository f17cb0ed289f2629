"""Carrying out a recipe: quantize, verify, bench beside the original, compare, one report over it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..quant.errors import BadInput
from ..quant.models import resolve_model
from ..quant.pipeline import QuantizeResult, quantize
from ..quant.plan import QuantizeRequest
from ..quant.progress import Progress, Silent
from ..quant.verify import VerifyReport, verify
from ..recipes import DEFAULT_MODEL
from .compare import Comparison, Outcome, RunData, compare
from .recipe import BASE_NAME, Recipe, Variant
from .result import to_json
from .run_folder import write_whole
from .session import BenchRun, run_bench, run_interleaved, write_run


@dataclass(frozen=True, slots=True)
class VariantRun:
    """What became of one variant."""

    variant: Variant
    quantized: QuantizeResult
    verified: VerifyReport
    data: RunData
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """A finished recipe: the original's run, and every variant's."""

    recipe: Recipe
    folder: Path
    base: RunData
    variants: tuple[VariantRun, ...]

    @property
    def exit_code(self) -> int:
        """1 for a checkpoint that failed its verification; then, if the recipe gates, the worst
        verdict: regression before no verdict before pass."""
        if not all(one.verified.ok for one in self.variants):
            return 1
        if not self.recipe.compare.gate:
            return 0
        outcomes = {one.comparison.outcome for one in self.variants}
        worst = [o for o in (Outcome.REGRESSION, Outcome.NO_VERDICT) if o in outcomes]
        return worst[0].exit_code if worst else 0

    def record(self) -> dict[str, Any]:
        """The recipe's own `result.json`."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "exit_code": self.exit_code,
            "base": BASE_NAME,
            "variants": {
                one.variant.name: {
                    "verified": {**asdict(one.verified), "folder": None, "ok": one.verified.ok},
                    "comparison": one.comparison.as_dict(),
                }
                for one in self.variants
            },
        }


def run_recipe(recipe: Recipe, folder: Path, progress: Progress | None = None) -> RecipeRun:
    """Carry out `recipe` inside `folder`, which is made.

    Each part is written whole when it is finished, so an interrupt leaves what was done.

    Raises:
        BadInput: a step cannot be done as the recipe asks.
        KeyboardInterrupt: it was interrupted.
    """
    from .recipe_page import write_recipe_report

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


def all_results(run: RecipeRun) -> dict[str, dict[str, Any]]:
    """{name: result} of the original and every variant, in order."""
    named: Sequence[RunData] = [run.base, *(one.data for one in run.variants)]
    return {data.name: data.result for data in named}
