"""`/metrics`: the numbers against what a client saw, the names, the format, and the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.deploy.deploy_files import DASHBOARD
from prometheus_client.parser import text_string_to_metric_families

from ...support.live_server import RunningServer, make_engine, running
from ...support.simulated_clock import SimulatedClock

Samples = dict[str, float]
PROMPT = "Once upon a time there was a little girl who liked to play outside with her big dog. "
VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "lora_requests_info",
    "cache_config_info",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_prompt_tokens_sum",
    "request_generation_tokens_sum",
    "prompt_tokens_cached_total",
    "request_prefill_kv_computed_tokens_sum",
    "request_max_num_generation_tokens_sum",
    "request_time_per_output_token_seconds_sum",
    "request_params_n_sum",
    "request_params_max_tokens_sum",
    "iteration_tokens_total_sum",
]


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A server whose cache is too small for the concurrent requests."""
    with running(make_engine(num_blocks=24, max_num_seqs=8, block_size=16)) as it:
        yield it


def scrape(server: RunningServer) -> str:
    with server.http() as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return response.text


def samples(text: str) -> Samples:
    """Sums over labels, and `name{label=value}` for each label beside them."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            keys = [f"{sample.name}{{{name}={value}}}" for name, value in sample.labels.items()]
            for key in (sample.name, *keys):
                found[key] = found.get(key, 0.0) + sample.value
    return found


def load(server: RunningServer) -> list[dict[str, float]]:
    """Five streams after each other, as their client saw them."""
    seen = []
    with server.http() as http:
        for index in range(5):
            body = {
                "prompt": PROMPT * 2,
                "max_tokens": 12 + index,
                "ignore_eos": True,
                "stream": True,
            }
            start = time.perf_counter()
            with http.stream("POST", "/v1/completions", json=body) as response:
                stamps = [
                    time.perf_counter() for line in response.iter_lines() if "choices" in line
                ]
            seen.append(
                {"ttft": stamps[0] - start, "all": stamps[-1] - start, "tokens": len(stamps)}
            )
    return seen


EXECUTE_SECONDS = 0.003


def test_the_counters_are_what_the_client_saw(
    small: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, execute = SimulatedClock(), small.engine.runner.execute

    def slow(*arguments: Any, **options: Any) -> Any:
        clock.advance(EXECUTE_SECONDS)
        return execute(*arguments, **options)

    small.wait_until_idle()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(small.engine.runner, "execute", slow)
    before = samples(scrape(small))
    seen = load(small)
    after = samples(scrape(small))

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    num_tokens = sum(one["tokens"] for one in seen)
    assert num_tokens == 70
    for prefix in ("llmopt_", "vllm:"):
        assert grown(f"{prefix}generation_tokens_total") == num_tokens
        assert grown(f"{prefix}request_success_total{{finished_reason=length}}") == 5
        assert grown(f"{prefix}time_to_first_token_seconds_count") == 5
        assert grown(f"{prefix}inter_token_latency_seconds_count") == num_tokens - 5
        assert grown(f"{prefix}request_generation_tokens_sum") == num_tokens
        assert grown(f"{prefix}prompt_tokens_total") == grown(f"{prefix}request_prompt_tokens_sum")
        assert grown(f"{prefix}prefix_cache_hits_total") > 0
        assert after[f"{prefix}num_requests_running"] == 0
    assert grown("llmopt_http_responses_total{status=200}") >= 5
    assert grown("llmopt_steps_total") >= num_tokens
    parts = [
        grown(f"llmopt_step_seconds_total{{part={part}}}")
        for part in ("schedule", "model", "output")
    ]
    assert min(parts) > 0 and parts[1] >= num_tokens * EXECUTE_SECONDS


def test_the_times_add_up_and_lie_within_the_client_s(small: RunningServer) -> None:
    before = samples(scrape(small))
    seen = load(small)
    after = samples(scrape(small))

    def total(name: str) -> float:
        return after[f"llmopt_{name}_sum"] - before[f"llmopt_{name}_sum"]

    # The engine's own clock starts after the request has arrived, and stops before it is delivered.
    ttft = sum(one["ttft"] for one in seen)
    assert 0 < total("time_to_first_token_seconds") < ttft
    whole = sum(one["all"] for one in seen)
    assert 0 < total("e2e_request_latency_seconds") < whole
    parts = [total(f"request_{part}_time_seconds") for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(total("e2e_request_latency_seconds"))
    assert sum(parts[1:]) == pytest.approx(total("request_inference_time_seconds"))
    assert total("inter_token_latency_seconds") == pytest.approx(parts[2])


def test_preemptions_and_ends_are_counted(small: RunningServer) -> None:
    before = samples(scrape(small))
    with small.http() as http:
        body: dict[str, Any] = {
            "prompt": ["a", "b", "c", "d"],
            "max_tokens": 150,
            "ignore_eos": True,
        }
        assert http.post("/v1/completions", json=body).status_code == 200
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
    small.wait_until_idle()
    after = samples(scrape(small))
    assert after["vllm:num_preemptions_total"] > before["vllm:num_preemptions_total"]
    ended = "llmopt_request_success_total{{finished_reason={}}}".format
    assert after[ended("length")] - before[ended("length")] == 4
    assert after[ended("abort")] - before[ended("abort")] == 4
    assert after["llmopt_kv_cache_usage_ratio"] == 0
    assert small.loop.metrics.preemptions
    assert not small.loop.metrics._last_token


def test_names_are_vllm_s_beside_ours(small: RunningServer) -> None:
    names = set(samples(scrape(small)))
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= names
    ours = {
        "llmopt_feature_info{prefix_caching=on}",
        "llmopt_device_info{gpu=none}",
        "llmopt_ready",
        "process_resident_memory_bytes",
    }
    assert ours <= names


def lint(text: str) -> list[str]:
    """Prometheus' rules of naming: promtool's where it is installed, its main ones otherwise."""
    if promtool := shutil.which("promtool"):
        done = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True
        )
        return done.stderr.splitlines()
    found = []
    for family in text_string_to_metric_families(text):
        name = family.name
        if not family.documentation:
            found.append(f"{name} no help text")
        if ":" in name:
            found.append(f"{name} metric names should not contain ':'")
        if family.type != "counter" and name.endswith("_total"):
            found.append(f'{name} non-counter metrics should not have "_total" suffix')
        if re.search(r"_(ms|milliseconds|kb|mb|bucket|count|sum)$", name):
            found.append(f"{name} reserved suffix or no base unit")
    return found


def test_the_text_passes_prometheus_lint(small: RunningServer) -> None:
    lines = scrape(small).splitlines(keepends=True)
    assert lint("".join(line for line in lines if "vllm:" not in line)) == []
    # vLLM's names break the rules: the colon, and `_total` of a histogram.
    complaints = lint("".join(line for line in lines if "vllm:" in line))
    known = ("should not contain ':'", "iteration_tokens_total non-counter metrics should not have")
    assert [one for one in complaints if not any(part in one for part in known)] == []


def test_every_name_of_the_dashboard_is_exported(small: RunningServer) -> None:
    scrape(small)  # a server without a response counts none
    exported = set(samples(scrape(small)))
    path = DASHBOARD
    board = json.loads(path.read_text(encoding="utf-8"))
    asked: set[str] = set()
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            names = set(re.findall(r"\b(?:llmopt|process)_[a-z0-9_]+", target["expr"]))
            assert names, panel["title"]
            asked |= names
    assert len(asked) > 20
    assert asked <= exported
    for variable in board["templating"]["list"][1:]:
        assert variable["query"]["query"].split("(")[1].split(",")[0] in exported


def test_speculation_shows_in_the_metrics() -> None:
    engine = make_engine(speculation=SpeculationConfig("ngram", num_tokens=3))
    with running(engine) as server, server.http() as http:
        body = {"prompt": PROMPT * 4, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        server.wait_until_idle()
        found = samples(scrape(server))
    drafts, draft_token_ids, stood = (
        found[f"vllm:spec_decode_num_{name}_total"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= draft_token_ids <= 3 * drafts and stood <= draft_token_ids
    assert found["llmopt_steps_total"] >= 60 - stood
    assert "llmopt_feature_info{speculation=ngram}" in found


def test_a_request_counts_its_longest_sequence_and_what_was_cached(small: RunningServer) -> None:
    names = ("request_max_num_generation_tokens", "request_prefill_kv_computed_tokens")
    body = {"prompt": [7] * 40, "max_tokens": 5, "n": 2, "ignore_eos": True}
    before = samples(scrape(small))
    with small.http() as http:
        for _ in range(2):
            assert http.post("/v1/completions", json=body).status_code == 200
    after = samples(scrape(small))

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before[f"vllm:{name}"]

    assert [grown(f"{name}_count") for name in names] == [2, 2]
    assert grown("request_max_num_generation_tokens_sum") == 10
    cached = grown("prompt_tokens_cached_total")
    assert cached == 32 and grown("request_prefill_kv_computed_tokens_sum") == 80 - cached
    assert grown("request_time_per_output_token_seconds_count") == 4
