"""Results of other benchmarks: real files and files from documented fields (`results/README.md`), compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.compare import compare, noise_of_runs
from llmopt.bench.gate.limits import GateOutcome, parse_gate
from llmopt.bench.metrics.statistics import run_cv
from llmopt.bench.record.formats import FORMATS, read_rows
from llmopt.bench.record.imported import read_imported
from llmopt.bench.record.result import RunData
from llmopt.bench.report.comparison import comparison_page
from llmopt.bench.report.joined import joined_page

RESULTS = Path(__file__).with_name("results")
DOCS = Path(__file__).parents[3] / "docs" / "measuring.md"
# {tool: (base, new, {our key: its value in the base file})}
PAIRS = {
    "vllm bench serve": (
        "vllm/serve_base.json",
        "vllm/serve_new.json",
        {"completed": 16, "total_input_tokens": 472},
    ),
    "vllm bench sweep": (
        "vllm/sweep_base",
        "vllm/sweep_new",
        {"completed": 32, "failed": 0},
    ),
    "vllm bench latency": (
        "vllm/latency_base.json",
        "vllm/latency_new.json",
        {"mean_e2el_ms": 200.0, "completed": 8, "output_throughput": None},
    ),
    "vllm bench throughput": (
        "vllm/throughput_base.json",
        "vllm/throughput_new.json",
        {"request_throughput": 10.0, "total_token_throughput": 500.0},
    ),
    "guidellm": (
        "guidellm/base.json",
        "guidellm/new.json",
        {"median_ttft_ms": 49.0, "mean_itl_ms": 10.0, "mean_tpot_ms": None, "mean_e2el_ms": 400.0},
    ),
    "aiperf": (
        "aiperf/base",
        "aiperf/new",
        {"median_ttft_ms": 49.0, "mean_tpot_ms": 10.0, "output_throughput": 180.0},
    ),
    "sglang bench_serving": (
        "sglang/base.jsonl",
        "sglang/new.jsonl",
        {"median_ttft_ms": 49.0, "mean_e2el_ms": 120.0, "completed": 16},
    ),
    "llama-bench": (
        "llama-bench/base.json",
        "llama-bench/new.jsonl",
        {"output_throughput": 119.0, "input_throughput": 7100.0, "completed": None},
    ),
}


def read(name: str) -> RunData:
    return RunData.read(RESULTS / name)


@pytest.mark.parametrize("tool", PAIRS)
def test_two_files_of_a_tool_compare(tool: str, tmp_path: Path) -> None:
    *names, values = PAIRS[tool]
    base, new = map(read, names)
    assert base.result["llmopt"]["imported"]["tool"] == tool
    assert {key: base.result[key] for key in values} == pytest.approx(values)
    found = compare(base, new, threshold=0.05)
    assert found.deltas and not found.conditions
    # Nothing is assumed: what the tool does not say is in the verdict's words.
    missing = base.result["llmopt"]["imported"]["unknown"]
    assert all(word in found.sentence for word in missing) and missing, missing
    comparison_page(base, new, found).write(tmp_path / "page.html", tmp_path / "page.md")
    joined_page([base, new]).write(tmp_path / "joined.html")
    assert tool in (tmp_path / "page.md").read_text()
    assert compare(base, base, threshold=0.05).outcome is GateOutcome.PASS


def test_every_format_is_in_the_documents() -> None:
    page = DOCS.read_text()
    assert [one.tool for one in FORMATS if f"| `{one.tool}` |" not in page] == []


def test_repetitions_are_passes_and_requests_are_paired() -> None:
    llama = read("llama-bench/base.json")
    assert len(llama.values("output_throughput")) == 5
    assert (
        compare(llama, read("llama-bench/new.jsonl"), threshold=0.05).outcome
        is GateOutcome.REGRESSION
    )
    base, new = read("sglang/base.jsonl"), read("sglang/new.jsonl")
    assert base.by_request("ttft_ms").keys() == new.by_request("ttft_ms").keys()
    assert len(base.by_request("tpot_ms")) == 16


def test_a_single_pair_says_what_it_could_see_and_what_settles_it() -> None:
    base, new = read("sglang/base.jsonl"), read("sglang/new.jsonl")
    found = compare(base, new, limits=parse_gate("median_ttft_ms<=+5%"), threshold=0.05)
    (delta,) = found.deltas
    assert delta.visible is not None and delta.visible > delta.worse > 0.05
    smallest = f"the smallest worsening that these runs could show is {delta.visible:.0%}; "
    assert smallest in found.sentence
    assert f"about {delta.pairs_to_settle} more runs of each side would settle it" in found.sentence
    noise = noise_of_runs([base, new])
    assert noise["Output throughput, 2 runs"] == pytest.approx(
        run_cv([delta_.result["output_throughput"] for delta_ in (base, new)])
    )
    assert noise_of_runs([read("llama-bench/base.json")])["Output throughput, 5 passes"] < 0.01
    with pytest.raises(BadInput, match="one pass and one value"):
        noise_of_runs([base])


def test_an_evaluation_that_lm_eval_wrote_is_paired_by_item() -> None:
    base, new = (read(f"lm-eval/real_{side}") for side in ("base", "new"))
    assert str(base.result["model_id"]).endswith("stories3M")
    found = compare(base, new, threshold=0.05)
    assert found.outcome is GateOutcome.PASS and found.tasks
    assert {(one.num_items, one.lost, one.gained) for one in found.tasks} == {(24, 0, 0)}


def test_two_tools_are_not_compared() -> None:
    found = compare(read("sglang/base.jsonl"), read("vllm/serve_base.json"), threshold=0.05)
    assert found.outcome is GateOutcome.NO_VERDICT
    assert "measuring tool and its formulas" in found.conditions


def test_several_settings_in_a_file_are_named(tmp_path: Path) -> None:
    row = json.loads((RESULTS / "sglang/base.jsonl").read_text())
    rows = [row, row | {"request_rate": 8.0}, row | {"duration": 9.0}]
    path = tmp_path / "all.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(BadInput, match=r"holds 2 runs .* all.jsonl#1 \(load.request_rate 4.0\)"):
        RunData.read(path)
    assert (
        RunData.read(tmp_path / "all.jsonl#2").result["llmopt"]["identity"]["load"]["request_rate"]
        == 8.0
    )
    assert RunData.read(tmp_path / "all.jsonl#1").result["llmopt"]["num_runs"] == 2
    with pytest.raises(BadInput, match="from #1"):
        RunData.read(tmp_path / "all.jsonl#3")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-bench/base.json", {"n_cpu_moe": 40}),
        ("llama-bench/base.json", {"type_v": "q8_0"}),
        ("llama-bench/base.json", {"no_kv_offload": True}),
        ("sglang/base.jsonl", {"tag": "fp8"}),
        ("sglang/base.jsonl", {"dataset_name": "sharegpt"}),
        ("sglang/base.jsonl", {"server_info": {"tp_size": 8}}),
        ("sglang/base.jsonl", {"completed": 6}),
        ("vllm/serve_base.json", {"label": "fp8"}),
        ("vllm/serve_base.json", {"tensor_parallel": "4"}),
    ],
)
def test_rows_of_other_servers_are_no_passes(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """llama-bench writes all values of its options into one file, the others append to theirs."""
    rows = read_rows(RESULTS / name)
    (tmp_path / "a.json").write_text(json.dumps([*rows, *({**row, **changes} for row in rows)]))
    with pytest.raises(BadInput, match="holds 2 runs "):
        RunData.read(tmp_path / "a.json")


def test_a_test_of_prompt_and_generation_is_a_point_of_its_own(tmp_path: Path) -> None:
    rows = read_rows(RESULTS / "llama-bench/base.json")
    both = dict(rows[0]) | {"n_prompt": 512, "n_gen": 128}
    (tmp_path / "a.json").write_text(json.dumps([*rows, both]))
    shapes = [
        RunData.read(tmp_path / f"a.json#{number}").result["llmopt"]["identity"]["shape"]
        for number in (1, 2)
    ]
    assert [(shape["n_prompt"], shape["n_gen"], shape.get("test")) for shape in shapes] == [
        (512, 128, None),
        (512, 128, "pg"),
    ]


def test_a_cancelled_run_of_aiperf_is_incomplete(tmp_path: Path) -> None:
    """The options of schema 1.0 stand under other names, and are read."""
    source = next((RESULTS / "aiperf").rglob("profile_export_aiperf.json"))
    options = {"endpoint": {"model_names": ["m"]}, "loadgen": {"concurrency": 64}}
    changes = {"input_config": options, "was_cancelled": True}
    (tmp_path / source.name).write_text(json.dumps(json.loads(source.read_text()) | changes))
    result = RunData.read(tmp_path / source.name).result
    assert result["llmopt"]["interrupted"] and result["model_id"] == '["m"]'
    assert "64" in result["llmopt"]["identity"]["load"]["phases"]


def test_other_options_of_generation_are_no_equal_evaluation(tmp_path: Path) -> None:
    source = next((RESULTS / "lm-eval/real_new").rglob("results_*.json"))
    content = json.loads(source.read_text())
    content["config"]["gen_kwargs"] = {"temperature": 1.0}
    for path in source.parent.glob("samples_*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / source.name).write_text(json.dumps(content))
    verdict = compare(
        read("lm-eval/real_base"), RunData.read(tmp_path / source.name), threshold=0.05
    )
    assert verdict.outcome is GateOutcome.NO_VERDICT and "temperature" in verdict.sentence


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", "no json", '{"duration": 1}', '[{"a": 1}]'])
def test_what_is_no_result_says_so(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    assert read_imported(tmp_path / "x.json") is None
    with pytest.raises(BadInput):
        RunData.read(tmp_path / "x.json")


def test_a_run_of_ours_is_none_of_another_tool(tmp_path: Path) -> None:
    """Read a result with every field of `vllm bench serve`, below the folder or on one line."""
    ours = json.loads((RESULTS / "vllm/serve_base.json").read_text()) | {"llmopt": {"name": "a"}}
    nested = tmp_path / "runs" / "a"
    nested.mkdir(parents=True)
    (nested / "result.json").write_text(json.dumps(ours, separators=(",", ":")))
    assert read_imported(tmp_path / "runs") is None
    assert read_imported(nested / "result.json") is None


def test_a_pass_with_failures_is_a_pass_of_the_same_run(tmp_path: Path) -> None:
    row = json.loads((RESULTS / "vllm/serve_base.json").read_text())
    rows = [row, row | {"failed": 1, "completed": 15, "total_input_tokens": 450}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = RunData.read(tmp_path / "a.jsonl").result
    assert (found["llmopt"]["num_runs"], found["failed"]) == (2, 1)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({"total_input_tokens": 4720}, r"#1 .*input_tokens per request 30.0\); .*#2 .* 295.0"),
        ({"total_output_tokens": 960}, r"#1 .*output_tokens per request 6.0\); .*#2 .* 60.0"),
    ],
)
def test_prompts_or_answers_of_other_lengths_are_no_pass(
    other: dict[str, int], shown: str, tmp_path: Path
) -> None:
    """`vllm bench serve --append-result` in a loop over lengths, of which its rows say the totals alone."""
    row = json.loads((RESULTS / "vllm/serve_base.json").read_text())
    row = {key: value for key, value in row.items() if not isinstance(value, list)}
    failed = {"failed": 1, "completed": 15, "total_input_tokens": 450, "total_output_tokens": 90}
    rows = [row | failed, row, row | other, row | {"total_output_tokens": 97}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(BadInput, match=f"holds 2 runs .*{shown}"):
        RunData.read(tmp_path / "a.jsonl")
    sizes = [read_imported(tmp_path / f"a.jsonl#{number}") for number in (1, 2)]
    assert [run and run.result["llmopt"]["num_runs"] for run in sizes] == [3, 1]


def test_a_time_is_that_of_utc(tmp_path: Path) -> None:
    row = {
        "aiperf_version": "0.13.0",
        "request_throughput": {"unit": "requests/sec", "avg": 2.0},
        "request_latency": {"unit": "sec", "avg": 0.5},
        "start_time": "2026-11-26T01:00:00+02:00",
    }
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert RunData.read(tmp_path / "a.json").result["date"] == "20261125-230000"


def test_a_damaged_evaluation_is_one_line(tmp_path: Path) -> None:
    (source,) = (RESULTS / "lm-eval" / "base").rglob("results_*.json")
    content = json.loads(source.read_text())
    (tmp_path / source.name).write_text(json.dumps(content | {"results": [1]}))
    with pytest.raises(BadInput, match="is of lm-eval, but cannot be read"):
        RunData.read(tmp_path / source.name)


def test_a_damaged_result_names_its_tool(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"avg_latency": 1, "latencies": 3, "percentiles": {}}')
    with pytest.raises(BadInput, match="is of vllm bench latency, but cannot be read"):
        RunData.read(tmp_path / "x.json")


def test_units_are_the_files_own(tmp_path: Path) -> None:
    row = {
        "aiperf_version": "0.13.0",
        "request_throughput": {"unit": "requests/sec", "avg": 2.0},
        "request_latency": {"unit": "sec", "avg": 0.5, "p50": 0.4},
    }
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert RunData.read(tmp_path / "a.json").result["median_e2el_ms"] == pytest.approx(400)
    (tmp_path / "a.json").write_text(
        json.dumps(row | {"request_latency": {"unit": "ticks", "avg": 1}})
    )
    with pytest.raises(BadInput, match="'ticks', which is no known unit"):
        RunData.read(tmp_path / "a.json")


def test_lm_eval_is_paired_by_item() -> None:
    base, new = read("lm-eval/base"), read("lm-eval/new")
    found = compare(base, new, threshold=0.05)
    (change,) = found.tasks
    assert (change.key, change.lost, change.gained) == ("task.arc_easy.acc.none", 18, 0)
    assert found.outcome is GateOutcome.REGRESSION and "lm_eval" in str(
        base.result["llmopt"]["environment"]
    )
    assert compare(base, base, threshold=0.05).outcome is GateOutcome.PASS


@pytest.mark.parametrize("tool", ["guidellm", "aiperf"])
def test_requests_of_equal_prompts_are_paired(tool: str) -> None:
    base, new = (read(name).by_request("ttft_ms") for name in PAIRS[tool][:2])
    assert len(base) == 12 and base.keys() == new.keys()


def test_records_of_aiperf_are_those_of_its_prefix(tmp_path: Path) -> None:
    for prefix, kind in (("profile_export", "base"), ("foo", "new"), ("bar", "")):
        summary = "profile_export_aiperf" if prefix == "profile_export" else prefix
        source = RESULTS / "aiperf" / (kind or "base")
        shutil.copy(source / "profile_export_aiperf.json", tmp_path / f"{summary}.json")
        if kind:
            shutil.copy(source / "profile_export.jsonl", tmp_path / f"{prefix}.jsonl")
    for name, kind in (("profile_export_aiperf", "base"), ("foo", "new")):
        ttfts = RunData.read(tmp_path / f"{name}.json").by_request("ttft_ms")
        assert ttfts == read(f"aiperf/{kind}").by_request("ttft_ms") != {}
    assert RunData.read(tmp_path / "bar.json").by_request("ttft_ms") == {}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sglang/base.jsonl", {"request_goodput": 1.5, "slo_attainment": 0.5}),
        ("guidellm/base.json", {"successful": {"mean": 1.5}}),
    ],
)
def test_goodput_is_read(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """SGLang 0.5.23 and GuideLLM 0.8 write it where it was asked for."""
    row = json.loads((RESULTS / name).read_text())
    if "benchmarks" in row:
        row["benchmarks"][0]["metrics"]["request_goodput"] = change
    (tmp_path / "a.json").write_text(json.dumps(row if "benchmarks" in row else row | change))
    assert RunData.read(tmp_path / "a.json").result["request_goodput"] == 1.5


# {what two runs of a tool wrote here: what its files say of the first}
REAL = {
    "vllm/serve_{}.json": {"completed": 16, "median_ttft_ms": 84.48863},
    "guidellm/real_{}.json": {"failed": 0, "median_ttft_ms": 274.919987, "mean_itl_ms": 52.685475},
    "aiperf/real_{}": {"median_tpot_ms": 31.586432, "output_throughput": 27.580819},
}


@pytest.mark.parametrize("names", REAL)
def test_files_that_tools_wrote_are_read_and_paired(names: str) -> None:
    """Give equal builds on a busy machine no verdict, for the noise alone."""
    base, new = (read(names.format(side)) for side in ("base", "new"))
    assert {key: base.result[key] for key in REAL[names]} == pytest.approx(REAL[names])
    shared = base.by_request("e2el_ms").keys() & new.by_request("e2el_ms").keys()
    assert len(shared) == base.result["completed"]
    found = compare(base, new, threshold=0.05)
    assert not found.conditions and "nan" not in found.sentence
    assert found.outcome is not GateOutcome.REGRESSION
