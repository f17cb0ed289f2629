"""`llmopt kv-plan`'s first screen: engines side by side, fit and what would, users, cost, names."""

from __future__ import annotations

import re
import shlex

import pytest

from ...support.plan_command import answer, call

GIB = 2**30


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert call(*arguments) == 0
    return " ".join(capsys.readouterr().out.split())


def test_vllm_stands_beside_our_engine(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("gemma-3-27b", "--ctx", "128k", "--gpu", "h200")
    words = shown(capsys, *model)
    assert "14.23 GiB in vllm, 62.00 GiB in llmopt" in words
    assert "KV per sequence 62" not in words
    found = answer(capsys, *model)
    (gpu,) = found["gpus"]
    assert (gpu["engine"], gpu["beside"]["engine"]) == ("vllm", "llmopt")
    assert gpu["kv_bytes_per_rank"] / GIB == pytest.approx(14.226, abs=0.01)
    assert gpu["beside"]["kv_bytes_per_rank"] / GIB == 62 / gpu["beside"]["tp"]
    # Each has a speed, and the one that was measured on such GPUs a band.
    assert gpu["loaded"]["error"]["rows"] > 0 == gpu["beside"]["loaded"]["error"]["rows"]
    assert gpu["beside"]["loaded"]["tpot_ms"] > 0


def test_one_engine_is_planned_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ("llmopt", "vllm", "sglang", "trtllm", "llama.cpp"):
        found = answer(capsys, "llama-8b", "--gpu", "h100", "--ctx", "8k", "--engine", engine)
        assert (found["engine"], found["beside"]) == (engine, None)
    assert found["kv_dtype"] == "f16"


def test_servers_with_bands_have_speeds_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("llama-70b", "--gpu", "h100", "--tp", "4", "--ctx", "8k", "--weights", "fp8")
    plans = [answer(capsys, *model, "--engine", name) for name in ("vllm", "sglang", "trtllm")]
    assert len({plan["loaded"]["tpot_ms"] for plan in plans}) == 3
    assert len({plan["max_concurrent_sequences"] for plan in plans}) == 1
    assert all(plan["loaded"]["error"]["rows"] >= 20 for plan in plans)


def test_the_first_lines_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = shown(capsys, "llama-70b", "--ctx", "8k", "--gpu", "h100", "--concurrency", "8")
    fit = "fits yes: 8 sequences of 8k tokens (prompt 6k, answer 2k) in vllm on 4 x H100"
    assert words.startswith(fit)
    for part in ("at once, then TTFT", "with 8 clients measured was", "per million output tokens"):
        assert part in words
    assert "at $2.95 an hour (aimultiple" in words and "2026-05)" in words
    assert re.search(r"cheaper --(gpu|weights) \S+: \d+% less with 8 clients", words)
    assert re.search(r"limit kv cache; decode is bound by bandwidth; --\S+ \S+ brings", words)
    mine = shown(capsys, "llama-70b", "--ctx", "8k", "--gpu", "h100", "--gpu-hour-price", "2")
    assert "at $2 an hour (--gpu-hour-price)" in mine


def test_a_million_tokens_cost_what_the_gpus_do(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "llama-8b", "--ctx", "4k", "--gpu", "h100", "--concurrency", "16")
    dollars = 2.95 / 3600 / found["throughput_tokens_per_s"] * 1e6
    assert found["dollars_per_million_output_tokens"] == pytest.approx(dollars, rel=1e-4)
    assert found["gpu_hour_price"]["date"] == "2026-05"
    full = found["answer"]["full"]
    assert full["clients"] == found["max_concurrent_sequences"]
    assert full["dollars_per_million_output_tokens"] < dollars
    unpriced = answer(capsys, "llama-8b", "--ctx", "4k", "--gpu", "l40s")
    assert unpriced["dollars_per_million_output_tokens"] is None


def test_users_within_the_slo_are_on_the_first_screen(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--input-len", "512", "--output-len", "64", "--slo", "ttft:1s tpot:30ms")
    words = shown(capsys, "llama-8b", "--gpu", "h100", "--tp", "1", *load)
    found = answer(capsys, "llama-8b", "--gpu", "h100", "--tp", "1", *load)
    best = found["load"]["slo"]["best"]
    assert best == found["answer"]["highest_load_within_slo"]
    assert f"users {best} clients keep ttft:1000ms tpot:30ms on 1 x H100 SXM" in words


@pytest.mark.parametrize(
    "asked",
    [
        ("llama-70b", "--ctx", "128k", "--gpu", "h100", "--tp", "2"),
        ("llama-70b", "--ctx", "128k", "--gpu", "h100"),
        ("gemma-3-27b", "--ctx", "128k", "--gpu", "h100", "--tp", "1"),
        ("llama-8b", "--ctx", "32k", "--gpu", "rtx-4090", "--tp", "1", "--concurrency", "4"),
        ("qwen3-32b", "--gpu", "l40s", "--tp", "1", "--engine", "llmopt"),
        ("llama-8b", "--gpu-memory", "12GiB", "--tp", "1"),
    ],
    ids=" ".join,
)
def test_what_would_fit_fits(asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Every offered line, all of its options together, is a plan that fits on so many devices."""
    found = answer(capsys, *asked)
    words = shown(capsys, *asked)
    assert found["answer"]["would_fit"]
    for change in found["answer"]["would_fit"]:
        options = shlex.split(" ".join(change["options"]))
        assert f"{change['gpus']} x {change['gpu']}: {' '.join(change['options'])}" in words
        kept = _without(asked, options)
        then = answer(capsys, *kept, *options)
        assert then["fits"]
        assert then["tp"] * then["pp"] == change["gpus"]
        assert then["max_concurrent_sequences"] == change["sequences"]


def _without(asked: tuple[str, ...], options: list[str]) -> list[str]:
    """The arguments without those options that are given anew."""
    kept, skip = [], False
    for word in asked:
        if skip:
            skip = False
        elif word.startswith("--") and word in options:
            skip = True
        else:
            kept.append(word)
    return kept


def test_no_option_is_offered_that_is_not_needed(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "gemma-3-27b", "--ctx", "128k", "--gpu", "h100", "--tp", "1")
    (change,) = found["answer"]["would_fit"]
    assert len(change["options"]) == 1
    shorter = answer(capsys, "llama-70b", "--ctx", "128k", "--gpu", "h100", "--tp", "2")
    assert any("--ctx" in " ".join(one["options"]) for one in shorter["answer"]["would_fit"])


def test_the_model_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    named = answer(capsys, "llama-8b", "--ctx", "4k")
    assert named == answer(capsys, "--model", "llama-8b", "--ctx", "4k")
    assert call("llama-8b", "--model", "llama-70b") == 2
    assert "two models" in capsys.readouterr().err


def test_gpus_have_commas_and_the_names_that_people_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer(capsys, "llama-8b", "--ctx", "4k", "--gpu", "h100, NVIDIA H200", "--gpu", "4090")
    assert [gpu["gpu"] for gpu in found["gpus"]] == ["H100 SXM", "H200 SXM", "RTX 4090"]
    for name in ("H100 SXM5 80GB", "nvidia-h100", "h100-80gb", "H100_SXM"):
        assert answer(capsys, "llama-8b", "--gpu", name, "--ctx", "4k")["gpu"] == "H100 SXM"
    assert call("llama-8b", "--gpu", "h100,h210") == 2
    assert "H200 SXM" in capsys.readouterr().err


def test_the_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    words = shown(capsys, "--list")
    for name in ("qwen3-235b-a22b", "llama-70b (llama-3.1-70b)", "RTX 4090"):
        assert name in words
    found = answer(capsys, "--list")
    assert "gpt-oss-120b" in found["models"] and "H100 SXM" in found["gpus"]


def test_the_nearest_engine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("llama-8b", "--engine", "vlm") == 2
    assert "the nearest is vllm" in capsys.readouterr().err


def test_a_prefix_hit_rate_counts_without_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("llama-8b", "--ctx", "8k", "--gpu", "h100", "--concurrency", "32")
    cold = answer(capsys, *load)
    warm = answer(capsys, *load, "--prefix-hit-rate", "0.8")
    assert cold["load"] is None is warm["load"]
    assert warm["loaded"]["ttft_ms"] < 0.6 * cold["loaded"]["ttft_ms"]
    assert warm["ttft_ms"] < 0.6 * cold["ttft_ms"]
    # Decode steps wait for fewer prompt tokens, and read as much of the cache.
    assert warm["loaded"]["tpot_ms"] < cold["loaded"]["tpot_ms"]
    assert warm["idle_step_ms"] == cold["idle_step_ms"]
    assert warm["idle_prefill_ms"] < 0.6 * cold["idle_prefill_ms"]
    assert warm["throughput_tokens_per_s"] > cold["throughput_tokens_per_s"]
    assert warm["dollars_per_million_output_tokens"] < cold["dollars_per_million_output_tokens"]


@pytest.mark.parametrize("load", [(), ("--input-len", "1024", "--output-len", "128")])
def test_draft_tokens_count_under_load(
    load: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("llama-8b", "--gpu", "h100", "--concurrency", "4", *(load or ("--ctx", "4k")))
    plain = answer(capsys, *base)
    draft = answer(capsys, *base, "--draft-tokens", "4", "--acceptance", "0.8")
    gain = draft["speculation"]["speedup"]
    assert gain > 1.5
    faster = draft["throughput_tokens_per_s"] / plain["throughput_tokens_per_s"]
    assert 1.2 < faster < 1.1 * gain
    ratio = plain["loaded"]["tpot_ms"] / draft["loaded"]["tpot_ms"]
    assert 1.2 < ratio < 1.1 * gain
    useless = answer(capsys, *base, "--draft-tokens", "4", "--acceptance", "0")
    assert useless["throughput_tokens_per_s"] < plain["throughput_tokens_per_s"]


def test_a_measured_acceptance_length_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens of a step that `bench` measures stand for the acceptance of each draft token."""
    base = ("llama-8b", "--gpu", "h100", "--ctx", "4k")
    draft = ("--draft-tokens", "4")
    gains = [
        answer(capsys, *base, *draft, *words)["speculation"]
        for words in (("--acceptance", "0.8"), ("--acceptance-length", "3.3616"))
    ]
    assert gains[0] == pytest.approx(gains[1], rel=1e-3)
    for length in ("1", "5"):
        gain = answer(capsys, *base, *draft, "--acceptance-length", length)["speculation"]
        assert gain["expected_tokens"] == pytest.approx(float(length), abs=1e-3)
    for words in ((*draft, "--acceptance-length", "5.1"), ("--acceptance-length", "2")):
        assert call(*base, *words) == 2
        assert "--acceptance-length" in capsys.readouterr().err


def test_the_duty_cycle_counts_with_a_published_price(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("llama-8b", "--gpu", "h100", "--ctx", "8k")
    dollars = [
        answer(capsys, *model, *busy)["dollars_per_million_output_tokens"]
        for busy in ((), ("--duty-cycle", "0.5"))
    ]
    assert dollars[1] == pytest.approx(2 * dollars[0], abs=1e-5)
    assert "2026-05), 50% busy" in shown(capsys, *model, "--duty-cycle", "0.5")


def test_many_clients_are_counted_in_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--input-len", "8", "--output-len", "8", "--max-num-seqs", "12345", "--tp", "1")
    words = shown(capsys, "llama-3.2-1b", "--gpu", "b200", *options, "--slo", "ttft:1000000s")
    assert "12,345 clients keep ttft:1000000000ms" in words and "e+0" not in words
