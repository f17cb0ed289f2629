"""The keys of a run's record, of an engine in this process and of a server: a stable interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from llmopt.base.processor import computes_in_bf16
from llmopt.bench.load.known_server import known_server
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.run_sessions import run_bench

# By the path of the object that holds them, `llmopt` being "". What is "*" differs from machine to
# machine or from run to run.
EVERY_TARGET = {
    "": "schema run_id arms name interrupted slowdown identity workload num_warmups num_runs runs rejected_passes metrics "
    "spread peaks slo lora steady_state client_lag_ms phases preemptions prefix_cache_hit_rate memory quality "
    "roofline energy environment cost",
    "identity": "model model_hash quantization dtype target workload workload_sha256 load engine device "
    "machine hardware",
    "identity.hardware": "*",
    "identity.load": "num_prompts request_rate burstiness max_concurrency ignore_eos temperature seed",
    "workload": "name source is_stand_in notes num_requests prompt_tokens output_tokens",
    "metrics": "ttft tpot itl e2el client_queue_time e2el_including_client_queue token_gap "
    "ttft_from_schedule",
    "metrics.ttft": "mean median std p50 p90 p95 p99 count interval_95 order_interval_95",
    "spread": "output_throughput median_ttft_ms median_tpot_ms median_e2el_ms",
    "spread.median_ttft_ms": "run_cv run_cv_is_assumed interval_95 smallest_visible_change",
    "peaks": "output_tokens_in_one_second requests_in_flight",
    "client_lag_ms": "mean median std p99 max",
    "energy": "cpu_joules cpu_reason gpu_joules gpu_reason joules joules_per_million_input_tokens "
    "joules_per_million_output_tokens",
    "environment": "*",
    "cost": "hour_price usd usd_per_million_input_tokens usd_per_million_output_tokens "
    "usd_per_million_total_tokens",
}
OF_A_RUN = (
    "duration completed failed total_input_tokens total_output_tokens request_throughput "
    "request_goodput output_throughput total_token_throughput max_output_tokens_per_s "
    "max_concurrent_requests rtfx slo_share prefix_cache_hit_rate "
    "joules joules_per_token other_load cpu_seconds waiting_seconds "
    "run_delay_seconds instructions involuntary_switches steal_seconds disturbed disturbed_because "
) + " ".join(
    f"{statistic}_{metric}_ms"
    for metric in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99")
)
IN_PROCESS = {
    "": "slowdown_where step_split step_trace speculation layer_errors tasks images model",
    "model": "family num_parameters weights stored_bytes context line",
    "identity.engine": "max_model_len max_num_seqs max_num_batched_tokens block_size "
    "enable_prefix_caching num_threads",
    "runs": OF_A_RUN,
    "phases": "decode_seconds prefill_seconds between_steps_seconds num_steps",
    "step_split": "num_steps replayed_steps step_ms parts_ms",
    "step_split.parts_ms": "*",
    "step_trace": "num_steps prefill_tokens decode_tokens mean_rows schedule_seconds execute_seconds "
    "update_seconds preemptions peak_kv_blocks kv_unfilled_share",
    "memory": "weight_bytes checkpoint_bytes checkpoint_dtype kv_cache_bytes kv_cache state_bytes "
    "peak_resident_bytes",
    "memory.kv_cache": "dtype bytes_per_token tokens blocks",
    "quality": "protocol description settings source token_sha256 num_tokens num_windows perplexity nll_nats "
    "reference reference_perplexity perplexity_ratio kl_nats median_kl_nats p90_kl_nats p95_kl_nats "
    "p99_kl_nats p999_kl_nats max_kl_nats top1_agreement rank_moved sure intervals interval_method speed hurt "
    "kv_cache",
    "quality.settings": "*",
    "quality.sure": "num_tokens kl_nats top1_agreement intervals",
    "quality.sure.intervals": "*",
    "quality.intervals": "*",
    "quality.speed": "*",
    "roofline": "ceilings points bytes_per_decoded_token",
    "roofline.ceilings": "far_bandwidth near_bandwidth near_bytes peak_flops bandwidth flops",
    "roofline.points": "phase num_steps seconds bytes_per_step flops_per_step intensity achieved_flops "
    "achieved_bandwidth mbu mfu of_roof bound explanation",
}
if not computes_in_bf16():  # float32 activations next to a cache of 16 bits
    IN_PROCESS |= {
        "quality.kv_cache": "dtype computed_in num_tokens kl_nats top1_agreement intervals",
        "quality.kv_cache.intervals": "*",
    }
OVER_HTTP = {
    "": "client silent_failures server server_metrics quality_reason tasks",
    "identity": "server",
    "identity.server": "model version",
    "server_metrics": "url reason scraped_every_s counters gauges means runs",
    **dict.fromkeys(
        ("server_metrics.counters", "server_metrics.gauges", "server_metrics.means"), ""
    ),
    "identity.engine": "backend path client_workers extra_body",
    "runs": f"{OF_A_RUN} client_machine_load",
    "client": "certified reasons workers client_ttft_error_ms client_itl_error_ms check loop_lag_ms "
    "late_connections burden_ms request_timeout_s token_counts_by first_token_of_pass",
    "client.loop_lag_ms": "mean p99 max",
    "client.token_counts_by": "*",
    "server": "url path max_model_len started",
    "memory": "weight_bytes checkpoint_bytes kv_cache_bytes peak_resident_bytes",
}
# Objects that look alike, or whose keys are names of a machine's or of a type.
ONE_OF_MANY = {
    "rejected_passes",
    *(f"metrics.{name}" for name in EVERY_TARGET["metrics"].split() if name != "ttft"),
    *(f"spread.{name}" for name in EVERY_TARGET["spread"].split() if name != "median_ttft_ms"),
    "metrics.ttft.interval_95",
    "metrics.ttft.order_interval_95",
    "roofline.ceilings.peak_flops",
}


def keys_by_path(part: Mapping[str, Any], path: str = "") -> dict[str, set[str]]:
    """{path: keys} of an object and of those in it, a list standing for its first entry."""
    found = {path: set(part)}
    for key, value in part.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, Mapping) and inner not in ONE_OF_MANY:
            found |= keys_by_path(value, inner)
    return found


def check_keys(ours: Mapping[str, Any], only: Mapping[str, str]) -> None:
    expected = {
        path: set(f"{EVERY_TARGET.get(path, '')} {only.get(path, '')}".split())
        for path in {**EVERY_TARGET, **only}
    }
    free = tuple(path for path, keys in expected.items() if keys == {"*"})
    found = {
        path: {"*"} if path in free else keys
        for path, keys in keys_by_path(ours).items()
        if not path.startswith(tuple(f"{name}." for name in free))
    }
    assert found == expected


LOAD: dict[str, Any] = {"num_prompts": 4, "output_len": 4, "num_runs": 2, "gpu_hour_price": 2.0}


def test_keys_of_an_engine_in_process() -> None:
    options = {"num_threads": 1, "quality_tokens": 100, "reference": "stories3M"}
    result = run_bench(BenchOptions.model_validate({**LOAD, **options})).result
    check_keys(result["llmopt"], IN_PROCESS)
    assert (result["backend"], result["model_id"]) == ("llmopt", "stories3M")
    assert result["tokenizer_id"] == "stories3M"


def test_a_server_that_cuts_the_prompts_of_chats_is_doubted() -> None:
    """Ollama reads what fits its context, and answers as usual; the known server counts one token."""
    with known_server(1.0, 1.0) as port:
        options = {
            "base_url": f"http://127.0.0.1:{port}",
            "model": "stories3M",
            "backend": "openai-chat",
            "check_client": False,
        }
        result = run_bench(BenchOptions.model_validate({**LOAD, **options})).result
    doubts = result["llmopt"]["silent_failures"]
    assert any(doubt.startswith("8 prompts were read to less than 75%") for doubt in doubts)


@pytest.mark.parametrize("is_checked", [True, False])
def test_keys_of_a_server(is_checked: bool) -> None:
    # Slow enough that a busy machine does not deliver a whole stream at once: a TPOT of 0 has no spread.
    with known_server(20.0, 20.0) as port:
        options = {
            "output_len": 10,
            "base_url": f"http://127.0.0.1:{port}",
            "model": "served-name",
            "tokenizer": "stories3M",
            "backend": "vllm",
            "check_client": is_checked,
        }
        result = run_bench(BenchOptions.model_validate({**LOAD, **options})).result
    errors = "mean median p99 max"
    check = "streams workers requests failed server_lateness_ms loop_lag_ms"
    of_check = {
        "client.client_ttft_error_ms": errors,
        "client.client_itl_error_ms": errors,
        "client.check": f"{check} client_ttft_error_ms client_itl_error_ms",
        "client.check.client_ttft_error_ms": errors,
        "client.check.client_itl_error_ms": errors,
        "client.check.server_lateness_ms": errors,
        "client.check.loop_lag_ms": "mean p99 max",
    }
    check_keys(result["llmopt"], OVER_HTTP | (of_check if is_checked else {}))
    # That server counts one token for every prompt; on a busy machine its streams may stand still too.
    *_, doubt = result["llmopt"]["silent_failures"]
    assert doubt.startswith("8 answers count other prompt tokens")
    assert (result["backend"], result["model_id"]) == ("vllm", "served-name")
    assert result["tokenizer_id"] == "stories3M"
