"""`bench --baseline`, `bench --against`, `compare --gate` and `report` on the bundled model."""

from __future__ import annotations

import csv
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest
import typer
from llmopt.base.errors import BadInput
from llmopt.bench.page.page import to_markdown
from llmopt.bench.record.result import RunData
from llmopt.bench.report.joined import ParetoPoint, front, joined_page, shared_quality
from llmopt.cli.bench import bench
from llmopt.cli.compare import compare
from llmopt.cli.main import run_guarded
from llmopt.cli.report import report

from ...support.simulated_clock import simulated_clock

FAST = ["--num-prompts", "12", "--output-len", "8", "--num-threads", "1", "--num-runs", "3"]


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    for command in (bench, compare, report):
        app.command()(command)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


def folder_of(root: Path, name: str) -> Path:
    (found,) = root.glob(f"*-{name}")
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base run, and a run with a sampler that takes 150 times as long, 1.5 steps, judged against it."""
    root = tmp_path_factory.mktemp("verdicts")
    words = ["--reference", "stories3M", "--quality-tokens", "300", "--csv"]
    words += ["--gpu-hour-price", "3.6", "--result-dir", str(root)]
    with simulated_clock(0):
        assert llmopt("bench", *FAST, *words, "--name", "base") == 0
    with simulated_clock(1):
        code = llmopt(
            "bench", *FAST, *words, "--name", "slow", "--slowdown", "150", "--slowdown-where", "sampler",
            "--baseline", folder_of(root, "base"), "--gate", "median_tpot_ms<=+15% weight_bytes<=+0% kl<=0.01",
            "--junit", root / "verdict.xml", "--benchmark-json", root / "bench.json",
        )  # fmt: skip
    assert code == 1
    return root


def test_a_slow_sampler_shows_in_the_verdict(root: Path) -> None:
    result = json.loads((folder_of(root, "slow") / "result.json").read_text())
    verdict = result["llmopt"]["verdict"]
    assert verdict["exit_code"] == 1 and verdict["conditions"] == []
    (delta,) = verdict["deltas"]
    assert (delta["key"], delta["outcome"]) == ("median_tpot_ms", "regression")
    # 149 times the 20 µs of the sampler, in a step of 2 ms.
    assert delta["worse"] == pytest.approx(149 * 0.02 / 2.02, rel=0.05)
    assert {check["key"]: check["outcome"] for check in verdict["checks"]} == {
        "weight_bytes": "pass",
        "kl": "pass",
    }
    assert "its sampler was slowed 150 times" in verdict["notes"][0]
    assert (folder_of(root, "slow") / "comparison.html").is_file()
    assert "limit" in (folder_of(root, "slow") / "comparison.md").read_text()


def test_the_files_of_the_verdict_parse(root: Path) -> None:
    (suite,) = ElementTree.parse(root / "verdict.xml").getroot()
    assert int(suite.attrib["tests"]) == 4
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("2", "0")
    for name in ("bench.json", "bench.bigger.json"):
        entries = json.loads((root / name).read_text(), parse_constant=pytest.fail)
        assert entries and all(entry["name"].startswith("slow: ") for entry in entries)


def test_the_record_has_energy_cost_and_the_state_before_and_after(root: Path) -> None:
    result = json.loads((folder_of(root, "base") / "result.json").read_text())
    ours = result["llmopt"]
    # 3.6 $ an hour is a thousandth of a dollar a second.
    per_token = result["duration"] / 1000 / result["total_output_tokens"]
    assert ours["cost"]["usd_per_million_output_tokens"] == pytest.approx(per_token * 1e6)
    assert (ours["energy"]["joules"] is None) == bool(ours["energy"]["cpu_reason"])
    assert len(ours["environment"]["before"]["load_average"]) == 3
    assert ours["environment"]["after"].keys() == ours["environment"]["before"].keys()
    assert all(run["other_load"] is None or 0 <= run["other_load"] <= 1 for run in ours["runs"])
    assert ours["metrics"]["ttft"]["order_interval_95"]["p99"][1] is None  # 36 requests
    low, high = ours["spread"]["output_throughput"]["interval_95"]
    assert low < result["output_throughput"] < high
    page = (folder_of(root, "base") / "report.html").read_text()
    assert "Money and energy" in page and "to unbounded" in page


def test_csv_holds_what_parquet_holds(root: Path) -> None:
    table = pq.read_table(folder_of(root, "base") / "requests.parquet").to_pydict()
    with (folder_of(root, "base") / "requests.csv").open(newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == len(table["request_id"]) == 36 and list(rows[0]) == list(table)
    assert [row["text"] for row in rows] == table["text"]
    assert [float(row["ttft_ms"]) for row in rows] == table["ttft_ms"]
    assert json.loads(rows[0]["chunk_times_s"]) == table["chunk_times_s"][0]


def test_against_measures_paired_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with simulated_clock():
        code = llmopt(
            "bench", "stories3M", *FAST, "--against", "stories3M", "--no-quality", "--name", "new",
            "--result-dir", tmp_path, "--gate", "weight_bytes<=+0% median_tpot_ms<=+15%", "--json",
        )  # fmt: skip
    verdict = json.loads(capsys.readouterr().out)["llmopt"]["verdict"]
    assert code == 0 and (verdict["base"], verdict["new"]) == ("stories3M", "new")
    assert [(check["key"], check["outcome"]) for check in verdict["checks"]] == [
        ("weight_bytes", "pass")
    ]
    assert [delta["outcome"] for delta in verdict["deltas"]] == ["pass"]
    pair_ids = {RunData.read(one).result["llmopt"]["arms"] for one in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 2 and len(pair_ids) == 1 and None not in pair_ids


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gate", "kl<=1"], "--gate kl is a distance from a model: give --reference MODEL"),
        (["--gate", "perplexity<=+1%"], "a change needs a base: give --baseline or --against"),
        (["--gate", "top1>=97%"], "without a percent sign, such as top1>=0.97"),
        (["--junit", "x.xml"], "--junit needs"),
        (["--baseline", "nowhere"], "nowhere"),
        (["--baseline", "nowhere", "--against", "stories3M"], "one base"),
        (["--against", "stories3M", "--gate", "p99_tfft_ms<=+5%"], "did you mean p99_ttft_ms"),
        (["--against", "stories3M", "--base-url", "http://127.0.0.1:9"], "no server answers"),
        (["--slowdown-where", "kernel"], "slowdown_where"),
        (["--gpu-hour-price", "-1"], "gpu_hour_price"),
    ],
)
def test_a_comparison_without_verdict_is_refused_before_measuring(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmopt("bench", *FAST, *words, "--result-dir", tmp_path / "runs") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("limit", "code"), [("kl<=0.02", 0), ("perplexity<=1.5", 1)])
def test_limits_on_values_need_the_reference_alone(
    limit: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = ["--reference", "stories260K", "--quality-tokens", "64", "--gate", limit]
    command = ["bench", "stories260K", *FAST, *scored, "--json", "--result-dir", tmp_path]
    assert llmopt(*command) == code
    verdict = json.loads(capsys.readouterr().out)["llmopt"]["verdict"]
    assert [check["outcome"] for check in verdict["checks"]] == ["regression" if code else "pass"]
    assert verdict["deltas"] == [] and len([*tmp_path.glob("*/comparison.html")]) == 1
    # Nothing compares the run with itself.
    assert verdict["is_alone"] and [aspect["aspect"] for aspect in verdict["aspects"]] == [
        "quality"
    ]
    (page,) = (path.read_text() for path in tmp_path.glob("*/comparison.md"))
    assert page.startswith("# stories260K\n") and page.count("What was run") == 1
    assert " against " not in page


class Fetches(HTMLParser):
    """Everything that a browser would fetch for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            is_reference = key in (
                "src",
                "srcset",
                "href",
                "xlink:href",
                "data",
                "action",
                "poster",
            )
            if is_reference and value and not value.startswith("#"):
                self.found.append(value)
            elif key == "style" and value:
                self.found += re.findall(r"url\(\s*['\"]?(?!#)([^)]*)", value)
        if tag in ("script", "link", "iframe", "object", "embed", "base"):
            self.found.append(tag)


def test_pages_fetch_nothing(root: Path, tmp_path: Path) -> None:
    out, markdown = tmp_path / "page.html", tmp_path / "page.md"
    folders = (folder_of(root, "base"), folder_of(root, "slow"))
    assert llmopt("report", *folders, "-o", out, "--markdown", markdown) == 0
    pages = [out, folders[0] / "report.html", folders[1] / "comparison.html"]
    for page in pages:
        text = page.read_text()
        parser = Fetches()
        parser.feed(text)
        assert parser.found == [], page
        assert "@import" not in text and not re.search(r"url\(\s*['\"]?(?!#)", text)
        assert "@media print" in text and 'name="viewport"' in text
        # The verdict comes before every number and figure.
        assert text.index('class="verdict') < min(text.index("<table"), text.index("<svg"))
    text = out.read_text()
    assert 'aria-label="Quality against size of 2 runs"' in text and "base" in text
    assert "| slow |" in markdown.read_text() and "svg" not in markdown.read_text()


def test_a_joined_page_says_what_cannot_be_compared(root: Path, tmp_path: Path) -> None:
    one = RunData.read(folder_of(root, "base"))
    with pytest.raises(BadInput, match="two runs or more"):
        joined_page([one])
    other: dict[str, Any] = json.loads(json.dumps(one.result))
    other["llmopt"]["identity"]["machine"] = "another"
    other["llmopt"]["quality"] = None
    page = joined_page([one, RunData(other)])
    assert page.title == "2 runs: base, base (2)"
    assert any("not the same machine and its limits" in warning for warning in page.warnings)
    assert "no quality of the same tokens" in page.verdict.sentence
    assert page.verdict.headline.startswith("Their speeds are not comparable; smallest: base")
    assert "Fastest" not in page.verdict.headline and "()" not in to_markdown(page)


def changed_copy(root: Path, target: Path, **identity: Any) -> Path:
    """The base run with another id and these parts of its identity."""
    shutil.copytree(folder_of(root, "base"), target)
    result = json.loads((target / "result.json").read_text())
    result["llmopt"] |= {"run_id": target.name, "name": target.name}
    result["llmopt"]["identity"] |= identity
    (target / "result.json").write_text(json.dumps(result))
    return target


def test_compare_lists_what_was_varied_and_names_the_condition(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GGUF with 8-bit activations beside another format had NO VERDICT: the engine options differ."""
    base = folder_of(root, "base")
    identity = RunData.read(base).result["llmopt"]["identity"]
    engine = {**identity["engine"], "cpu_activations": 8, "max_num_seqs": 3}
    varied = changed_copy(root, tmp_path / "varied", quantization="gguf", engine=engine)
    # In float32 the norms of a checkpoint that counts as quantized are wider than in the file.
    gate = ("--gate", "weight_bytes<=+0.1% kl<=0.5")
    capsys.readouterr()
    assert llmopt("compare", base, varied, *gate, "--markdown", tmp_path / "page.md") == 0
    shown = capsys.readouterr().out
    (said,) = re.findall(r"^differs by: (.*)$", shown, re.MULTILINE)
    assert said.startswith("quantization: none against gguf; ")
    assert "activation bits: none against 8" in said and "max_num_seqs: " in said
    assert f"Differs by {said}." in (tmp_path / "page.md").read_text()
    assert re.search(r"^overall +pass", shown, re.MULTILINE)
    seeded = {**identity["load"], "seed": 7}
    other = changed_copy(root, tmp_path / "other", load=seeded)
    assert llmopt("compare", base, other, *gate, "--json") == 3
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["conditions"] == verdict["decided_by"] == ["sampling and seeds"]
    assert verdict["reasons"] == ["not the same sampling and seeds (seed: 0 and 7)"]
    assert llmopt("report", base, varied, other, "-o", tmp_path / "page.html") == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "Their speeds are not comparable" in shown and "Fastest" not in shown
    assert llmopt("report", base, varied, "-o", tmp_path / "page.html") == 0
    assert "Fastest: " in capsys.readouterr().out


def test_a_broken_quality_limit_is_no_verdict_on_speed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faster = changed_copy(root, tmp_path / "faster")
    gate = ("--gate", "median_tpot_ms<=+900% perplexity<=1")
    capsys.readouterr()
    assert llmopt("compare", folder_of(root, "base"), faster, *gate) == 1
    shown = capsys.readouterr().out
    verdicts = dict(re.findall(r"^(speed|quality|memory|overall) +(.+?)  ", shown, re.MULTILINE))
    assert verdicts == {
        "speed": "pass",
        "quality": "regression",
        "memory": "equal",
        "overall": "regression",
    }
    assert re.search(r"^overall +regression +Perplexity ≤ 1$", shown, re.MULTILINE)


KINDS_CHANGED = {
    "llmopt.metrics.ttft.mean": "fast",
    "llmopt.runs.0.output_throughput": [1],
    "llmopt.quality": 3,
    "llmopt.quality.kl_nats": "little",
    "llmopt.identity.load": None,
    "llmopt.memory.weight_bytes": {"a": 1},
    "llmopt.environment.libraries": [],
    "median_ttft_ms": "fast",
}


@pytest.mark.parametrize(("place", "value"), KINDS_CHANGED.items())
def test_a_value_changed_to_another_kind_is_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, value: Any
) -> None:
    base = folder_of(root, "base")
    changed = json.loads((base / "result.json").read_text())
    inner: Any = changed
    *way, last = (int(word) if word.isdigit() else word for word in place.split("."))
    for step in way:
        inner = inner[step]
    inner[last] = value
    file = tmp_path / "result.json"
    file.write_text(json.dumps(changed))
    for words in (("compare", base, file), ("report", base, file, "-o", tmp_path / "page.html")):
        assert llmopt(*words) == 2
        said = capsys.readouterr().err
        assert f"{file}: {place} is " in said and said.count("\n") == 1, said


def test_the_pareto_front_by_hand() -> None:
    candidates = {
        "original": ParetoPoint(100, 10.0, 3.0, None, "t"),
        "slow": ParetoPoint(100, 5.0, 3.1, 0.1, "t"),
        "small": ParetoPoint(25, 9.0, 3.4, 0.2, "t"),
        "worse": ParetoPoint(25, 9.0, 3.5, 0.3, "t"),
    }
    assert shared_quality(candidates) == "kl"
    assert front(candidates, "kl") == front(candidates, "perplexity") == ["original", "small"]
    assert front(candidates, None) == []
    assert shared_quality({**candidates, "x": ParetoPoint(1, 1.0, 2.0, 0.0, "u")}) is None
