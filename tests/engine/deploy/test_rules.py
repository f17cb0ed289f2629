"""Alert and recording rules: their metrics and labels are those that a real server exposes.

What they fire on is in `rules-test.yml`, which promtool runs (tests/tooling/test_lint_deploy.py).
vLLM's and SGLang's names were read from their packages' sources (November 2026).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from llmopt.engine.deploy.deploy_files import rules
from prometheus_client.parser import text_string_to_metric_families

from ...support.deployments import OTHERS, OURS, documents, small
from ...support.live_server import make_engine, running

OF_PROMETHEUS = {"job", "instance"}
SUFFIX = re.compile(r"(_(bucket|sum|count|total))+$")


def expressions(choices: dict[str, Any]) -> dict[str, str]:
    """By the name of the rule."""
    groups = rules(small(**choices))["groups"]
    return {
        rule.get("alert", rule.get("record")): rule["expr"]
        for group in groups
        for rule in group["rules"]
    }


def labels_in(expression: str) -> set[str]:
    grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    matched = re.findall(r"[{,](\w+)=", expression)
    return {*matched, *(label.strip() for each in grouped for label in each.split(","))}


def test_every_metric_and_label_is_exposed_by_the_server() -> None:
    with running(make_engine("stories260K")) as server, server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "Once"}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": []}).status_code == 400
        families = [*text_string_to_metric_families(http.get("/metrics").text)]
    exposed: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        exposed.setdefault(sample.name, set()).update(sample.labels)
    named = set()
    for name, expression in expressions(OURS).items():
        metrics = set(re.findall(r"\b(?:llmopt|process)_\w+", expression))
        assert metrics <= set(exposed), name
        labels = {label for metric in metrics for label in exposed[metric]}
        if metrics:
            assert labels_in(expression) - OF_PROMETHEUS <= labels, name
        named |= metrics
    assert len(named) > 12


@pytest.mark.parametrize("engine", ["vllm-0.32.0", "sglang-0.5.23"])
def test_other_engines_have_the_metrics_of_their_rules(engine: str) -> None:
    listed = Path(__file__).with_name(f"{engine}-metrics.txt").read_text().split()
    known = {SUFFIX.sub("", name) for name in listed}
    prefix = engine.split("-")[0]
    held = expressions({"engine": prefix, **OTHERS})
    assert {"LLMServerDown", "LLMEngineStalled", "LLMQueueLong", "LLMKVCacheFull"} <= set(held)
    assert not {"LLMServerNotReady", "LLMStepsFailing", "LLMServerErrors"} & set(held)
    board = documents(small(engine=prefix, **OTHERS))["compose/dashboard.json"]
    text = " ".join(held.values()) + str(board["panels"])
    named = set(re.findall(rf"\b{prefix}:\w+", text))
    assert len(named) > 7 and "llmopt_" not in text
    assert {SUFFIX.sub("", name) for name in named} <= known
    assert board["panels"]


def test_alerts_ask_for_records_that_exist_and_follow_the_choices() -> None:
    for choices in (OURS, {"engine": "vllm"}, {"engine": "sglang", **OTHERS}):
        held = expressions({**choices, "queue_target": 9, "ttft_target": 2.5})
        asked = {name for each in held.values() for name in re.findall(r"job_model:\w+:\w+", each)}
        assert asked and asked <= set(held)
        assert held["LLMQueueLong"].endswith("> 9")
        assert held["LLMTimeToFirstTokenHigh"].endswith("> 2.5")


def test_both_places_have_the_same_rules_and_prometheus_loads_them() -> None:
    held = documents(small(**OURS))
    assert held["kubernetes/rules.yaml"]["spec"] == held["compose/rules.yml"]
    prometheus, watchers = held["compose/prometheus.yml"], held["compose/compose.yaml"]["services"]
    (job,) = prometheus["scrape_configs"]
    assert f'job="{job["job_name"]}"' in yaml.safe_dump(held["compose/rules.yml"])
    mounted = {volume.split(":")[1] for volume in watchers["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in prometheus["rule_files"]} <= mounted
