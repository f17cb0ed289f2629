"""Measured records: what made them, how large they are, and the numbers that documents take from them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from llmopt.engine.planner.expected import offload_band

from tools import (
    calibration_table,
    greedy_mixes,
    offload_error,
    pass_evidence,
    quality_table,
    quantizer_times,
    start_table,
)
from tools.agents import __main__ as agents
from tools.document_part import part_of
from tools.model_survey import read_results, row_line
from tools.peers import record as peers_record
from tools.quality import mixes, real

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MEASURED = DOCS / "measured"
ROW = re.compile(
    r"\| ([\w./-]+) \| `([^`]+)`[^|]* \| ([^|]+) \| (\d{4}-\d\d-\d\d) \| ([0-9a-f]{8}) \|"
)


def record(name: str) -> Any:
    return json.loads((MEASURED / name).read_text(encoding="utf-8"))


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_record_names_its_command_machine_date_and_commit() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "docs/measured"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    records = {Path(line).relative_to("docs/measured") for line in listing.stdout.splitlines()}
    pages = {path for path in records if len(path.parts) == 1 and path.suffix == ".md"}
    rows = [match.groups() for match in ROW.finditer(page("measured/README.md"))]
    assert {Path(name) for name, *_ in rows} == records - pages
    for _, command, *_ in rows:
        for tool in re.findall(r"tools/\S+\.py", command):
            assert (ROOT / tool).is_file(), command


def test_the_tables_of_the_peers_are_those_of_the_records() -> None:
    made = peers_record.made()
    assert part_of(MEASURED / "peers.md", "peers/record.py") == made
    summary = re.findall(r"\d\.\d\d \([\d.]+-[\d.]+\)", page("peers.md"))
    assert len(summary) == 44
    assert not [ratio for ratio in summary if f"| {ratio} |" not in made]


def test_the_times_of_quantizers_are_those_of_the_record() -> None:
    for name, is_plain in (("quantizers", False), ("quantizers-1.1B", True)):
        made = "\n".join(quantizer_times.lines(record(f"cpu/{name}.json")["rows"]))
        assert part_of(MEASURED / "quantizers.md", quantizer_times.part_for(is_plain)) == made


def test_the_start_table_is_that_of_the_record() -> None:
    assert part_of(start_table.DOCS, start_table.PART) == start_table.tables(
        record("cpu/starts.json")
    )


def test_the_quality_tables_are_those_of_the_records() -> None:
    bundled = record("cpu/quality-table.json")
    rows = [quality_table.Row(**row) for row in bundled["rows"]]
    made = quality_table.markdown(bundled["original_perplexity"], rows)
    assert part_of(MEASURED / "quality.md", "quality_table.py") == made
    for name, part in (("real", "quality_table.py real"), ("stories", "quality_table.py stories")):
        made = real.markdown(record(f"cpu/quality-{name}.json"))
        assert part_of(MEASURED / "quality.md", part) == made
    made = real.markdown(record("cpu/quality-real.json"))
    summary = re.findall(r"[\d.]+ \([\d.]+ to [\d.]+\)", page("quantization.md"))
    assert len(summary) == 18
    assert not [score for score in summary if f"| {score} |" not in made]


def test_the_table_of_mixes_is_that_of_the_record() -> None:
    for name, part in (("stories", ""), ("real", " real")):
        made = mixes.markdown(record(f"cpu/mixes-{name}.json"))
        assert part_of(MEASURED / "mixes.md", f"quality_table.py mixes{part}") == made
    made = greedy_mixes.markdown(record("cpu/mixes-greedy.json"), record("cpu/mixes-real.json"))
    assert part_of(MEASURED / "mixes.md", "greedy_mixes.py") == made


def test_the_calibration_table_is_that_of_the_record() -> None:
    rows = [calibration_table.Row(**row) for row in record("cpu/calibration.json")["rows"]]
    made = calibration_table.markdown(rows)
    assert part_of(MEASURED / "calibration.md", "calibration_table.py") == made


def test_the_table_of_plans_with_weights_in_ram_is_that_of_the_tool() -> None:
    made = offload_error.table()
    assert part_of(MEASURED / "offload.md", "offload_error.py") == made
    offload = offload_error.set_ups()[0].steps.offload
    assert offload is not None
    band = offload_band(offload)
    assert band is not None
    ranges = re.findall(r"left out .* from (\S+) % to (\S+) %", made)
    for (low, high), factors in zip(ranges, (band.tpot, band.ttft), strict=True):
        assert 0 <= 1 + int(low) / 100 - factors[0] < 0.1
        assert 0 <= factors[1] - 1 - int(high) / 100 < 0.15


def test_the_survey_has_the_recorded_verdicts() -> None:
    lines = set(part_of(MEASURED / "model-survey.md", "model_survey.py").splitlines())
    results = read_results(MEASURED / "model-survey.json")
    assert not {row_line(name, row) for name, row in results.items()} - lines


def test_the_table_of_agents_is_that_of_the_record() -> None:
    made = agents.table(record("agents.json"))
    assert made in page("api.md")
    assert "failed" not in made


def test_the_error_rates_of_the_gate_are_recorded() -> None:
    text = page("measuring.md")
    shown = text[text.index("<!-- rates -->") : text.index("<!-- end of rates -->")]
    rows = {line for line in shown.splitlines() if re.match(r"\| [a-z]", line)}
    assert len(rows) == 8
    made = (MEASURED / "cpu/gate-error-rates.md").read_text(encoding="utf-8").splitlines()
    assert not [row for row in rows - set(made) if not row.startswith("| recording |")]


def test_the_goals_that_the_gate_misses_are_those_of_the_record() -> None:
    text = page("measuring.md")
    missed = re.findall(r"missed: ([\d.]+) %", text[text.index("| with 12 pairs") :])
    rows = (MEASURED / "cpu/gate-12-pairs.md").read_text(encoding="utf-8").splitlines()
    shares = {row.split(" | ")[4].split("%")[0] for row in rows if " slower | " in row}
    assert len(missed) == 3
    assert set(missed) < shares


def test_the_rise_of_rejected_passes_is_that_of_the_recording(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording of the table was renamed once, and the command of the page printed other numbers."""
    listed = {match[1]: match[2] for match in ROW.finditer(page("measured/README.md"))}
    _, script, recording = listed["cpu/pass-evidence.md"].split()
    monkeypatch.setattr("sys.argv", [script, str(ROOT / recording)])
    pass_evidence.main()
    made = (MEASURED / "cpu/pass-evidence.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == made
    rows = made.splitlines()
    rises = [int(row.split(" | ")[4].strip("+%")) for row in rows if row.endswith("| yes |")]
    assert f"rises by {min(rises)} to {max(rises)} %" in " ".join(page("measuring.md").split())


def test_the_errors_of_the_client_are_recorded() -> None:
    text = page("measuring.md")
    for row in record("cpu/client-error.json")["errors"]:
        first, gaps = row["client_ttft_error_ms"], row["client_itl_error_ms"]
        assert (
            f"| {row['streams']} | {row['workers']} | {first['median']:.2f} / {first['p99']:.2f} | "
            f"{gaps['median']:.2f} / {gaps['p99']:.2f} | {row['server_lateness_ms']['median']:.2f} |"
        ) in text


def test_the_cost_of_eight_bit_activations_is_recorded() -> None:
    found = record("cpu/cpu-activations.json")
    kls = {row["cpu_activations"]: f"{row['kl_nats']:.4f}" for row in found["rows"]}
    assert f"from {kls[16]} to {kls[8]} nats" in page("compatibility.md")
    assert f"{kls[8]} nats in place of {kls[16]}" in page("engine.md")
    assert all(f"{row['num_tokens']:,} tokens" in page("engine.md") for row in found["rows"])


def test_the_soak_did_what_is_written() -> None:
    found, text = record("cpu/soak.json"), " ".join(page("serving.md").split())
    faults = found["faults"]
    assert all(found["checks"].values())
    assert f"{faults['faults']} faults" in text
    assert f"{faults['probes_answered']:,} probes answered" in text
    assert f"{found['preemptions']:,.0f} preemptions" in text
    assert f"{found['resident_bytes_growth'] / 2**20:.1f} MiB between" in text


def test_the_processor_time_of_a_streamed_token_is_recorded() -> None:
    text = page("serving.md")
    rows = [("before", each) for each in record("cpu/front-before.json")["rows"]]
    for kind, row in [*rows, *(("", each) for each in record("cpu/front.json")["rows"])]:
        server = f"{row['server']}, {kind}" if kind else row["server"]
        assert (
            f"| {server} | {row['streams']:.0f} | {row['processor_us_per_token']:.0f} | "
            f"{row['tokens_per_second']:,.0f} | {row['itl_p50_ms']:.1f} / {row['itl_p99_ms']:.1f} |"
        ) in text


def test_a_mutation_that_nothing_finds_has_a_reason() -> None:
    rows = record("mutations.json")["mutations"]
    found, in_tier = (
        sum(row[key] is not None for row in rows) for key in ("found_by_whole", "found_by_tier")
    )
    assert in_tier >= 0.9 * found
    said = f"Of the {len(rows)} mistakes of the last record everything finds {found} and `make test` {in_tier}."
    assert said in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(row["found_by_whole"] or row["reason"] for row in rows)
