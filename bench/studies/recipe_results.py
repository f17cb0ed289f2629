"""The journal of a recipe's folder, and the results of recipes.

The journal is written after each stage, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from ...quant.model.checkpoint import read_json
from ..gate.compare import Comparison
from ..gate.limits import GateOutcome
from ..record.result import RunData
from .recipe import BASE_NAME, Recipe, Variant

if TYPE_CHECKING:
    from ...quant.convert.verify import VerifyReport  # loads torch, which a dry run does not need

JOURNAL_NAME = "journal.json"


class Stages:
    """The journal of a recipe's folder: the recipe, and the names of finished stages."""

    def __init__(self, folder: Path, recipe: Recipe, done: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.recipe = recipe
        self._done = list(done)

    @classmethod
    def begin(cls, folder: Path, recipe: Recipe) -> Stages:
        """A new folder with nothing finished."""
        folder.mkdir(parents=True)
        stages = cls(folder, recipe)
        stages._write()
        return stages

    @classmethod
    def resume(cls, folder: Path) -> Stages:
        """Read the journal of an earlier run's folder.

        Raises:
            BadInput: there is none, or it is damaged.
        """
        path = folder / JOURNAL_NAME
        if not path.is_file():
            raise BadInput(f"{folder} holds no {JOURNAL_NAME}: give the folder of a `llmopt run`")
        journal = read_json(path)
        try:
            return cls(folder, Recipe.model_validate(journal["recipe"]), tuple(journal["done"]))
        except (KeyError, TypeError, ValidationError) as error:
            raise BadInput(f"{path} is damaged: run the recipe anew") from error

    def is_done(self, name: str) -> bool:
        return name in self._done

    def finish(self, name: str) -> None:
        """Record that a stage's outputs are complete."""
        self._done.append(name)
        self._write()

    def clear(self, name: str) -> Path:
        """The output folder of an unfinished stage, with partial outputs removed."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        return target

    def _write(self) -> None:
        # Unset options are not written: some defaults depend on which options are set.
        recipe = self.recipe.dump(exclude_unset=True)
        journal = {"schema": 1, "recipe": recipe, "done": self._done}
        write_atomically(self.folder / JOURNAL_NAME, json.dumps(journal, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class VariantRun:
    """The results of one variant; `manifest` and `verified` are of a checkpoint that llmopt made."""

    variant: Variant
    manifest: Mapping[str, Any] | None
    verified: VerifyReport | None
    data: RunData
    comparison: Comparison

    @property
    def is_sound(self) -> bool:
        """Whether the checkpoint, if it was verified, holds what was computed."""
        return self.verified is None or self.verified.ok

    def record(self) -> dict[str, Any]:
        """The variant's part of `result.json`."""
        one = self.verified
        verified = one and {**asdict(one), "folder": None, "ok": one.ok}
        return {"verified": verified, "comparison": self.comparison.as_dict()}


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
        if not all(variant.is_sound for variant in self.variants):
            return 1
        if not self.recipe.compare.gate:
            return 0
        return GateOutcome.of(variant.comparison.outcome for variant in self.variants).exit_code

    def record(self) -> dict[str, Any]:
        """The recipe's own `result.json`."""
        return {
            "recipe": self.recipe.dump(),
            "exit_code": self.exit_code,
            "base": BASE_NAME,
            "variants": {one.variant.name: one.record() for one in self.variants},
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
