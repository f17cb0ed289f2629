"""Docker compose deployment: the server, Prometheus and Grafana on one machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..server.metrics.exposition_names import OURS_ALONE, VLLM_NAMES
from .deployment import DRAIN_SECONDS, PORT, SHARED_MEMORY_BYTES, Deployment

Object = dict[str, Any]
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "grafana/grafana:12.1.0"
DASHBOARD = Path(__file__).with_name("grafana.json")


def compose(deployment: Deployment) -> Object:
    """The compose file. All ports are bound to loopback."""
    server: Object = {
        "image": deployment.image,
        "entrypoint": list(deployment.command),
        "environment": {"HF_HOME": "/cache"},
        "ports": [f"127.0.0.1:{PORT}:{PORT}"],
        "volumes": ["cache:/cache"],
        "shm_size": SHARED_MEMORY_BYTES,
        "restart": "unless-stopped",
        "stop_grace_period": f"{DRAIN_SECONDS + 15}s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _probe(deployment.ready_path)],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{deployment.startup_seconds}s",
        },
    }
    if deployment.choices.key_secret:
        # From the shell or the file .env beside the compose file; compose stops where it is missing.
        variable = deployment.key_variable
        server["environment"][variable] = f"${{{variable}:?a key for the clients}}"
    if deployment.gpus:
        driver = "amdgpu" if deployment.gpu_resource.startswith("amd") else "nvidia"
        device = {"driver": driver, "count": deployment.gpus, "capabilities": ["gpu"]}
        server["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return {
        "name": deployment.choices.name,
        "services": {
            "server": server,
            "prometheus": {
                "image": PROMETHEUS_IMAGE,
                "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro"],
                "ports": ["127.0.0.1:9090:9090"],
                **_metrics_key(deployment),
            },
            "grafana": {
                "image": GRAFANA_IMAGE,
                "volumes": [
                    "./grafana-source.yml:/etc/grafana/provisioning/datasources/source.yml:ro",
                    "./grafana-boards.yml:/etc/grafana/provisioning/dashboards/boards.yml:ro",
                    "./dashboard.json:/var/lib/grafana/dashboards/dashboard.json:ro",
                ],
                "ports": ["127.0.0.1:3000:3000"],
            },
        },
        "volumes": {"cache": None},
        **_secret_of_metrics(deployment),
    }


def prometheus(deployment: Deployment) -> Object:
    job: Object = {"job_name": "llm", "static_configs": [{"targets": [f"server:{PORT}"]}]}
    if _metrics_key(deployment):
        job["authorization"] = {"credentials_file": "/run/secrets/metrics-key"}
    return {"global": {"scrape_interval": "5s"}, "scrape_configs": [job]}


def grafana_source() -> Object:
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090"}
    return {"apiVersion": 1, "datasources": [{**source, "access": "proxy", "isDefault": True}]}


def grafana_boards() -> Object:
    where = {"path": "/var/lib/grafana/dashboards"}
    return {"apiVersion": 1, "providers": [{"name": "llmopt", "type": "file", "options": where}]}


def dashboard(deployment: Deployment) -> Object:
    """The Grafana dashboard with the engine's metric names, without panels of metrics that vLLM lacks."""
    text = DASHBOARD.read_text(encoding="utf-8")
    if deployment.choices.engine == "llmopt":
        return json.loads(text)
    text = text.replace("label_values(llmopt_ready", "label_values(llmopt_num_requests_running")
    board = json.loads(text)
    board["panels"] = [
        panel
        for panel in board["panels"]
        if not any(f"llmopt_{name}" in json.dumps(panel) for name in OURS_ALONE)
    ]
    renamed = re.sub(r"llmopt_(\w+)", lambda m: "vllm:" + _vllm_name(m[1]), json.dumps(board))
    return json.loads(renamed)


def _vllm_name(name: str) -> str:
    for llmopt_name, vllm_name in VLLM_NAMES.items():
        if name == llmopt_name or name.startswith(f"{llmopt_name}_"):
            return vllm_name + name.removeprefix(llmopt_name)
    return name


def _probe(path: str) -> str:
    return f"import urllib.request as r; r.urlopen('http://127.0.0.1:{PORT}{path}', timeout=4)"


def _metrics_key(deployment: Deployment) -> Object:
    """llmopt's server requires the API key for its metrics."""
    wanted = deployment.choices.key_secret and deployment.choices.engine == "llmopt"
    return {"secrets": ["metrics-key"]} if wanted else {}


def _secret_of_metrics(deployment: Deployment) -> Object:
    if not _metrics_key(deployment):
        return {}
    return {"secrets": {"metrics-key": {"environment": deployment.key_variable}}}
