"""`llmopt kv-plan` under load: simulated latencies, the highest load within an SLO, parallel sizes, errors."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.engine.planner import simulation

from ...support.plan_command import answer, call

EIGHT = ("--model", "llama-3.1-8b", "--gpu", "h100")
FIXED = ("--input-len", "1024", "--output-len", "128")


def test_a_closed_loop_is_simulated_where_lengths_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = answer(capsys, *EIGHT, "--ctx", "4k", "--concurrency", "32")
    assert plain["load"] is None
    # Prefill takes its share: what is served is less than what decoding alone would give.
    assert 0 < plain["throughput_tokens_per_s"] < plain["throughput_bound_tokens_per_s"]
    found = answer(capsys, *EIGHT, *FIXED, "--concurrency", "32")
    load = found["load"]
    assert found["context"] == 1152
    assert (load["concurrency"], load["request_rate"], load["num_requests"]) == (32, None, 1000)
    assert found["throughput_tokens_per_s"] == load["output_tokens_per_s"]
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert 0 < load[name]["p50"] <= load[name]["p90"] <= load[name]["p99"]
    # Little's law: 32 requests are in flight.
    in_flight = load["requests_per_s"] * load["e2e_ms"]["mean"] / 1e3
    assert in_flight == pytest.approx(32, rel=0.01)


def test_a_load_above_what_fits_says_how_many_are_served_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ("--model", "llama-3.1-8b", "--gpu", "l4", *FIXED, "--concurrency", "300")
    places = answer(capsys, *load)["max_concurrent_sequences"]
    assert call(*load) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"not at once: {places:,} of 300 sequences" in said and "others wait" in said


@pytest.mark.parametrize(("prompt", "output"), [("1024", "256"), ("100000", "100000")])
def test_steps_that_only_grow_are_taken_together(
    prompt: str,
    output: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work is that of the requests: a few looks at each, however many tokens it has."""
    run, looked_at, steps = simulation.Simulation.run, [], []

    def counted(simulated: simulation.Simulation, *arguments: Any) -> None:
        run(simulated, *arguments)
        looked_at.append(simulated.num_looked_at)
        steps.append(simulated.num_steps)

    monkeypatch.setattr(simulation.Simulation, "run", counted)
    lengths = ("--input-len", prompt, "--output-len", output)
    answer(capsys, "llama-3.1-8b", "--gpu", "b200", *lengths, "--concurrency", "64")
    chunks = -(-int(prompt) // 8192)
    assert 0 < sum(looked_at) < 1200 * (chunks + 2) and sum(steps) > 3000


def test_a_rate_arrives_and_hits_the_prefix_cache(capsys: pytest.CaptureFixture[str]) -> None:
    load = (*EIGHT, "--input-len", "1024", "--output-len", "64", "--request-rate", "4")
    cold = answer(capsys, *load)
    warm = answer(capsys, *load, "--prefix-hit-rate", "0.8")
    assert cold["load"]["requests_per_s"] == 4
    assert warm["load"]["ttft_ms"]["mean"] < 0.8 * cold["load"]["ttft_ms"]["mean"]
    assert (warm["load"]["prefix_hit_rate"], warm["load"]["concurrency"]) == (0.8, None)


@pytest.mark.parametrize("by", ["concurrency", "rate"])
def test_the_highest_load_keeps_the_slo(capsys: pytest.CaptureFixture[str], by: str) -> None:
    slo = ("--slo", "ttft:1s tpot:20ms", "--slo-by", by)
    found = answer(capsys, *EIGHT, *FIXED, "--tp", "1", *slo)
    assert found["slo"] == {"limits_ms": {"ttft": 1000, "tpot": 20}, "share": 0.95, "by": by}
    load = found["load"]
    best, failed = load["slo"]["best"], load["slo"]["lowest_failed"]
    assert best == load["concurrency" if by == "concurrency" else "request_rate"]
    assert best < failed <= 1.06 * best + 1
    assert load["ttft_ms"]["p90"] <= 1000
    assert load["tpot_ms"]["p90"] <= 20
    tighter = answer(capsys, *EIGHT, *FIXED, "--tp", "1", "--slo", "tpot:15", "--slo-by", by)
    assert tighter["load"]["slo"]["best"] < best


def test_an_slo_that_nothing_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *EIGHT, *FIXED, "--slo", "tpot:10us")
    assert found["load"]["slo"] == {"best": None, "lowest_failed": 1}
    assert call(*EIGHT, *FIXED, "--slo", "tpot:10us") == 0
    assert "< 1" in capsys.readouterr().out


def test_gpus_are_ranked_by_cost_at_the_slo(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", "llama-3.1-8b", "--tp", "1", "--slo", "ttft:1s tpot:40ms")
    options += ("--input-len", "512", "--output-len", "32")
    found = answer(capsys, *options, "--gpu", "all")["gpus"]
    assert len(found) > 15
    served = [gpu for gpu in found if gpu["load"]]
    kept = [gpu["load"]["slo"]["best"] is not None for gpu in served]
    assert kept == sorted(kept, reverse=True)
    within = [gpu for gpu, keeps in zip(served, kept, strict=True) if keeps]
    dollars = [gpu["dollars_per_million_output_tokens"] for gpu in within]
    priced = [price for price in dollars if price is not None]
    # Those without a published price come last, by their GPU hours.
    assert dollars[: len(priced)] == sorted(priced)
    hours = [gpu["load"]["gpu_hours_per_million_output_tokens"] for gpu in within]
    assert len(priced) > 5 and hours[len(priced) :] == sorted(hours[len(priced) :])
    for gpu, price in zip(within, priced, strict=False):
        spent = gpu["load"]["gpu_hours_per_million_output_tokens"]
        assert price == pytest.approx(spent * gpu["gpu_hour_price"]["dollars"], rel=1e-4)


def test_the_table_names_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--slo", "ttft:1s tpot:30ms", "--gpu-hour-price", "2")
    assert call("--model", "qwen3-30b-a3b", "--gpu", "h100", *FIXED, *options) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "clients p50 / p99 p50 / p99" in words
    assert "requests of 1,024 + 128 tokens" in words
    assert "95% of the requests keep ttft:1000ms tpot:30ms" in words.replace("of which ", "")


def test_experts_and_attention_are_divided(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "qwen3-30b-a3b", "--gpu", "h100", "--ctx", "8k")
    by_tensor = answer(capsys, *model, "--tp", "4")
    by_expert = answer(capsys, *model, "--tp", "4", "--ep", "4")
    assert by_expert["ep"] == 4
    assert by_expert["weight_bytes_per_rank"] == by_tensor["weight_bytes_per_rank"]
    by_rank = answer(capsys, *model, "--tp", "1", "--ep", "4", "--attention-dp", "4")
    # Attention and embedding are whole on every rank, and each rank caches its own sequences.
    assert by_rank["weight_bytes_per_rank"] > by_tensor["weight_bytes_per_rank"]
    assert (by_rank["tp"], by_rank["attention_dp"]) == (1, 4)
    alone = answer(capsys, *model, "--tp", "1")
    assert by_rank["weight_bytes_per_rank"] < alone["weight_bytes_per_rank"] / 2
    per_rank = 2 * 48 * 4 * 128 * 2 * 8192
    budget = by_rank["kv_budget_bytes_per_rank"]
    assert by_rank["max_concurrent_sequences"] == 4 * (budget // per_rank)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h1000"], "H100 SXM"),
        (["--model", "lama-3.1-8b"], "llama-3.1-8b"),
        (["--tp", "3"], "such as 2 or 4"),
        (["--ep", "2"], "has no experts"),
        (["--model", "qwen3-30b-a3b", "--tp", "4", "--ep", "3"], "choose 2 or 4"),
        (["--attention-dp", "0"], "--attention-dp 0"),
        ([*FIXED, "--slo", "ttft:fast"], "--slo 'ttft:fast'"),
        ([*FIXED, "--slo", " "], "--slo names no limit"),
        ([*FIXED, "--slo", "ttft:1s", "--slo-by", "users"], "rate or concurrency"),
        ([*FIXED, "--slo", "ttft:1s", "--slo-share", "2"], "--slo-share 2.0"),
        (["--request-rate", "4"], "a load needs lengths"),
        (["--input-len", "100"], "give --output-len too"),
        (["--dataset", "azur"], "azure"),
        ([*FIXED, "--dataset", "azure"], "leave out --input-len"),
        ([*FIXED, "--ctx", "1k"], "the longest request has 1152 tokens"),
        ([*FIXED, "--prefix-hit-rate", "1.5"], "--prefix-hit-rate 1.5"),
        ([*FIXED, "--request-rate", "-1"], "--request-rate -1.0"),
    ],
)
def test_errors_say_what_to_do(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert call("--model", "llama-3.1-8b", *options) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
