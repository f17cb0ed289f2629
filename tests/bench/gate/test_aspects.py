"""Speed, quality and memory with a verdict each, the overall one, and one value of each number everywhere."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from llmopt.bench.gate.aspects import AspectVerdict
from llmopt.bench.gate.compare import Comparison, compare
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.page.page import number, percent, signed_percent, sizes, to_markdown
from llmopt.bench.record.result import RunData
from llmopt.bench.report.comparison import comparison_page, deltas_table
from llmopt.bench.studies.recipe_page import HEADER, recipe_page, summary_table
from llmopt.cli.output.bench_tables import print_comparison
from rich.console import Console

from ..report.test_recipe_page import a_recipe
from ..report.test_report_pages import data
from .test_gate import STEADY, run_of


def by_name(comparison: Comparison) -> dict[str, AspectVerdict]:
    return {one.aspect: one for one in comparison.aspects}


def printed(comparison: Comparison) -> str:
    out = Console(file=io.StringIO(), width=200)
    print_comparison(comparison, out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_a_faster_run_that_breaks_a_quality_limit_is_no_speed_regression() -> None:
    """Faster by 61 %, with a broken KL limit: `speed: regression` was said of it."""
    base = run_of([v * 1.61 for v in STEADY])
    new = run_of(STEADY, name="new", weights=300, kl=0.05)
    found = compare(base, new, limits=parse_gate("output_throughput>=-5% kl<=0.02"))
    aspects = by_name(found)
    assert (aspects["speed"].verdict, aspects["quality"].verdict) == ("pass", "regression")
    assert aspects["speed"].change == pytest.approx(0.61) and aspects["speed"].interval is not None
    assert aspects["memory"].verdict == "better" and aspects["memory"].limit is None
    assert aspects["memory"].change == pytest.approx(-0.7)
    assert found.outcome is GateOutcome.REGRESSION
    assert found.decided_by == ("KL from the reference ≤ 0.02",)
    text = printed(found)
    assert re.search(r"^speed +pass +Output throughput \+61\.0 % \(.* to .*\), 621\.", text, re.M)
    assert re.search(r"^quality +regression +KL from the reference 0\.0500 nats; limit", text, re.M)
    assert re.search(r"^overall +regression +KL from the reference ≤ 0\.02$", text, re.M)
    said = found.as_dict()["aspects"]
    assert [one["words"] for one in said] == [one.words for one in found.aspects]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.3, "worse"), (0.7, "better"), (1.01, "undecided")]
)
def test_an_aspect_without_limits_says_what_its_interval_shows(factor: float, verdict: str) -> None:
    base, new = run_of(STEADY), run_of([v * factor for v in STEADY], name="new")
    found = compare(base, new, limits=parse_gate("weight_bytes<=+0%"))
    assert by_name(found)["speed"].verdict == verdict
    assert by_name(found)["memory"].verdict == "pass" and found.outcome is GateOutcome.PASS
    assert found.decided_by == ()


def test_an_aspect_that_was_not_measured_says_so() -> None:
    base, new = run_of(STEADY), run_of(STEADY, name="new")
    new.result["llmopt"]["quality"] = None
    aspects = by_name(compare(base, new))
    assert aspects["quality"].verdict == "not measured"
    assert aspects["quality"].words == "no quality in both runs"
    assert aspects["memory"].verdict == "equal"


def disturb(run: RunData, *, passes: slice) -> RunData:
    for one in run.result["llmopt"]["runs"][passes]:
        one |= {"disturbed": True, "disturbed_because": "steal of 9 %"}
    return run


def test_a_disturbance_of_one_side_forbids_the_verdict_on_speed() -> None:
    base, new = run_of(STEADY), disturb(run_of(STEADY, name="new"), passes=slice(None))
    found = compare(base, new)
    assert found.outcome is GateOutcome.NO_VERDICT and found.conditions == ("disturbance",)
    assert "every pass of the new run was disturbed: steal of 9 %" in found.sentence
    assert by_name(found)["quality"].verdict == "equal"
    both = compare(disturb(base, passes=slice(None)), new)
    assert both.conditions == () and both.outcome is GateOutcome.PASS
    noisy = disturb(run_of([14.0, 20.0, 28.0], name="noisy"), passes=slice(None))
    told = compare(base, noisy)
    assert told.outcome is GateOutcome.NO_VERDICT and told.conditions == ("disturbance",)
    assert "every pass of both runs was disturbed: steal of 9 %" in told.sentence
    some = compare(run_of(STEADY), disturb(run_of(STEADY, name="new"), passes=slice(2)))
    assert some.outcome is GateOutcome.PASS
    assert any(
        note.startswith("2 of 5 passes of the new run were disturbed") for note in some.notes
    )


def test_a_truncated_run_is_a_condition() -> None:
    base, new = data("base"), data("new")
    new.result["llmopt"]["interrupted"] = True
    found = compare(base, new)
    assert found.conditions == found.decided_by == ("a failed or truncated run",)


def test_failures_do_not_hide_a_broken_quality_limit() -> None:
    base, new = run_of(STEADY), run_of(STEADY, name="new", kl=0.05)
    new.result["failed"] = 50
    found = compare(base, new, limits=parse_gate("output_throughput>=-5% kl<=0.02"))
    verdicts = [(one.aspect, one.verdict) for one in found.aspects]
    assert verdicts[:2] == [("speed", "regression"), ("quality", "regression")]
    broken, failed = found.decided_by
    assert broken == "KL from the reference ≤ 0.02" and failed.startswith("failed requests rose")


def test_the_half_width_is_one_number() -> None:
    """The table had half of the interval, and the sentence the bound of the logarithm: ±53.7 % and ±74.6 %."""
    wild = [26.0 * factor for factor in (0.2, 4.0, 0.5, 2.5, 1.0)]
    found = compare(run_of(STEADY), run_of(wild), limits=parse_gate("median_ttft_ms<=+10%"))
    (delta,) = found.deltas
    assert f"± {delta.half_width:.1%}: too noisy" in found.reasons[0]
    assert percent(delta.half_width) in printed(found)


def test_table_page_and_record_have_one_value_of_a_metric() -> None:
    """1,575 tokens/s in the figure and 1,583.59 in the table were one run: of all passes, and their mean."""
    base, new = data("base"), data("new", 1.2)
    for side, factor in ((base, 3.0), (new, 2.0)):
        side.result["llmopt"]["runs"][0]["output_throughput"] /= factor
    found = compare(base, new)
    page = comparison_page(base, new, found)
    rows = {row[0]: row[1:3] for row in deltas_table(found.deltas).rows}
    for key, label in (
        ("output_throughput", "Output throughput (tokens/s)"),
        ("median_tpot_ms", "Median TPOT (ms)"),
    ):
        assert rows[label] == [number(side.result[key]) for side in (base, new)]
        assert all(f"{side.result[key]:,.4g}" in str(page) for side in (base, new))
    shown = to_markdown(page)
    assert number(base.result["output_throughput"]) in shown
    assert "| overall |" in shown and "| memory | equal |" in shown


def test_no_column_of_a_recipe_shows_anothers_verdict() -> None:
    run = a_recipe(100, 104, "bfloat16", "bfloat16")
    table = summary_table(run)
    speed, overall = HEADER.index("speed"), HEADER.index("overall")
    comparison = run.variants[0].comparison
    assert table.rows[1][speed] == by_name(comparison)["speed"].verdict
    assert table.rows[1][overall] == comparison.outcome.value


def manifest(error: float, rtn_error: float) -> dict[str, Any]:
    summary = {"bits_per_weight": 4.5, "error": error, "rtn_error": rtn_error}
    named = {"method": "awq", "scheme": "int4", "format": "awq"}
    return {**named, "summary": summary}


def test_the_error_of_rtn_stands_once() -> None:
    """0.00810, of the variant rtn, beside 0.00734, of RTN behind awq's own layers, were both called RTN's."""
    run = a_recipe(100, 104, "bfloat16", "bfloat16")
    variant = run.variants[0]
    object.__setattr__(variant, "manifest", manifest(0.00612, 0.00734))
    for one in (run.base, variant.data):
        one.result["llmopt"]["memory"]["kv_cache"] = None
    text = to_markdown(recipe_page(run))
    assert "| 0.00612 | 0.834 |" in text and "0.00734" not in text


def test_what_differs_is_printed_as_different() -> None:
    assert signed_percent(0.0001234) == "+0.01 %" and signed_percent(0.0) == "+0.0 %"
    assert (signed_percent(-0.0000012, 2), signed_percent(-0.123)) == ("-0.0001 %", "-12.3 %")
    assert percent(-1e-6, signed=True) == "+0.0 %" and percent(-1e-6) == "0.0 %"
    assert sizes(6_176_768, 6_177_512) == ("6,176,768 B", "6,177,512 B")
    assert sizes(6_176_768, 6_176_768) == ("5.89 MiB", "5.89 MiB")
    assert sizes(6_176_768, 3_088_384) == ("5.89 MiB", "2.95 MiB")


def test_a_limited_score_has_one_row_of_the_printed_table() -> None:
    base, new = run_of(STEADY), run_of(STEADY, name="new", kl=0.01)
    shown = io.StringIO()
    limits = parse_gate("kl<=0.02 weight_bytes<=+5%")
    print_comparison(compare(base, new, limits=limits), Console(file=shown, width=120))
    table = shown.getvalue().partition("\nspeed ")[0]
    assert table.count("KL from the reference") == table.count("Weights as served") == 1
    assert table.count("Perplexity") == 1


def test_several_noisy_limits_are_one_reason() -> None:
    """Their intervals are rows of the table, and the first screen of the page stays short."""
    noisy = [run_of([value * factor for value in (10, 20, 14)]) for factor in (1.0, 1.1)]
    sentence = compare(*noisy).sentence
    assert "Median TPOT and Median end to end are too noisy to tell their limits; " in sentence
    assert "could show is" in sentence and "±" not in sentence
