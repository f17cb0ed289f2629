"""Records, pages and folders made from a small run that is known by hand."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmopt.base.atomic_io import write_atomically
from llmopt.base.errors import BadInput
from llmopt.bench.gate.compare import compare
from llmopt.bench.gate.gate_options import LimitOptions
from llmopt.bench.gate.limits import GateOutcome, Limit, parse_share
from llmopt.bench.metrics import run_statistics
from llmopt.bench.metrics.trace import LoadPass, RequestTrace
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.page.page import (
    Page,
    ReportTable,
    ReportVerdict,
    Section,
    to_html,
    to_markdown,
)
from llmopt.bench.page.plot_style import canvas, to_svg
from llmopt.bench.record.result import (
    SCHEMA_VERSION,
    RunData,
    atomic_run_folder,
    plain,
    requests_table,
    stamped,
    to_json,
    write_requests,
)
from llmopt.bench.record.run_record import vllm_part
from llmopt.bench.report.comparison import comparison_page
from llmopt.bench.report.parts import formula_table
from llmopt.bench.report.run_report import console_table, plan_table, run_page, write_report

from tests.support.page_parts import sections_of

VLLM_KEYS = [
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
] + [
    f"{statistic}_{metric}_ms"
    for metric in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "median", "std", "p99")
]
DETAILED = (
    "input_lens output_lens start_times ttfts itls generated_texts errors latencies queue_times"
)


def passes(count: int = 3, factor: float = 1.0) -> list[LoadPass]:
    rng = np.random.default_rng(4)
    found = []
    for _ in range(count):
        traces = []
        for number in range(12):
            noise = factor * float(rng.lognormal(0, 0.01))
            times = [number * 0.1 + noise * 0.02 * (i + 1) for i in range(5)]
            traces.append(
                RequestTrace(
                    f"bench-{number}", 7, 5, 0.0, number * 0.1, times, [1] * 5, True, "", "text"
                )
            )
        found.append(LoadPass(traces, duration=1.3 * factor))
    return found


def a_result(options: BenchOptions, made: list[LoadPass], name: str = "run") -> dict[str, Any]:
    record = vllm_part(options, made, {"model_id": "m"}, "20260101-000000")
    runs = [run_statistics.summarize_pass(one) for one in made]
    record["llmopt"] = {
        "schema": SCHEMA_VERSION,
        "run_id": f"{name}-id",
        "arms": None,
        "name": name,
        "interrupted": False,
        "slowdown": 1.0,
        "identity": {
            "model": "m",
            "model_hash": "sha256:0",
            "quantization": None,
            "dtype": "float32",
            "target": "in-process",
            "workload": "random",
            "workload_sha256": "w" * 64,
            "load": {
                "request_rate": "inf",
                "burstiness": 1.0,
                "max_concurrency": 8,
                "ignore_eos": True,
                "temperature": 0.0,
                "seed": 0,
            },
            "engine": {"max_model_len": 64},
            "device": "cpu",
            "machine": "a machine",
        },
        "workload": {
            "name": "random",
            "source": "random token ids",
            "is_stand_in": False,
            "notes": ["a <note> & more"],
            "num_requests": 12,
            "prompt_tokens": 84,
            "output_tokens": 60,
        },
        "num_warmups": 0,
        "num_runs": len(made),
        "runs": [{**run, "prefix_cache_hit_rate": 0.0} for run in runs],
        "metrics": run_statistics.distributions(made, 0),
        "spread": run_statistics.spread(runs),
        "peaks": run_statistics.peaks(made),
        "client_lag_ms": run_statistics.client_lag(made),
        "phases": run_statistics.phases(made),
        "preemptions": 0,
        "prefix_cache_hit_rate": 0.0,
        "memory": {
            "weight_bytes": 4 << 20,
            "checkpoint_bytes": 4 << 20,
            "kv_cache_bytes": 1 << 20,
            "peak_resident_bytes": None,
        },
        "quality": {
            "protocol": "p",
            "source": "text",
            "token_sha256": "t" * 64,
            "num_tokens": 10,
            "perplexity": 3.0,
            "nll_nats": math.log(3),
            "reference": "m",
            "reference_perplexity": 2.9,
            "kl_nats": 0.05,
            "top1_agreement": 0.9,
        },
        "roofline": None,
        "environment": {"libraries": {"torch": "1"}},
    }
    return plain(record)


def data(name: str = "run", factor: float = 1.0, **options: Any) -> RunData:
    made = passes(factor=factor)
    return RunData(a_result(BenchOptions(**options), made, name), requests_table(made))


def test_every_vllm_key_is_there_with_its_type() -> None:
    found = data().result
    assert [key for key in VLLM_KEYS if key not in found] == []
    assert found["request_rate"] == "inf" and isinstance(found["max_concurrency"], int)
    assert isinstance(found["duration"], float) and isinstance(found["completed"], int)
    assert not set(DETAILED.split()) & set(found)
    json.loads(to_json(found), parse_constant=lambda word: pytest.fail(word))
    assert data(request_rate=2.5).result["request_rate"] == 2.5


def test_detailed_arrays_are_seconds() -> None:
    found = data(save_detailed=True).result
    assert [key for key in DETAILED.split() if key not in found] == []
    assert len(found["ttfts"]) == 36 and found["ttfts"][0] == pytest.approx(0.02, rel=0.1)
    assert len(found["itls"][0]) == 4 and found["output_lens"][0] == 5


def test_nothing_measured_is_null(tmp_path: Path) -> None:
    failed = RequestTrace("bench-0", 3, 2, 0.0, 0.0, [], [], False, "refused")
    found = a_result(BenchOptions(), [LoadPass([failed], 0.5)])
    assert found["mean_ttft_ms"] is None and found["failed"] == 1
    assert "NaN" not in to_json(found)
    write_report(found, [LoadPass([failed], 0.5)], tmp_path)
    assert "No request succeeded" in (tmp_path / "report.html").read_text()


def test_requests_table_has_a_row_a_request(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_requests(tmp_path / "r.parquet", passes())
    table = pq.read_table(tmp_path / "r.parquet").to_pydict()
    assert table["run"] == [0] * 12 + [1] * 12 + [2] * 12
    assert table["ttft_ms"][0] == pytest.approx(20, rel=0.1)
    assert len(table["chunk_times_s"][0]) == 5


def test_console_table_has_the_shape_that_people_parse() -> None:
    text = console_table(data(goodput=("ttft:500",)).result, ("ttft", "e2el"), (99,))
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert "---------------Time to First Token----------------" in lines
    assert "----------------End-to-end Latency----------------" in lines
    assert "Successful requests:                     36" in lines
    assert any(line.startswith("Request goodput (req/s):                 9.23") for line in lines)
    assert any(line.startswith("P99 TTFT (ms):                           ") for line in lines)


def test_report_states_formulas_and_holds_its_figures(tmp_path: Path) -> None:
    made = passes()
    write_report(a_result(BenchOptions(), made), made, tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert html.count("<svg ") == 2
    for formula in ("(e2el − ttft) / (output tokens − 1)", "linear interpolation"):
        assert formula in html
    assert all(name in html for name, _ in formula_table().rows)
    assert "A &lt;note&gt; &amp; more" in html
    for fetch in ("src=", "<script", "<link", "@import"):
        assert fetch not in html
    for name in ("distributions", "timeline"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    markdown = (tmp_path / "report.md").read_text()
    assert "| ttft |" in markdown and "](timeline.svg)" in markdown


def test_page_escapes_text_and_markdown_bars() -> None:
    table = ReportTable(("a", "b"), [["x|y", "<b>"]])
    page = Page("T <i>", "s", ReportVerdict("good", "h", "s"), [], [Section("S", tables=[table])])
    assert "T &lt;i&gt;" in to_html(page) and "<b>" not in to_html(page)
    assert "x\\|y" in to_markdown(page) and "# T <i>\n" in to_markdown(page)
    figure, _ = canvas()
    assert 'aria-label="&lt;b&gt; &quot;c&quot;"' in to_svg(figure, '<b> "c"')


def test_comparison_page_for_every_outcome() -> None:
    base = data("base")
    for new, said in ((data("equal"), "Pass"), (data("slow", 2.0), "Regression")):
        comparison = compare(base, new)
        html = to_html(comparison_page(base, new, comparison))
        assert f"{said}: {new.name} against base" in html
        assert html.count("<svg ") == 3
    other = data("other")
    other.result["llmopt"]["identity"]["workload_sha256"] = "x" * 64
    comparison = compare(base, other)
    assert comparison.outcome is GateOutcome.NO_VERDICT
    assert "not the same prompts and their lengths (workload" in to_html(
        comparison_page(base, other, comparison)
    )


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("workload_sha256", "x", "prompts and their lengths"),
        ("load", {"max_concurrency": 4}, "max_concurrency: 8 and 4"),
        ("device", "cuda", "device: cpu and cuda"),
        ("machine", "another", "machine: a machine and another"),
    ],
)
def test_incomparable_runs_get_no_verdict(key: str, value: Any, said: str) -> None:
    base, new = data("base"), data("new")
    own = new.result["llmopt"]["identity"]
    own[key] = {**own[key], **value} if isinstance(value, dict) else value
    found = compare(base, new)
    assert found.outcome is GateOutcome.NO_VERDICT and found.outcome.exit_code == 3
    assert said in found.reasons[0] and found.deltas == ()


def test_models_may_differ_and_it_is_reported() -> None:
    base, new = data("base"), data("new")
    new.result["llmopt"]["identity"]["quantization"] = "awq"
    found = compare(base, new)
    assert found.outcome is GateOutcome.PASS
    assert found.differs_by == ("quantization: none against awq",)
    assert found.notes[0].startswith("one start a side")


def test_failures_come_before_latencies() -> None:
    base, new = data("base"), data("new")
    new.result["failed"] = 30
    assert compare(base, new).outcome is GateOutcome.REGRESSION
    assert "failed requests rose from 0 to 30" in compare(base, new).reasons[0]
    base.result["failed"] = 30
    assert compare(base, new).outcome is GateOutcome.NO_VERDICT
    # One failure proves nothing, and is no pass.
    base.result["failed"], new.result["failed"] = 0, 1
    found = compare(base, new)
    assert found.outcome is GateOutcome.NO_VERDICT
    assert any("rose from 0 to 1" in reason for reason in found.reasons)


def test_other_output_lengths_are_other_work() -> None:
    base, new = data("base"), data("new")
    new.result["total_output_tokens"] *= 1.2
    assert new.requests is not None
    new.requests["output_len"] = [length * 1.2 for length in new.requests["output_len"]]
    found = compare(base, new)
    assert found.outcome is GateOutcome.NO_VERDICT and "output length" in found.reasons[0]


@pytest.mark.parametrize(
    ("gate", "outcome"),
    [
        (LimitOptions(max_kl=0.06).quality, GateOutcome.PASS),
        (LimitOptions(max_kl=0.04).quality, GateOutcome.REGRESSION),
        (LimitOptions(min_top1="0.95").quality, GateOutcome.REGRESSION),
        (LimitOptions(max_ppl_increase="0.02").quality, GateOutcome.REGRESSION),
        (LimitOptions(max_ppl_increase="0.20").quality, GateOutcome.PASS),
    ],
)
def test_quality_gates(gate: tuple[Limit, ...], outcome: GateOutcome) -> None:
    base, new = data("base"), data("new")
    new.result["llmopt"]["quality"]["perplexity"] = 3.3
    assert compare(base, new, gate=gate).outcome is outcome


def test_a_quality_gate_without_quality_is_no_verdict() -> None:
    base, new = data("base"), data("new")
    new.result["llmopt"]["quality"] = None
    assert (
        compare(base, new, gate=LimitOptions(max_kl=0.1).quality).outcome is GateOutcome.NO_VERDICT
    )
    assert compare(base, new).outcome is GateOutcome.PASS


def test_shares() -> None:
    assert (parse_share("5%"), parse_share(" 0.05 "), parse_share("0")) == (0.05, 0.05, 0.0)
    for word in ("five", "-1%", "nan", "inf"):
        with pytest.raises(BadInput):
            parse_share(word)


def test_read_result_refuses_what_it_cannot_judge(tmp_path: Path) -> None:
    for text, said in (('{"a": 1}', "not a result"), ("{", "not valid JSON")):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(BadInput, match=said):
            RunData.read(tmp_path)
    (tmp_path / "result.json").write_text('{"llmopt": {"identity": {}, "schema": 99}}')
    with pytest.raises(BadInput, match="schema 99"):
        RunData.read(tmp_path)
    with pytest.raises(BadInput, match="missing"):
        RunData.read(tmp_path / "nowhere.json")


def test_folders_are_whole_or_absent(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2)
    target = stamped(tmp_path, "a name/with: signs", now)
    assert target.name.endswith("-a-name-with-signs")
    # Each of those that begin in one second has a folder of its own before it writes anything.
    others = [stamped(tmp_path, "a name/with: signs", now) for _ in range(2)]
    assert [path.name for path in others] == [f"{target.name}-2", f"{target.name}-3"]
    for path in (target, *others):
        path.rmdir()
    with pytest.raises(RuntimeError), atomic_run_folder(target) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_run_folder(target) as folder:
        (folder / "all").write_text("x")
        assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    with pytest.raises(BadInput, match="exists"), atomic_run_folder(target):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(BadInput, match="cannot make the folder"),
        atomic_run_folder(tmp_path / "file" / "x"),
    ):
        pass
    write_atomically(tmp_path / "page", "text")
    assert (tmp_path / "page").read_text() == "text"


def test_a_plan_is_shown_beside_what_was_measured() -> None:
    part = {
        "rows": [
            {
                "quantity": "TPOT",
                "unit": "ms",
                "predicted": 2.0,
                "measured": 3.0,
                "residual": 0.5,
                "load": "8 sequences of 40 tokens",
            }
        ],
        "differs": ["tokens of a block: 32 in the plan, 16 here (--block-size)"],
    }
    (section,) = sections_of("against_plan", part, plan_table=plan_table)
    assert section.tables[0].rows == [["TPOT, ms", "2", "3", "+50.0 %", "8 sequences of 40 tokens"]]
    assert "Not as planned: tokens of a block: 32" in section.paragraphs[1]


@pytest.mark.parametrize(("seconds", "is_shown"), [(2.9, False), (3.1, True)])
def test_the_peak_of_a_second_needs_passes_of_three(seconds: float, is_shown: bool) -> None:
    """A second that the pass does not fill is counted as one: the peak stood below the mean."""
    made = passes()
    for load_pass in made:
        load_pass.duration = seconds
    result = a_result(BenchOptions(), made)
    assert ("Peak output token throughput" in console_table(result, ("ttft",), (99.0,))) == is_shown
    assert result["max_output_tokens_per_s"] > 0, "the record has what vLLM's has"


def test_notes_are_folded_below_the_table_and_warnings_stand_in_the_verdict() -> None:
    found = data().result
    found["llmopt"]["preemptions"] = 2
    for run in found["llmopt"]["runs"]:
        run |= {"disturbed": True, "disturbed_because": "42% of its time in the run queue"}
    page = run_page(found, {})
    assert len(page.warnings) == 2 and len(page.notes) == 3
    html = to_html(page)
    verdict, _, below = html.partition('<div class="verdict')[2].partition('<dl class="cards">')
    assert "were preempted" in verdict and "Other programs disturbed every pass" in verdict
    assert "3 notes on the measurement" in below.partition("<section>")[0]
    assert "42%" not in verdict and '<details class="notes">' in below
    markdown = to_markdown(page)
    assert markdown.count("> Note: ") == 2
    assert markdown.index("3 notes on the measurement:") > markdown.index("| Output throughput |")
    assert "8 requests at a time" in page.subtitle and "closed loop" not in html
