"""The fewest GPUs for a rate: replicas, divisions, the number of simulations, and what is refused."""

from __future__ import annotations

import pytest
from llmopt.engine.planner import load_plan
from llmopt.engine.planner.load_plan import SIMULATED_KINDS, SIMULATIONS

from ...support.plan_command import answer, call

LOAD = ("--input-len", "256", "--output-len", "16", "--slo", "ttft:1s tpot:30ms")


def test_replicas_share_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    few, many = (
        answer(capsys, "llama-8b", "--gpu", "h100", *LOAD, "--target-request-rate", rate)
        for rate in ("2", "200")
    )
    (one,), (fleet,) = few["fleets"], many["fleets"]
    assert (one["gpus"], one["replicas"], one["tp"], one["is_simulated"]) == (1, 1, 1, True)
    assert fleet["gpus"] == fleet["replicas"] * fleet["tp"] >= 2
    assert fleet["dollars_per_hour"] == pytest.approx(2.95 * fleet["gpus"])
    assert many["load"]["request_rate"] == pytest.approx(200 / fleet["replicas"])
    assert (many["tp"], many["beside"]) == (fleet["tp"], None)
    assert many["load"]["tpot_ms"]["mean"] < 30


def test_all_gpus_are_ranked_by_their_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    real = load_plan.LoadPlanner.at_rate
    monkeypatch.setattr(
        load_plan.LoadPlanner,
        "at_rate",
        lambda *arguments: loads.append(arguments) or real(*arguments),
    )
    question = ("llama-8b", "--gpu", "all", *LOAD, "--target-request-rate", "100")
    found = answer(capsys, *question)
    fleets = found["fleets"]
    assert len(fleets) > 10
    others = [fleet["gpus"] for fleet in fleets if not fleet["is_simulated"]]
    assert others == sorted(others)
    assert fleets[0]["is_simulated"] and fleets[0]["gpus"] <= others[0]
    assert 1 <= len(loads) <= SIMULATED_KINDS * SIMULATIONS
    assert [gpu["gpu"] for gpu in found["gpus"]] == [fleets[0]["gpu"]]
    assert call(*question) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert words.startswith(f"fleet {fleets[0]['gpus']} x {fleets[0]['gpu']}: ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--target-request-rate", "5"), "--target-request-rate needs limits to keep"),
        (("--target-request-rate", "-1", *LOAD), "--target-request-rate -1: requests"),
        (("--target-request-rate", "5", "--request-rate", "5", *LOAD), "are two rates"),
        (("--target-request-rate", "5", *LOAD[:4], "--slo", "tpot:1us"), "no division of these"),
    ],
)
def test_what_has_no_fleet_is_refused(
    options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("llama-8b", "--gpu", "h100", *options) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
