"""Weight formats at one load, and the load of the request next to the highest one within limits."""

from __future__ import annotations

import pytest

from ...support.plan_command import answer, call

LLAMA = ("llama-8b", "--gpu", "h100", "--tp", "1")


def test_four_bits_win_for_few_clients_and_lose_to_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Measured on an H100: 813 (W4A16) against 492 (bf16) tokens/s with 8 clients, 3,156 against 5,052 with
    maximum load (the project's field rows of Llama-3.1-8B)."""
    found = answer(capsys, *LLAMA, "--ctx", "1k", "--concurrency", "8")
    formats = {entry["weights"]: entry for entry in found["answer"]["formats"]}
    assert set(formats) == {"bf16", "fp8", "int4"}
    plain, four = formats["bf16"], formats["int4"]
    assert four["tokens_per_second"] > 1.3 * plain["tokens_per_second"]
    assert four["tokens_per_second_full"] < plain["tokens_per_second_full"]
    assert plain["clients"] == 8 < plain["places"] < four["places"]
    assert plain["tokens_per_second"] == pytest.approx(found["throughput_tokens_per_s"], rel=1e-3)


def test_formats_that_do_not_fit_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "gpt-oss-120b", "--gpu", "h100", "--ctx", "8k")
    assert "bf16" not in {entry["weights"] for entry in found["answer"]["formats"]}
    memory = answer(capsys, "llama-8b", "--gpu-memory", "80GiB", "--ctx", "8k")
    assert "formats" not in memory["answer"]


def test_lengths_and_prefix_are_those_of_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--dataset", "sharegpt", "--request-rate", "1", "--prefix-hit-rate", "0.5")
    found = answer(capsys, *LLAMA, "--ctx", "32k", *load)["answer"]["formats"]
    assert {entry["weights"] for entry in found} == {"bf16", "fp8", "int4"}


def test_the_clients_of_the_request_stand_next_to_the_highest_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ("--input-len", "512", "--output-len", "32", "--slo", "ttft:200ms")
    found = answer(capsys, *LLAMA, *load, "--concurrency", "20")["answer"]
    asked = found["requested_load"]
    assert asked["concurrency"] == 20
    assert 0 < asked["ttft_ms"]["mean"] < asked["ttft_ms"]["p99"]
    assert (asked["share_within_slo"] >= 0.95) == (found["highest_load_within_slo"] >= 20)
    assert call(*LLAMA, *load, "--concurrency", "20") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"20 clients: TTFT {asked['ttft_ms']['mean'] / 1e3:.3g} s" in words
    assert "of their requests keep the limits" in words
    alone = answer(capsys, *LLAMA, *load)["answer"]
    assert "requested_load" not in alone
