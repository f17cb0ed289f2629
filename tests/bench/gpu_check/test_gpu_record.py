"""The record of a GPU in use: `doctor --gpu`, `kv-plan --measured`, and records that were sent in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.gpu_check import run
from llmopt.bench.gpu_check.run import WHOLE
from llmopt.cli.main import main
from llmopt.engine.config.plan_options import PlanRequest
from llmopt.engine.planner import own_runs
from llmopt.engine.planner.plan_request import plan_for

SHARES = {
    "bf16": {"decode": 0.8, "prefill": 0.6},
    "int4 g128 sym": {"decode": 0.5, "prefill": 0.4},
}


def record_of(gpu: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"schema": own_runs.GPU_SCHEMA, "date": "2026-11-26"}
    record |= {"environment": {"machine": f"a CPU, {gpu}", "gpu": {"name": gpu}}}
    row = {"what": "prefill", "expected": "300 ms", "seen": "400 ms", "met": False, "numbers": {}}
    stage = {"name": "llama-bf16", "ended": WHOLE, "seconds": 60.0, "findings": [row]}
    roofs = {"bandwidth": 3e12, "flops": 8e14}
    return record | {"roofs": roofs, "shares": SHARES, "stages": [stage]} | changes


@pytest.fixture
def gpu_json(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(record_of()))
    return path


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return int(ended.value.code or 0)


def planned(gpu: str = "h100", **options: Any) -> Any:
    return plan_for(PlanRequest("llama-3.1-8b", gpus=(gpu,), context="4k", **options))


def test_a_plan_takes_the_roofs_and_the_shares_of_its_weights(gpu_json: Path) -> None:
    plain = planned(measured=gpu_json)
    assert (plain.efficiency.bandwidth, plain.efficiency.compute) == (0.8, 0.6)
    device = plain.devices[0].device
    assert (device.bandwidth, device.peaks["bf16"]) == (3e12, 8e14)
    assert device.peaks["fp8"] > 1e15, "a dtype that was not measured stays the data sheet's"
    assert str(gpu_json) in plain.efficiency.source
    four_bits = planned(measured=gpu_json, weights="int4")
    assert four_bits.efficiency.bandwidth == 0.5
    other = planned("a100-80gb-sxm", measured=gpu_json)
    assert other.devices[0].device.bandwidth == pytest.approx(2.039e12, rel=0.01)


def test_a_record_without_a_model_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(record_of(shares={})))
    words = ("kv-plan", "llama-8b", "--gpu", "h100", "--measured", str(path))
    assert code_of(*words) == 2
    assert "measured no model: run llmopt doctor --gpu again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"schema": "llmopt-gpu/0"}, "holds no roofline with both phases"),
        ({"stages": 3}, "stages is 3"),
        ({"stages": [{"name": "kernels"}]}, "is damaged (ended is missing)"),
        ({"roofs": {}}, "bandwidth is None"),
        ({"shares": {"bf16": {"decode": 0.8}}}, "prefill is None"),
        ({"environment": {"gpu": "H100"}}, "environment.gpu is 'H100'"),
    ],
)
def test_a_record_that_no_plan_can_rest_on_is_one_line(
    changes: Any, complaint: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(record_of(**changes)))
    assert code_of("kv-plan", "llama-8b", "--gpu", "h100", "--measured", str(path)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and complaint in said and said.count("\n") == 1


def test_a_record_that_was_sent_in_is_read_for_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a plan of our engine on that card alone, unless a measurement is given."""
    fitted = planned(engine="llmopt")
    folder = tmp_path / "h100-sxm"
    folder.mkdir()
    (folder / "gpu.json").write_text(json.dumps(record_of()))
    monkeypatch.setattr(own_runs, "RECORDS", tmp_path)
    assert planned(engine="llmopt").efficiency.bandwidth == 0.8
    for plan in (planned(engine="vllm"), planned("h200", engine="llmopt"), planned()):
        assert plan.efficiency.bandwidth == fitted.efficiency.bandwidth != 0.8


def test_the_command_prints_findings_and_record_and_ends_with_1_where_something_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made: list[Any] = []

    def check_gpu(output: Path | None, say: Any) -> Any:
        made.append(output)
        say("machine: a finding")
        return record_of()

    monkeypatch.setattr(run, "check_gpu", check_gpu)
    assert code_of("doctor", "--gpu", "--json", "-o", str(tmp_path / "a.json")) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == record_of() and made == [tmp_path / "a.json"]
    failed = "llama-bf16: FAILED: prefill: 400 ms (expected: 300 ms)"
    assert shown.err == f"machine: a finding\n{failed}\n1 failures; {tmp_path / 'a.json'}\n"
    monkeypatch.setattr(run, "check_gpu", lambda *_: record_of(stages=[]))
    assert code_of("doctor", "--gpu") == 0
    assert capsys.readouterr().out == "0 failures\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--gpu", "--all"), "--gpu is a run of its own: leave out --all"),
        (("--gpu", "--no-self-test"), "--gpu is a run of its own"),
        (("-o", "gpu.json"), "--output is where --gpu writes its record: add --gpu"),
        (("--gpu", "-o", "/dev/null/a.json"), "cannot write in"),
    ],
)
def test_a_wrong_option_is_one_line(words: Any, complaint: str, capsys: Any) -> None:
    assert code_of("doctor", *words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and complaint in said and said.count("\n") == 1
