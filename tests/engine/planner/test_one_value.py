"""One prediction for one load: in the table, the JSON, under an SLO, and for every way to tell the load."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.engine.planner.error_bands import Likeness, error_band

from ...support.plan_command import answer, call

EIGHT = ("llama-3.1-8b", "--gpu", "h100", "--tp", "1")
FIXED = ("--input-len", "1024", "--output-len", "128")


def times(plan: dict[str, Any]) -> list[float]:
    return [plan["ttft_ms"], plan["tpot_ms"], plan["throughput_tokens_per_s"]]


def test_a_closed_loop_has_one_value_however_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    clients = ("--concurrency", "32")
    by_context = answer(capsys, *EIGHT, "--ctx", "1152", "--output-tokens", "128", *clients)
    by_lengths = answer(capsys, *EIGHT, *FIXED, *clients)
    assert times(by_context) == pytest.approx(times(by_lengths), rel=1e-4)
    for plan in (by_context, by_lengths):
        predicted = plan["predicted"]
        assert predicted == plan["loaded"] == plan["gpus"][0]["predicted"]
        named = [predicted[name] for name in ("ttft_ms", "tpot_ms", "throughput_tokens_per_s")]
        assert times(plan) == named
    load = by_lengths["load"]
    means = [load["ttft_ms"]["mean"], load["tpot_ms"]["mean"], load["output_tokens_per_s"]]
    assert times(by_lengths) == pytest.approx(means, rel=1e-4)
    assert call(*EIGHT, *FIXED, *clients) == 0
    words = " ".join(capsys.readouterr().out.split())
    ttft, tpot, rate = times(by_lengths)
    assert f"TTFT {ttft / 1e3:.3g} s, TPOT {tpot:.3g} ms, {rate:,.0f} tokens/s" in words


def test_what_an_idle_engine_takes_is_called_idle(capsys: pytest.CaptureFixture[str]) -> None:
    plan = answer(capsys, *EIGHT, "--ctx", "2k", "--concurrency", "64")
    assert plan["idle_step_ms"] < plan["tpot_ms"]
    operators = sum(operator["ms"] for operator in plan["operators"])
    assert operators == pytest.approx(plan["idle_step_ms"], rel=1e-3)


@pytest.mark.parametrize("by", ["concurrency", "rate"])
def test_a_load_within_an_slo_has_the_band_of_its_own_clients(
    by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slo = ("--slo", "ttft:2s tpot:40ms", "--slo-by", by)
    plan = answer(capsys, *EIGHT, *FIXED, *slo)
    predicted = plan["predicted"]
    assert predicted["clients"] > 64
    alone = answer(capsys, *EIGHT, *FIXED, "--concurrency", "1")["predicted"]
    assert predicted["error"] != alone["error"]
    if by == "concurrency":
        told = answer(capsys, *EIGHT, *FIXED, "--concurrency", str(plan["load"]["concurrency"]))
        assert times(plan) == pytest.approx(times(told), rel=1e-3)
        assert predicted["error"] == told["predicted"]["error"]


def test_a_rate_beyond_the_capacity_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    plan = answer(capsys, *EIGHT, *FIXED, "--request-rate", "500")
    load = plan["load"]
    assert load["requests_per_s"] + load["queue_growth_requests_per_s"] == pytest.approx(500)
    assert plan["throughput_tokens_per_s"] == pytest.approx(128 * load["requests_per_s"], rel=1e-3)
    assert plan["ttft_ms"] is load["ttft_ms"]["mean"] is load["e2e_ms"]["p99"] is None
    assert call(*EIGHT, *FIXED, "--request-rate", "500") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "500 requests/s are not kept:" in words and "the queue grows by" in words
    assert "TTFT without end" in words
    kept = answer(capsys, *EIGHT, *FIXED, "--request-rate", "2")
    assert (kept["load"]["requests_per_s"], kept["load"]["queue_growth_requests_per_s"]) == (2, 0)


def test_stages_of_a_pipeline_compute_at_the_same_time(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("llama-70b", "--gpu", "h100", "--weights", "fp8", "--concurrency", "256")
    piped = answer(capsys, *base, "--tp", "1", "--pp", "4", "--ctx", "2k")
    # A token passes all stages with a quarter of the sequences.
    quarter = answer(capsys, *base[:-1], "64", "--tp", "1", "--pp", "4", "--ctx", "2k")
    assert piped["throughput_tokens_per_s"] > 2 * quarter["throughput_tokens_per_s"]
    loaded = answer(
        capsys, *base, "--tp", "1", "--pp", "4", "--input-len", "1536", "--output-len", "512"
    )
    assert times(piped) == pytest.approx(times(loaded), rel=1e-3)


def test_an_unlikely_deployment_has_a_derived_band() -> None:
    """Rows of an engine or a GPU generation that the fit had none of, not a factor that rests on nothing."""
    like = Likeness("llmopt", "other", "model not measured", "dense", "small batch")
    band = error_band(like)
    assert band is not None and not band.is_near and band.num_rows == 0
    assert band.tpot[0] < 1 < band.tpot[1] and "left out of the fit" in band.alike
