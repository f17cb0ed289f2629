"""Report of a capacity recipe: the plan beside the measured knee."""

from __future__ import annotations

from ..page.page import Card, Page, Section, Table, Verdict, number, percent
from ..recipes.results import FORMULAS, CapacityRun
from .page_files import write_page
from .sweep_page import load_text, sweep_page, sweep_verdict


def capacity_verdict(run: CapacityRun) -> Verdict:
    """One sentence: what limits the number of users."""
    record, knee = run.record, run.record["knee"]
    if knee is None:
        return sweep_verdict(run.sweep)
    fits = record["predicted_sequences"]
    said = f"The KV cache holds {record['kv_tokens']:,} tokens" if fits is not None else ""
    if fits is None:
        sentence = "The plan says nothing of this engine's cache."
    elif fits > knee:
        sentence = (
            f"{said}, {fits:,} sequences of {record['sequence_tokens']:,}: computing, not memory, limits the "
            "users here."
        )
    elif fits == knee:
        sentence = (
            f"{said}, as many sequences of {record['sequence_tokens']:,} as the knee has users."
        )
    else:
        sentence = (
            f"{said}, no more than {fits:,} sequences of {record['sequence_tokens']:,}: memory limits the "
            "users here, unless their sequences stay short."
        )
    return Verdict("plain", sweep_verdict(run.sweep).headline, sentence)


def capacity_table(run: CapacityRun) -> Table:
    """Predicted and measured values, one row per load."""
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
    return Table(header, rows, caption=caption)


def capacity_page(run: CapacityRun) -> Page:
    """The sweep's page with the plan in front of it."""
    page = sweep_page(run.sweep)
    fits = run.record["predicted_sequences"]
    cards = [Card("Sequences that fit", "unknown" if fits is None else f"{fits:,}", "", "planned")]
    formulas = Table(["", ""], [[k, v] for k, v in FORMULAS.items()], is_prose=True)
    return Page(
        title=f"Capacity of {run.sweep['identity']['model']}",
        subtitle=page.subtitle,
        verdict=capacity_verdict(run),
        cards=[*cards, *page.cards],
        sections=[
            Section("Plan beside measurement", (), (), (capacity_table(run), formulas)),
            *page.sections,
        ],
        warnings=page.warnings,
    )


def write_capacity_report(run: CapacityRun) -> None:
    """`report.html`, `report.md` and the SVG files into the recipe's folder."""
    write_page(capacity_page(run), run.folder)
