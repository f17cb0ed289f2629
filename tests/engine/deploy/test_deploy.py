"""`llmopt deploy`: its files against Kubernetes' schemas, the plan, and the names of the metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from llmopt.cli.main import main
from llmopt.engine.deploy.compose import dashboard
from llmopt.engine.deploy.deploy_files import deploy_files
from llmopt.engine.deploy.deployment import Choices, Deployment, deployment_for
from llmopt.engine.deploy.kubernetes import QUEUE_METRIC
from llmopt.engine.deploy.vllm_command import VLLM
from llmopt.engine.planner.plan.plan_request import PlanRequest, plan_for
from llmopt.quant.base.errors import BadInput

KUBERNETES = ("1.31", "1.37")
OPTIONS = Path(__file__).with_name(f"vllm-{VLLM.version}-options.txt").read_text().split()


def deployment(ask: dict[str, Any] | None = None, **choices: Any) -> Deployment:
    asked = {"model": "llama-70b", "context": "32k", "sequences": 16, "gpus": ("H100 SXM",)}
    chosen = {"model": "org/model", "name": "big-model", "key_secret": "llm-key", **choices}
    engine = chosen.get("engine", "vllm")
    return deployment_for(
        Choices(**chosen), plan_for(PlanRequest(**{**asked, "engine": engine, **(ask or {})}))
    )


OURS: dict[str, Any] = {"engine": "llmopt", "image": "registry.example/llmopt:1"}


def documents(found: Deployment) -> dict[str, Any]:
    files = deploy_files(found)
    return {
        name: json.loads(text) if name.endswith("json") else yaml.safe_load(text)
        for name, text in files.items()
    }


@pytest.mark.parametrize("choices", [{}, OURS, {"key_secret": None, "max_replicas": 1}])
def test_the_manifests_fit_kubernetes_schemas(choices: dict[str, Any]) -> None:
    ask = {"tp": 8} if choices.get("engine") == "llmopt" else {}
    found = documents(deployment(ask, **choices))
    kinds = set()
    for name, document in found.items():
        if not name.startswith("kubernetes/"):
            continue
        kinds.add(document["kind"])
        if document["kind"] == "ServiceMonitor":  # of an operator: Kubernetes itself has no schema
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)
    assert kinds == {
        "Deployment",
        "Service",
        "PersistentVolumeClaim",
        "HorizontalPodAutoscaler",
        "ServiceMonitor",
    }


def test_a_wrong_manifest_would_not_pass() -> None:
    document = documents(deployment())["kubernetes/deployment.yaml"]
    document["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES[-1], strict=True)


def test_the_parts_find_each_other() -> None:
    found = documents(deployment({"tp": 8}, **OURS))
    pods = found["kubernetes/deployment.yaml"]["spec"]
    labels = pods["template"]["metadata"]["labels"]
    service = found["kubernetes/service.yaml"]
    monitor = found["kubernetes/service-monitor.yaml"]["spec"]
    assert pods["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert monitor["endpoints"][0]["authorization"]["credentials"]["name"] == "llm-key"
    (container,) = pods["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    claim = pods["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == found["kubernetes/cache.yaml"]["metadata"]["name"]
    scaler = found["kubernetes/autoscaler.yaml"]["spec"]
    assert (
        scaler["scaleTargetRef"]["name"] == found["kubernetes/deployment.yaml"]["metadata"]["name"]
    )
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == QUEUE_METRIC
    (rule,) = found["prometheus-adapter-values.yaml"]["rules"]["custom"]
    assert rule["name"]["as"] == QUEUE_METRIC
    assert "llmopt_num_requests_waiting" in rule["seriesQuery"]


def test_the_numbers_are_the_plan_s() -> None:
    found = deployment()
    plan = plan_for(
        PlanRequest("llama-70b", context="32k", sequences=16, gpus=("H100 SXM",), engine="vllm")
    )
    one = plan.devices[0]
    words = list(found.command)
    assert (
        found.gpus == one.deployment.gpus == int(words[words.index("--tensor-parallel-size") + 1])
    )
    assert words[words.index("--max-model-len") + 1] == "32768"
    assert words[words.index("--max-num-seqs") + 1] == "16"
    assert {word for word in words if word.startswith("--")} <= set(OPTIONS)
    container = documents(found)["kubernetes/deployment.yaml"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(found.gpus)
    assert (
        int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30 > one.weight_bytes
    )
    small = deployment({"weights": "int4", "sequences": 4})
    assert small.gpus < found.gpus and small.startup_seconds < found.startup_seconds
    amd = deployment({"gpus": ("MI300X",)})
    assert amd.gpu_resource == "amd.com/gpu"


def test_our_own_command_is_one_that_the_command_line_takes() -> None:
    words = list(deployment({"tp": 8, "kv_dtype": "fp8"}, **OURS).command)
    assert words[:3] == ["llmopt", "serve-local", "org/model"]
    with pytest.raises(SystemExit) as stopped:
        main([*words[1:], "--engine", "vllm", "--print-command"])
    assert stopped.value.code == 0
    assert "--gpu-memory-utilization" not in words
    words = list(deployment({"tp": 8, "utilization": 0.85}, **OURS).command)
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.85"


def test_the_dashboard_speaks_the_engine_s_names() -> None:
    ours = json.dumps(dashboard(deployment({"tp": 8}, **OURS)))
    theirs = dashboard(deployment())
    text = json.dumps(theirs)
    assert "llmopt_" in ours and "llmopt_" not in text
    names = set(re.findall(r"vllm:[a-z0-9_]+", text))
    assert {
        "vllm:kv_cache_usage_perc",
        "vllm:iteration_tokens_total_bucket",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:num_requests_waiting",
    } <= names
    assert len(theirs["panels"]) > 12


def test_compose_keeps_the_key_out_of_the_file() -> None:
    for choices, ask, variable in (({}, {}, "VLLM_API_KEY"), (OURS, {"tp": 8}, "LLMOPT_API_KEY")):
        found = documents(deployment(ask, **choices))
        services = found["compose/compose.yaml"]["services"]
        assert services["server"]["environment"][variable].startswith("${")
        assert all(
            port.startswith("127.0.0.1:") for one in services.values() for port in one["ports"]
        )
        mounted = {
            volume.split(":")[0].removeprefix("./")
            for one in services.values()
            for volume in one["volumes"]
            if volume.startswith("./")
        }
        assert {f"compose/{name}" for name in mounted} <= set(found)


@pytest.mark.parametrize(
    ("ask", "choices", "named"),
    [
        ({"tp": 1}, {}, "do not fit"),
        ({}, {"gpus_per_node": 4}, "--gpus-per-node"),
        ({}, {"name": "Big_Model"}, "no name for Kubernetes"),
        ({}, {"engine": "llmopt"}, "--image"),
        ({}, {"replicas": 5}, "--max-replicas"),
        ({}, {"queue_target": 0}, "--queue-target"),
        ({"tp": 8, "kv_dtype": "nvfp4"}, OURS, "nvfp4"),
    ],
)
def test_what_cannot_be_is_refused(
    ask: dict[str, Any], choices: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        deployment(ask, **choices)


def test_the_command_writes_the_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        "Org/Llama_3.1-8B",
        "--like",
        "llama-3.1-8b",
        "--ctx",
        "8k",
        "--out",
        str(tmp_path / "d"),
    ]
    with pytest.raises(SystemExit) as stopped:
        main(["deploy", *words, "--json"])
    assert stopped.value.code == 0
    found = json.loads(capfd.readouterr().out)
    written = {
        str(path.relative_to(tmp_path / "d")): path.read_text()
        for path in (tmp_path / "d").rglob("*")
        if path.is_file()
    }
    assert written == found["files"]
    assert "name: llama-3-1-8b\n" in written["kubernetes/deployment.yaml"]
    with pytest.raises(SystemExit) as stopped:
        main(["deploy", "Org/Unheard-Of", "--like", "unheard", "--out", str(tmp_path / "e")])
    assert stopped.value.code == 2 and not (tmp_path / "e").exists()
