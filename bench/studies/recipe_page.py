"""Reports of recipes: every checkpoint against the original in speed, quality and memory; and of a capacity
recipe, whose page is its sweep's with the plan next to the measured knee."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..gate.aspects import SPEED
from ..gate.compare import Comparison
from ..gate.limits import GateOutcome
from ..metrics.step_words import reason_in_words
from ..page.page import Page, ReportTable, ReportVerdict, drawn, number, percent
from ..page.plot_style import BAD, INK, SERIES, canvas, title, to_svg
from ..record.comparable import widened_words
from ..report.comparison import TONES, aspects_table, deltas_table
from ..report.figures import draw_change, figures_of
from ..report.parts import SUMMARY, named_caveats, report_page, summary_cells
from ..report.run_report import load_text, sweep_page, sweep_verdict
from .recipe import BASE_NAME
from .recipe_files import FORMULAS, CapacityRun, RecipeRun, VariantRun

HEADER = ("model", *SUMMARY, "speed", "overall")
WEIGHTS_CAPTION = (
    "Weights: as held; of a model that is not quantized, at most the bytes of its file."
)


def verdict_rows(run: RecipeRun) -> list[list[str]]:
    """Summary rows, one per checkpoint: quality, memory and speed."""
    comparisons = {variant.variant.name: variant.comparison for variant in run.variants}
    rows = []
    for name, data in run.runs.items():
        cells, comparison = summary_cells(data.result), comparisons.get(name)
        if comparison is None:
            cells[2:4] = "", ""  # the distance from itself
            verdicts = "reference", ""
        else:
            speed = (a.verdict for a in comparison.aspects if a.aspect == SPEED)
            verdicts = next(speed, ""), comparison.outcome.value
        rows.append([name, *cells, *verdicts])
    return rows


def recipe_verdict(run: RecipeRun) -> ReportVerdict:
    """The outcome of a gate, the best variant by quality, and whether all checkpoints were verified."""
    broken = [variant.variant.name for variant in run.variants if not variant.is_sound]
    if broken:
        return ReportVerdict(
            "bad",
            f"{', '.join(broken)} failed verification.",
            "The files do not hold what was computed: do not use them.",
        )
    best = min(run.variants, key=quality_key)
    scored = best.data.result["llmopt"]["quality"]
    clauses = [best.variant.name]
    if (share := _share_of_bytes(best.comparison)) is not None:
        clauses.append(f"keeps {percent(share, 0)} of the weight bytes")
    if (change := best.comparison.quality.get("perplexity_change")) is not None:
        clauses += ["is"] if share is None else []
        clauses.append(f"at {percent(change, 1, signed=True)} perplexity")
    headline = " ".join(clauses) if clauses[1:] else f"{clauses[0]} beside the {BASE_NAME}"
    files = "" if best.verified is None else best.verified.status.partition(":")[0]
    sentence = (
        f"It agrees with the {BASE_NAME} on the likeliest next token at "
        f"{percent(scored['top1_agreement']) if scored else 'an unknown share'} of the positions. "
        f"{speed_words(best.comparison)} "
        f"{f'Every checkpoint was read back and is {files}. ' if files else ''}"
        f"{widened_words(f'the {BASE_NAME}', run.base.result)}"
    ).strip()
    if not run.recipe.compare.gate:
        return ReportVerdict("plain", headline + ".", sentence)
    outcome = GateOutcome.of(variant.comparison.outcome for variant in run.variants)
    names = [v.variant.name for v in run.variants if v.comparison.outcome is outcome]
    verdict = f"{outcome.capitalize()}: {', '.join(names)} against the {BASE_NAME}."
    return ReportVerdict(TONES[outcome], verdict, f"{headline}. {sentence}")


def speed_words(comparison: Comparison) -> str:
    """The change of throughput with its verdict, and the overall verdict where another limit decided it."""
    delta = next((d for d in comparison.deltas if d.key == "output_throughput"), None)
    overall = comparison.outcome.value
    if comparison.decided_by:
        overall += f" by {', '.join(comparison.decided_by)}"
    if delta is None:
        return f"Throughput was not compared: {overall}."
    clause = f"Throughput changes by {percent(delta.change, 0, signed=True)} ({delta.outcome.value}"
    return clause + (")." if delta.outcome is comparison.outcome else f"; overall {overall}).")


def _share_of_bytes(comparison: Comparison) -> float | None:
    base, new = comparison.memory.get("served_weight_bytes", (None, None))
    return new / base if base and new else None


def quality_key(variant: VariantRun) -> float:
    """Sort key, smaller is better: KL divergence from the original, or the layer error where unknown."""
    scored = variant.data.result["llmopt"]["quality"]
    if scored and scored["kl_nats"] is not None:
        return scored["kl_nats"]
    error = None if variant.manifest is None else variant.manifest["summary"]["error"]
    return math.inf if error is None else error


def gate_sentence(run: RecipeRun) -> str:
    if run.recipe.compare.gate:
        sentences = ["The verdicts gate: a regression makes the command fail."]
        if reach := "; ".join(limit["words"] for limit in run.speed_reach):
            sentences.append(f"Before it began, this machine could tell: {reach}.")
        for tried in run.variants:
            decided = ", ".join(tried.comparison.decided_by) or tried.comparison.sentence
            sentences.append(f"{tried.variant.name}: {tried.comparison.outcome.value} ({decided}).")
        return " ".join(sentences)
    decode = decode_explanation(run.base.result)
    best = min(run.variants, key=quality_key)
    if reason := reason_in_words(run.base.result, best.data.result):
        decode = f"{decode} {best.variant.name}: {reason}"
    return (
        "The comparison informs and does not gate: smaller weights make a model faster only where "
        f"reading weights is what limits it. {decode}"
    ).strip()


def decode_explanation(result: Mapping[str, Any]) -> str:
    roofline = result["llmopt"]["roofline"]
    points = roofline["points"] if roofline else []
    return next((p["explanation"] for p in points if p["phase"] == "decode"), "")


@drawn
def variants_svg(variants: Sequence[VariantRun]) -> str:
    """Slowdown of each variant with its 90 % interval and the limit, one panel per metric."""
    keys = {d.key: d.label for variant in variants for d in variant.comparison.deltas}
    height = 1.3 + 0.45 * len(variants)
    figure, axes = canvas(max(len(keys), 1), width=11, height=height, sharey=True)
    for axis, (key, label) in zip(axes, keys.items(), strict=False):
        for row, variant in enumerate(variants):
            colour = SERIES[(row + 1) % len(SERIES)]
            for delta in (d for d in variant.comparison.deltas if d.key == key):
                draw_change(axis, row, delta, colour)
                if delta.allowed is not None:
                    axis.axvline(delta.allowed * 100, color=BAD, linewidth=1, linestyle="--")
        axis.axvline(0, color=INK, linewidth=1)
        axis.set_yticks(range(len(variants)), [variant.variant.name for variant in variants])
        axis.set_ylim(len(variants) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
        axis.set_xlabel("% slower")
        title(axis, label)
    return to_svg(figure, "Change of speed of every variant against the original")


def summary_table(run: RecipeRun) -> ReportTable:
    """`verdict_rows`, with the change of weight bytes and perplexity from the original."""
    rows = verdict_rows(run)
    for row, variant in zip(rows[1:], run.variants, strict=True):
        if (share := _share_of_bytes(variant.comparison)) is not None:
            row[1] += f" ({percent(share, 0)})"
        if (change := variant.comparison.quality.get("perplexity_change")) is not None:
            row[2] += f" ({percent(change, 2, signed=True)})"
    caption = f"In parentheses: relative to the {BASE_NAME}. {WEIGHTS_CAPTION}"
    return ReportTable(HEADER, rows, caption=caption)


CAPTIONS = {
    "side-by-side": "Speed, quality and memory on the same prompts.",
    "changes": "Dots are estimates, bars 90 % intervals, dashes the limits. Throughput is shown as time "
    "per token.",
}


def recipe_page(run: RecipeRun) -> Page:
    results = {name: data.result for name, data in run.runs.items()}
    explained = [decode_explanation(result) for result in results.values()]
    return report_page(
        "studies/recipe.jinja",
        run=run,
        base=run.base.result,
        results=results,
        verdict=recipe_verdict(run),
        **named_caveats(results),
        summary=summary_table(run),
        gate=gate_sentence(run),
        explanation=next(filter(None, explained), ""),
        figures=figures_of(
            run.runs, len(results), {"changes": variants_svg(run.variants)}, CAPTIONS
        ),
        deltas_table=deltas_table,
        aspects_table=aspects_table,
    )


def capacity_verdict(run: CapacityRun) -> ReportVerdict:
    """One sentence: what limits the number of users."""
    record, knee = run.record, run.record["knee"]
    if knee is None:
        return sweep_verdict(run.sweep)
    fits, length = record["predicted_sequences"], f"{record['sequence_tokens']:,}"
    sentence = "The plan says nothing of this engine's cache."
    if fits is not None:
        many = f"{fits:,} sequences of {length}"
        end = (
            f"no more than {many}: memory limits the users here, unless their sequences stay short."
        )
        if fits == knee:
            end = f"as many sequences of {length} as the knee has users."
        elif fits > knee:
            end = f"{many}: computing, not memory, limits the users here."
        sentence = f"The KV cache holds {record['kv_tokens']:,} tokens, {end}"
    return ReportVerdict("plain", sweep_verdict(run.sweep).headline, sentence)


def capacity_table(run: CapacityRun) -> ReportTable:
    rows = [
        [
            load_text(row["users"], "concurrency"),
            number(row["predicted_tpot_ms"]),
            number(row["measured_tpot_ms"]),
            percent(row["residual"], 0, signed=True),
            number(row["predicted_tokens_per_second"], 0),
            number(row["measured_tokens_per_second"], 0),
        ]
        for row in run.record["rows"]
    ]
    header = ["load", "TPOT planned", "measured, ms", "residual", "tokens/s planned", "measured"]
    caption = (
        f"Planned for sequences of {run.record['mean_context_tokens']:,} tokens, the mean of the workload. "
        "A residual that grows with the users is time that the model of bytes and operations does not "
        "know: prompts between the steps, scheduling, and Python for every sequence."
    )
    return ReportTable(header, rows, caption=caption)


def capacity_page(run: CapacityRun) -> Page:
    fits = run.record["predicted_sequences"]
    capacity = {"fits": fits, "plan": capacity_table(run), "formulas": FORMULAS}
    return sweep_page(run.sweep, capacity_verdict(run), capacity)
