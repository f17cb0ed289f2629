"""Headline, table and JSON of a recipe: the reference's weights are those of the stored file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.gate.compare import compare
from llmopt.bench.gate.limits import COUNTED, GateOutcome
from llmopt.bench.record.result import RunData
from llmopt.bench.report.comparison import delta_cards
from llmopt.bench.report.joined import candidate
from llmopt.bench.studies.recipe import CompareStep, Recipe
from llmopt.bench.studies.recipe_files import RecipeRun, VariantRun
from llmopt.bench.studies.recipe_page import (
    recipe_page,
    recipe_verdict,
    summary_table,
    variants_svg,
)
from llmopt.quant.convert.verify import VerifyReport

from .test_report_pages import data

RECIPE = {"name": "mine", "variants": [{"name": "awq"}], "compare": {"gate": False}}


def run_with(name: str, quantization: str | None, **memory: Any) -> RunData:
    found = data(name)
    found.result["llmopt"]["identity"] |= {"quantization": quantization}
    found.result["llmopt"]["memory"] |= memory
    return found


def a_recipe(stored: int, held: int, dtype: str, checkpoint_dtype: str | None) -> RecipeRun:
    """A run of an original of these sizes in its file and in memory, and of a checkpoint that holds 34 bytes."""
    memory = {"checkpoint_bytes": stored, "checkpoint_dtype": checkpoint_dtype}
    base = run_with("original", None, weight_bytes=held, **memory)
    base.result["llmopt"]["identity"]["dtype"] = dtype
    new = run_with("awq", "awq", weight_bytes=34, checkpoint_bytes=29)
    recipe = Recipe.model_validate(RECIPE)
    verified = VerifyReport(Path("awq"))
    variant = VariantRun(recipe.variants[0], {}, verified, new, compare(base, new))
    return RecipeRun(recipe, Path("run"), base, (variant,))


@pytest.mark.parametrize(
    ("held", "dtype", "said"),
    [
        (104, "bfloat16", ""),
        (
            200,
            "float32",
            "This machine ran the original in float32, its file is in bfloat16: bytes are against the "
            "file, speed against float32.",
        ),
    ],
)
def test_weights_are_compared_with_the_stored_file(held: int, dtype: str, said: str) -> None:
    """Whether the machine holds the original in bfloat16, with a little beside it, or in float32."""
    run = a_recipe(100, held, dtype, "bfloat16")
    verdict = recipe_verdict(run)
    assert verdict.headline.startswith("awq keeps 34 % of the weight bytes")
    assert verdict.sentence.endswith(said) and ("float32" in verdict.sentence) == bool(said)
    compared = run.variants[0].comparison
    assert [note for note in compared.notes if "This machine" in note] == (
        [said.replace("the original", "the base")] if said else []
    )
    gate = COUNTED["weight_bytes"]
    assert [gate.read(data.result) for data in (run.base, run.variants[0].data)] == [100, 34]
    original, awq = summary_table(run).rows
    assert (original[1], awq[1]) == ("100 B", "34 B (34 %)")
    comparison = run.variants[0].comparison
    assert run.record()["variants"]["awq"]["comparison"]["memory"]["served_weight_bytes"] == [
        100,
        34,
    ]
    (card,) = (card for card in delta_cards(comparison) if card.label == "Weights")
    assert (card.value, card.note) == ("-66.0 %", "100 B → 34 B")
    assert candidate(run.base.result).weight_bytes == 100


def test_a_float32_file_is_what_a_float32_run_is_of() -> None:
    assert "float32" not in recipe_verdict(a_recipe(100, 104, "float32", "float32")).sentence
    # A record that was written before the file's dtype was in it.
    assert "float32" not in recipe_verdict(a_recipe(100, 200, "float32", None)).sentence


def test_a_gate_shows_the_outcome_of_the_whole_recipe_first() -> None:
    """A variant that regresses decides the tone, also where another one has the better quality."""
    run = a_recipe(100, 104, "float32", None)
    (variant,) = run.variants
    gated = run.recipe.model_copy(update={"compare": CompareStep(gate=True)})
    passed, worse = (
        replace(variant, comparison=replace(variant.comparison, outcome=outcome))
        for outcome in (GateOutcome.PASS, GateOutcome.REGRESSION)
    )
    worse = replace(worse, variant=variant.variant.model_copy(update={"name": "fast"}))
    verdict = recipe_verdict(replace(run, recipe=gated, variants=(passed, worse)))
    assert (verdict.tone, verdict.headline) == ("bad", "Regression: fast against the original.")
    assert verdict.sentence.startswith("awq keeps 34 % of the weight bytes")
    verdict = recipe_verdict(replace(run, recipe=gated, variants=(passed,)))
    assert (verdict.tone, verdict.headline) == ("good", "Pass: awq against the original.")


def test_each_metric_has_its_own_limit_in_the_figure() -> None:
    run = a_recipe(100, 104, "float32", None)
    comparison = run.variants[0].comparison
    deltas = [
        replace(delta, allowed=limit)
        for delta, limit in zip(comparison.deltas, (0.05, 0.1), strict=False)
    ]
    unlimited = [replace(delta, allowed=None) for delta in deltas]
    counts = [
        variants_svg(
            [replace(run.variants[0], comparison=replace(comparison, deltas=shown))]
        ).count("stroke-dasharray")
        for shown in (deltas, unlimited)
    ]
    assert counts[0] - counts[1] == len(deltas)


def test_a_server_whose_type_is_not_known_has_no_parentheses() -> None:
    run = a_recipe(100, 104, "not known", None)
    assert "not known" not in recipe_page(run).subtitle
