"""Loads that were measured, with their source, and what a plan says of them."""

from __future__ import annotations

import pytest

from ...support.plan_command import answer

GPT_OSS = ("gpt-oss-120b", "--gpu", "b200", "--engine", "vllm")
LLAMA = ("llama-8b", "--gpu", "a100-40gb-sxm", "--engine", "vllm", "--engine-version", "0.7.3")


def test_gpt_oss_on_a_b200_is_near_its_measured_time(capsys: pytest.CaptureFixture[str]) -> None:
    """10.50 ms a token for 64 clients by vLLM 0.15.1 (aiconfigurator-core 0.12.0, silicon_sample.csv)."""
    load = ("--concurrency", "64", "--input-len", "1024", "--output-len", "1024")
    predicted = answer(capsys, *GPT_OSS, "--engine-version", "0.15.1", *load)["predicted"]
    low, high = predicted["error"]["tpot"]
    assert low * predicted["tpot_ms"] < 10.50 < high * predicted["tpot_ms"] < 2 * 10.50
    unknown = answer(capsys, *GPT_OSS, *load)["predicted"]
    assert unknown["tpot_ms"] == pytest.approx(predicted["tpot_ms"], rel=0.05)


@pytest.mark.parametrize(("weights", "measured"), [("bf16", 491.9), ("int4", 813.5)])
def test_formats_with_eight_clients_are_near_the_measured_ones(
    capsys: pytest.CaptureFixture[str], weights: str, measured: float
) -> None:
    """Tokens per second of Llama-3.1-8B on an A100 40GB (FreedomIntelligence/AccelMark@5797fc4, closed loop)."""
    load = ("--concurrency", "8", "--input-len", "282", "--output-len", "355", "--tp", "1")
    predicted = answer(capsys, *LLAMA, "--weights", weights, *load)["predicted"]
    assert predicted["throughput_tokens_per_s"] == pytest.approx(measured, rel=0.1)


def test_a_card_that_was_measured_has_a_band_of_its_generation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows of an A100 are fitted ones, so the band is that of models which were left out of the fit."""
    load = ("--concurrency", "8", "--input-len", "282", "--output-len", "355", "--tp", "1")
    error = answer(capsys, *LLAMA, *load)["predicted"]["error"]
    assert error["rows"] > 20
    assert "ampere" in error["note"]


@pytest.mark.parametrize(("stages", "places", "measured"), [(1, 135, 1724), (2, 398, 2 * 1901)])
def test_a_pipeline_is_near_its_measured_throughput(
    capsys: pytest.CaptureFixture[str], stages: int, places: int, measured: float
) -> None:
    """Tokens per second of Llama-3.3-70B in NVFP4 on one and two RTX PRO 6000 with every place taken
    (NVIDIA/TensorRT-LLM@03e27c7, docs/source/developer-guide/perf-overview.md, 1,000 tokens in and out)."""
    model = ("llama-3.3-70b", "--weights", "nvfp4", "--kv-dtype", "fp8", "--engine", "trtllm")
    split = ("--gpu", "rtx-pro-6000", "--tp", "1", "--pp", str(stages))
    load = ("--ctx", "2000", "--output-tokens", "1000", "--concurrency", str(places))
    predicted = answer(capsys, *model, *split, *load)["predicted"]
    together = predicted["throughput_tokens_per_s"]
    low, high = predicted["error"]["throughput"]
    assert low * together < measured < high * together
    assert together == pytest.approx(measured, rel=0.1)
