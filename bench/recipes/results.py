"""Results of recipes: the original and its variants with the exit code, or a plan beside its sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...quant.convert.verify import VerifyReport
from ..gate.compare import Comparison
from ..gate.limits import GateOutcome
from ..record.result import RunData
from .recipe import BASE_NAME, Recipe, Variant


@dataclass(frozen=True, slots=True)
class VariantRun:
    """The results of one variant; `manifest` is its checkpoint's."""

    variant: Variant
    manifest: Mapping[str, Any]
    verified: VerifyReport
    data: RunData
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """A finished recipe: the original's run and those of the variants."""

    recipe: Recipe
    folder: Path
    base: RunData
    variants: tuple[VariantRun, ...]

    @property
    def exit_code(self) -> int:
        """1 for a checkpoint that failed its verification; then, if the recipe gates, the worst
        verdict: regression before no verdict before pass."""
        if not all(variant.verified.ok for variant in self.variants):
            return 1
        if not self.recipe.compare.gate:
            return 0
        return GateOutcome.of(variant.comparison.outcome for variant in self.variants).exit_code

    def record(self) -> dict[str, Any]:
        """The recipe's own `result.json`."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "exit_code": self.exit_code,
            "base": BASE_NAME,
            "variants": {
                variant.variant.name: {
                    "verified": {
                        **asdict(variant.verified),
                        "folder": None,
                        "ok": variant.verified.ok,
                    },
                    "comparison": variant.comparison.as_dict(),
                }
                for variant in self.variants
            },
        }


def all_results(run: RecipeRun) -> dict[str, dict[str, Any]]:
    """{name: result} of the original and every variant, in order."""
    named: Sequence[RunData] = [run.base, *(variant.data for variant in run.variants)]
    return {data.name: data.result for data in named}


FORMULAS = {
    "predicted sequences": "tokens that the planned KV cache holds / tokens of a sequence, rounded down",
    "predicted TPOT": "the planner's decode step for that many sequences at the mean context (prompt + "
    "half of the output), with the ceilings measured here and the efficiency that one user reached",
    "predicted tokens/s": "users / predicted TPOT: decode alone, no prompts",
    "residual": "measured / predicted − 1",
}


@dataclass(frozen=True, slots=True)
class CapacityRun:
    """A finished capacity recipe.

    Attributes:
        sweep: the record of the sweep.
        record: the recipe's `result.json`.
    """

    folder: Path
    sweep: Mapping[str, Any]
    record: Mapping[str, Any]
