"""`llmopt deploy`: its files against Kubernetes' schemas, the plan, and the names of the metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.config.config import KV_CACHE_DTYPES
from llmopt.engine.deploy.deploy_files import QUEUE_METRIC, dashboard
from llmopt.engine.deploy.deployment import ServerDeployment, served_engine
from llmopt.engine.deploy.engine_commands import VLLM
from llmopt.engine.planner import plan_request
from llmopt.engine.planner.cache_size import KV_DTYPES
from llmopt.engine.planner.engine_rules import RULES
from llmopt.engine.planner.plan_request import PlanRequest, plan_for

from ...support.deployments import OTHERS, OURS, deployment, documents, small

KUBERNETES = ("1.31", "1.37")
OPTIONS = Path(__file__).with_name(f"vllm-{VLLM.version}-options.txt").read_text().split()


OPERATOR_KINDS = {"ServiceMonitor", "PrometheusRule"}
METRICS_KINDS = {"HorizontalPodAutoscaler", *OPERATOR_KINDS}


@pytest.mark.parametrize(
    "choices",
    [
        {},
        OURS,
        {"key_secret": None, "max_replicas": 1, "max_surge": 0},
        {"engine": "sglang", **OTHERS},
        {"engine": "trtllm", "replicas": 2, **OTHERS},
    ],
)
def test_the_manifests_fit_kubernetes_schemas(choices: dict[str, Any]) -> None:
    ask = {"tp": 8} if choices.get("engine") == "llmopt" else {}
    found = documents(deployment(ask, **choices))
    kinds = set()
    for name, document in found.items():
        if not name.startswith("kubernetes/"):
            continue
        kinds.add(document["kind"])
        if document["kind"] in OPERATOR_KINDS:  # Kubernetes itself has no schema of them
            continue
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)
    always = {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"}
    assert kinds == always | (set() if choices.get("engine") == "trtllm" else METRICS_KINDS)


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


@pytest.mark.parametrize(
    ("gpu", "image", "resource"),
    [
        ("L40S", "vllm/vllm-openai:v", "nvidia.com/gpu"),
        ("MI300X", "vllm/vllm-openai-rocm:v", "amd.com/gpu"),
        ("RX 7900 XTX", "vllm/vllm-openai-rocm:v", "amd.com/gpu"),
        ("Strix Halo", "vllm/vllm-openai-rocm:v", "amd.com/gpu"),
    ],
)
def test_the_image_is_for_the_vendor_of_the_gpu(gpu: str, image: str, resource: str) -> None:
    of_gpu = small_on(gpu)
    assert (of_gpu.image, of_gpu.gpu_resource) == (f"{image}{VLLM.version}", resource)
    of_cpu = deployment({"model": "stories3M", "sequences": 1, "context": "64", "gpus": ("cpu",)})
    assert of_cpu.image == f"vllm/vllm-openai-cpu:v{VLLM.version}-x86_64" and not of_cpu.gpus


@pytest.mark.parametrize(
    ("gpu", "choices", "words"),
    [
        ("MI300X", {"engine": "sglang", **OTHERS}, "no image of SGLang .* MI300X: give --image"),
        ("MI300X", {"engine": "trtllm", **OTHERS}, "NVIDIA GPUs alone"),
        ("B60", {}, "manifests are for GPUs of NVIDIA and AMD"),
        ("M4 Max", OURS, "manifests are for GPUs of NVIDIA and AMD"),
    ],
)
def test_a_gpu_without_image_or_manifest_is_refused(
    gpu: str, choices: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        small_on(gpu, **choices)
    if choices.get("engine") == "sglang":
        assert small_on(gpu, **choices, image="mine:1").image == "mine:1"


def test_vllm_gets_its_own_names_of_kv_dtypes_or_the_dtype_is_refused() -> None:
    # CacheDType in vllm/config/cache.py of 0.32.0; `auto` is the model's dtype.
    of_vllm = {"float16", "fp8", "fp8_ds_mla", "fp8_per_token_head", "int8_per_token_head", "nvfp4"}
    vllm, given = served_engine("vllm"), set()
    for dtype in KV_DTYPES:
        try:
            given |= {*vllm.cache_words(dtype, None)[1:]}
        except BadInput:
            assert dtype in ("float32", "q8_0", "q5_1", "q4_0")
    assert given == of_vllm
    ours = served_engine("llmopt")
    for dtype in RULES["llmopt"].kv_dtypes:  # whatever the plan has, the server takes
        assert ours.cache_words(dtype, None)[1] in KV_CACHE_DTYPES


def small_on(gpu: str, **choices: Any) -> ServerDeployment:
    return deployment({"model": "llama-3.2-1b", "sequences": 4, "gpus": (gpu,)}, **choices)


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


def test_a_rollout_takes_no_server_away_before_another_is_ready() -> None:
    for planned in (small(), small(**OURS), small(engine="trtllm", **OTHERS)):
        spec = documents(planned)["kubernetes/deployment.yaml"]["spec"]
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        assert spec["progressDeadlineSeconds"] > planned.startup_seconds
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        grace = pod["terminationGracePeriodSeconds"]
        assert grace > pause + planned.choices.drain_seconds
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= planned.startup_seconds
        assert (
            startup["httpGet"]["path"] == container["livenessProbe"]["httpGet"]["path"] == "/health"
        )
        # An autoscaler owns the number of replicas; without one the manifest does.
        assert ("replicas" in spec) is (planned.choices.engine == "trtllm")
    words = list(planned.command)
    assert "--drain-seconds" not in words and "--shutdown-timeout" not in words
    assert documents(small(**OURS))["kubernetes/cache.yaml"]["spec"]["accessModes"] == [
        "ReadWriteMany"
    ]


def test_without_surge_one_stops_first_and_a_single_replica_is_warned_of() -> None:
    planned = small(max_surge=0, max_replicas=1)
    held = documents(planned)
    strategy = held["kubernetes/deployment.yaml"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert "a rollout is an outage" in planned.why[-1]
    assert held["kubernetes/cache.yaml"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "outage" not in small(max_surge=0, replicas=2).why[-1]


def test_the_disruption_budget_keeps_the_only_replica() -> None:
    budgets = [
        documents(small(replicas=count))["kubernetes/disruption-budget.yaml"]["spec"]
        for count in (1, 3)
    ]
    assert [budget.get("minAvailable") for budget in budgets] == [1, None]
    assert [budget.get("maxUnavailable") for budget in budgets] == [None, 1]
    labels = documents(small())["kubernetes/deployment.yaml"]["spec"]["selector"]
    assert budgets[0]["selector"] == labels


def test_our_own_pod_is_not_root_and_writes_into_its_volumes_alone() -> None:
    pod = documents(small(**OURS))["kubernetes/deployment.yaml"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert {"/tmp", "/cache", "/var/cache/llmopt"} <= set(mounts.values())
    theirs = documents(small())["kubernetes/deployment.yaml"]["spec"]["template"]["spec"]
    assert "runAsNonRoot" not in theirs["securityContext"]  # vLLM's image runs as root


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


def test_compose_gives_amds_cards_by_their_devices() -> None:
    """Docker knows no driver `amdgpu`; AMD documents the two devices."""
    server = documents(deployment({"gpus": ("mi300x",)}))["compose/compose.yaml"]["services"][
        "server"
    ]
    assert server["devices"] == ["/dev/kfd", "/dev/dri"] and "deploy" not in server


@pytest.mark.parametrize(
    ("ask", "choices", "named"),
    [
        ({"tp": 1}, {}, "do not fit"),
        ({}, {"gpus_per_node": 4}, "--gpus-per-node"),
        ({}, {"name": "Big_Model"}, "no name for Kubernetes"),
        ({}, {"engine": "llmopt"}, "--image"),
        ({}, {"replicas": 5}, "--max-replicas"),
        ({}, {"queue_target": 0}, "--queue-target"),
        ({}, {"max_surge": -1}, "--max-surge"),
        ({}, {"drain_seconds": 0}, "--drain-seconds"),
        ({}, {"ttft_target": 0}, "--ttft-target"),
        ({}, {"engine": "orca"}, "choose llmopt, vllm, sglang, trtllm"),
        ({}, {"engine": "sglang"}, "--api-key-secret: SGLang reads no key"),
        ({}, {"engine": "trtllm"}, "--api-key-secret: TensorRT-LLM reads no key"),
        ({"gpus": ("MI300X",)}, {"engine": "trtllm", **OTHERS}, "NVIDIA GPUs alone"),
        (
            {"kv_dtype": "fp8"},
            {"engine": "trtllm", **OTHERS},
            "TensorRT-LLM takes it from the checkpoint",
        ),
        ({"kv_dtype": "int8"}, {"engine": "sglang", **OTHERS}, "SGLang has bf16, fp8, nvfp4"),
        ({"tp": 8, "kv_dtype": "nvfp4"}, OURS, "nvfp4"),
    ],
)
def test_what_cannot_be_is_refused(
    ask: dict[str, Any], choices: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        deployment(ask, **choices)


def test_another_engine_is_planned_at_its_own_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    real = plan_request.plan_for
    monkeypatch.setattr(plan_request, "plan_for", lambda ask: asked.append(ask) or real(ask))
    words = ["llama-3.1-8b", "--engine", "sglang", "--ctx", "8k", "--image", "sglang:1"]
    with pytest.raises(SystemExit) as stopped:
        main(["deploy", *words, "-o", str(tmp_path / "d")])
    assert stopped.value.code == 0
    assert [one.engine for one in asked] == ["sglang"]


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
