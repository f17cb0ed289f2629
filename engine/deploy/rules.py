"""Prometheus recording and alerting rules of a deployment, in the names of its engine's metrics.

A rule whose metric the engine does not have is left out. Recorded names are level:metric:operations, as
Prometheus' own documentation advises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .deployment import Deployment

Rule = dict[str, Any]
WINDOW = "5m"
KV_CACHE_FULL = 0.95
ERROR_RATIO = 0.05
_METRIC = re.compile(r"\bm\.(\w+)")
_RECORD = re.compile(r"\bjob_model:\w+:\w+")
_QUANTILES = {"p50": 0.5, "p99": 0.99}
_LATENCIES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
)


def rules(deployment: Deployment) -> dict[str, Any]:
    """The rule file, with one group to record and one to alert."""
    name = deployment.choices.name
    recorded = _in_names(deployment, _recorded(name))
    records = {rule["record"] for rule in recorded}
    alerts = [
        rule
        for rule in _in_names(deployment, _alerts(deployment))
        if records.issuperset(_RECORD.findall(rule["expr"]))
    ]
    return {
        "groups": [
            {"name": f"{name}-recorded", "rules": recorded},
            {"name": f"{name}-alerts", "rules": alerts},
        ]
    }


def _in_names(deployment: Deployment, held: Iterable[Rule]) -> list[Rule]:
    """The rules with `m.name` replaced by the engine's metric, without those whose metric it has not."""
    metric, renamed = deployment.served.metric, []
    for rule in held:
        names = {name: metric(name) for name in _METRIC.findall(rule["expr"])}
        if None not in names.values():
            expression = _METRIC.sub(lambda match, names=names: str(names[match[1]]), rule["expr"])
            renamed.append({**rule, "expr": expression})
    return renamed


def _recorded(name: str) -> list[Rule]:
    job = f'{{job="{name}"}}'
    latencies = [
        {
            "record": f"job_model:{latency}:{label}_rate{WINDOW}",
            "expr": f"histogram_quantile({quantile}, sum by (job, model_name, le) "
            f"(rate(m.{latency}_bucket{job}[{WINDOW}])))",
        }
        for latency in _LATENCIES
        for label, quantile in _QUANTILES.items()
    ]
    tokens = [
        {
            "record": f"job_model:{tokens}:rate{WINDOW}",
            "expr": f"sum by (job, model_name) (rate(m.{tokens}_total{job}[{WINDOW}]))",
        }
        for tokens in ("prompt_tokens", "generation_tokens")
    ]
    hits, queries = "m.prefix_cache_hits_total", "m.prefix_cache_queries_total"
    answers = "m.http_responses_total"
    ratios = [
        {
            "record": f"job_model:prefix_cache_hits_per_query:ratio_rate{WINDOW}",
            "expr": f"sum by (job, model_name) (rate({hits}{job}[{WINDOW}])) / "
            f"sum by (job, model_name) (rate({queries}{job}[{WINDOW}]))",
        },
        {
            "record": f"job_model:http_responses_5xx:ratio_rate{WINDOW}",
            "expr": f'sum by (job, model_name) (rate({answers}{{job="{name}",status=~"5.."}}[{WINDOW}])) / '
            f"sum by (job, model_name) (rate({answers}{job}[{WINDOW}]))",
        },
    ]
    return [*latencies, *tokens, *ratios]


def _alerts(deployment: Deployment) -> list[Rule]:
    job = f'{{job="{deployment.choices.name}"}}'
    return [*_server_alerts(deployment, job), *_load_alerts(deployment, job)]


def _server_alerts(deployment: Deployment, job: str) -> list[Rule]:
    """A server that is gone, stands still, or fails."""
    name, patience = deployment.choices.name, f"{deployment.startup_seconds}s"
    tokens = " + ".join(
        f"rate(m.{kind}_tokens_total{job}[{WINDOW}])" for kind in ("prompt", "generation")
    )
    by_server = "sum by (job, instance, model_name)"
    return [
        _alert("LLMServerDown", f"up{job} == 0", "2m", "critical", "{{ $labels.instance }} does not answer"),
        _alert("LLMServersAbsent", f"absent(up{job})", "5m", "critical", f"{name} has no server at all"),
        _alert(
            "LLMServerNotReady", f"m.ready{job} == 0", patience, "critical",
            "{{ $labels.instance }} runs and takes no requests",
        ),
        _alert(
            "LLMEngineStalled",
            f"{by_server} (m.num_requests_running{job}) > 0 and {by_server} ({tokens}) == 0",
            WINDOW, "critical", "{{ $labels.instance }} has requests and computes no tokens",
        ),
        _alert(
            "LLMStepsFailing", f"increase(m.failed_steps_total{job}[{WINDOW}]) > 0", "0m", "warning",
            "{{ $labels.instance }}: {{ $value | humanize }} steps have failed, and their requests",
        ),
        _alert(
            "LLMServerRestarting",
            f"changes(process_start_time_seconds{job}[30m]) > 2",
            "0m", "warning", "{{ $labels.instance }} was started again {{ $value }} times in 30 minutes",
        ),
        _alert(
            "LLMServerErrors",
            f"job_model:http_responses_5xx:ratio_rate{WINDOW}{job} > {ERROR_RATIO}",
            WINDOW, "critical", "{{ $value | humanizePercentage }} of the responses are 5xx",
        ),
    ]  # fmt: skip


def _load_alerts(deployment: Deployment, job: str) -> list[Rule]:
    """More load than the servers are sized for."""
    slow, queue = deployment.choices.ttft_target, deployment.choices.queue_target
    return [
        _alert(
            "LLMQueueLong",
            f"avg by (job, model_name) (m.num_requests_waiting{job}) > {queue}",
            "10m", "warning",
            f"{{{{ $value | humanize }}}} requests wait at each server; the autoscaler aims at {queue}",
        ),
        _alert(
            "LLMTimeToFirstTokenHigh",
            f"job_model:time_to_first_token_seconds:p99_rate{WINDOW}{job} > {slow:g}",
            "10m", "warning",
            f"99 % of first tokens come within {{{{ $value | humanizeDuration }}}}, target {slow:g} s",
        ),
        _alert(
            "LLMKVCacheFull",
            f"m.kv_cache_usage_ratio{job} > {KV_CACHE_FULL} and "
            f"on (job, instance) {_summed('m.num_preemptions_total', job)} > 0",
            "10m", "warning",
            "{{ $labels.instance }} preempts sequences: its KV cache is too small for its load",
        ),
    ]  # fmt: skip


def _summed(counter: str, job: str) -> str:
    return f"sum by (job, instance) (increase({counter}{job}[{WINDOW}]))"


def _alert(name: str, expression: str, lasting: str, severity: str, summary: str) -> Rule:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }
