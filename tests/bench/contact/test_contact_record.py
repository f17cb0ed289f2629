"""A contact's record in use: `llmopt contact`, `kv-plan --measured`, `doctor --contact`, and records sent in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.contact import run
from llmopt.bench.contact.record import WHOLE, new_record
from llmopt.cli.main import main
from llmopt.engine.config.plan_options import PlanRequest
from llmopt.engine.planner import own_runs
from llmopt.engine.planner.plan_request import plan_for

SHARES = {
    "bf16": {"decode": 0.8, "prefill": 0.6},
    "int4 g128 sym": {"decode": 0.5, "prefill": 0.4},
}


def record_of(gpu: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> dict[str, Any]:
    record = new_record(
        {"machine": f"a CPU, {gpu}", "gpu": {"name": gpu}}, "2026-11-26", small=False
    )
    row = {"what": "prefill", "expected": "300 ms", "seen": "400 ms", "met": False, "numbers": {}}
    stage = {"name": "llama-8b", "ended": WHOLE, "seconds": 60.0, "findings": [row]}
    roofs = {"bandwidth": 3e12, "flops": 8e14}
    return record | {"roofs": roofs, "shares": SHARES, "stages": [stage]} | changes


@pytest.fixture
def contact_json(tmp_path: Path) -> Path:
    path = tmp_path / "contact.json"
    path.write_text(json.dumps(record_of()))
    return path


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return int(ended.value.code or 0)


def planned(gpu: str = "h100", **options: Any) -> Any:
    return plan_for(PlanRequest("llama-3.1-8b", gpus=(gpu,), context="4k", **options))


def test_a_plan_takes_the_roofs_and_the_shares_of_its_weights(contact_json: Path) -> None:
    plain = planned(measured=contact_json)
    assert (plain.efficiency.bandwidth, plain.efficiency.compute) == (0.8, 0.6)
    device = plain.devices[0].device
    assert (device.bandwidth, device.peaks["bf16"]) == (3e12, 8e14)
    assert device.peaks["fp8"] > 1e15, "a dtype that was not measured stays the data sheet's"
    assert str(contact_json) in plain.efficiency.source
    four_bits = planned(measured=contact_json, weights="int4")
    assert four_bits.efficiency.bandwidth == 0.5
    other = planned("a100-80gb-sxm", measured=contact_json)
    assert other.devices[0].device.bandwidth == pytest.approx(2.039e12, rel=0.01)


def test_a_record_without_a_model_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "contact.json"
    path.write_text(json.dumps(record_of(shares={})))
    words = ("kv-plan", "llama-8b", "--gpu", "h100", "--measured", str(path))
    assert code_of(*words) == 2
    assert "measured no model: run llmopt contact again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"small": True}, "is of small shapes"),
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
    path = tmp_path / "contact.json"
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
    (folder / "contact.json").write_text(json.dumps(record_of()))
    monkeypatch.setattr(own_runs, "RECORDS", tmp_path)
    assert planned(engine="llmopt").efficiency.bandwidth == 0.8
    for plan in (planned(engine="vllm"), planned("h200", engine="llmopt"), planned()):
        assert plan.efficiency.bandwidth == fitted.efficiency.bandwidth != 0.8


def test_doctor_shows_what_a_contact_found(contact_json: Path, capsys: Any) -> None:
    assert code_of("doctor", "--contact", str(contact_json)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "contact: 0 of 1 expectations held on 2026-11-26" in shown
    assert "failed: llama-8b: prefill: expected 300 ms, seen 400 ms" in shown
    contact_json.write_text("{}")
    assert code_of("doctor", "--contact", str(contact_json)) == 2
    assert "is no record of llmopt contact" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--device", "tpu"), "--device tpu: cuda or cpu"),
        (("-o", "page.md"), "--output page.md: the record is JSON"),
        (("--stages", "tiles"), "--stages tiles: choose of machine, kernels"),
        (("--stages", ","), "--stages ',': name a stage, or leave the option out"),
        (("-o", "/dev/null/a.json"), "--output /dev/null/a.json: cannot write in"),
    ],
)
def test_a_wrong_option_is_one_line(words: Any, complaint: str, capsys: Any) -> None:
    assert code_of("contact", *words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and complaint in said and said.count("\n") == 1


def test_the_command_prints_the_record_and_ends_with_1_where_something_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made: list[Any] = []

    def contact(request: Any, say: Any) -> tuple[Path, Any]:
        made.append(request)
        return tmp_path / "a.json", record_of()

    monkeypatch.setattr(run, "contact", contact)
    assert code_of("contact", "--json", "--small", "--stages", "kernels, graphs") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == record_of() and "1 failures" in shown.err
    assert (made[0].stages, made[0].small) == (("kernels", "graphs"), True)
