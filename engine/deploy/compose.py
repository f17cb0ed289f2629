"""Docker compose deployment: the server, Prometheus and Grafana on one machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .container_command import PORT
from .deployment import SHARED_MEMORY_BYTES, Deployment

Object = dict[str, Any]
PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "grafana/grafana:12.1.0"
DASHBOARD = Path(__file__).with_name("grafana.json")
_METRIC = re.compile(r"\bllmopt_(\w+)")


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
        "stop_grace_period": f"{deployment.stop_seconds}s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _probe(deployment.served.ready_path)],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{deployment.startup_seconds}s",
        },
    }
    if deployment.choices.key_secret:
        # From the shell or the file .env beside the compose file; compose stops where it is missing.
        variable = deployment.served.key_variable
        server["environment"][variable] = f"${{{variable}:?a key for the clients}}"
    if deployment.gpus:
        driver = "amdgpu" if deployment.gpu_resource.startswith("amd") else "nvidia"
        device = {"driver": driver, "count": deployment.gpus, "capabilities": ["gpu"]}
        server["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return {
        "name": deployment.choices.name,
        "services": {"server": server, **_watchers(deployment)},
        "volumes": {"cache": None},
        **_secret_of_metrics(deployment),
    }


def _watchers(deployment: Deployment) -> Object:
    """Prometheus with the rules, and Grafana with the dashboard, of an engine with metrics."""
    if not deployment.served.has_metrics:
        return {}
    return {
        "prometheus": {
            "image": PROMETHEUS_IMAGE,
            "volumes": [
                "./prometheus.yml:/etc/prometheus/prometheus.yml:ro",
                "./rules.yml:/etc/prometheus/rules.yml:ro",
            ],
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
    }


def prometheus(deployment: Deployment) -> Object:
    # The name that the service has in Kubernetes, which the rules ask for.
    job: Object = {
        "job_name": deployment.choices.name,
        "static_configs": [{"targets": [f"server:{PORT}"]}],
    }
    if _metrics_key(deployment):
        job["authorization"] = {"credentials_file": "/run/secrets/metrics-key"}
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [job],
    }


def grafana_source() -> Object:
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090"}
    return {"apiVersion": 1, "datasources": [{**source, "access": "proxy", "isDefault": True}]}


def grafana_boards() -> Object:
    where = {"path": "/var/lib/grafana/dashboards"}
    return {"apiVersion": 1, "providers": [{"name": "llmopt", "type": "file", "options": where}]}


def dashboard(deployment: Deployment) -> Object:
    """The Grafana dashboard in the engine's names, without panels of metrics that it lacks."""
    text = DASHBOARD.read_text(encoding="utf-8")
    metric = deployment.served.metric
    if deployment.choices.engine != "llmopt":
        text = text.replace("label_values(llmopt_ready", "label_values(llmopt_num_requests_running")
    board = json.loads(text)
    board["panels"] = [
        panel
        for panel in board["panels"]
        if all(metric(name) for name in _METRIC.findall(json.dumps(panel)))
    ]
    return json.loads(_METRIC.sub(lambda match: str(metric(match[1])), json.dumps(board)))


def _probe(path: str) -> str:
    return f"import urllib.request as r; r.urlopen('http://127.0.0.1:{PORT}{path}', timeout=4)"


def _metrics_key(deployment: Deployment) -> Object:
    """The API key, for the metrics of a server that asks for it."""
    wanted = deployment.choices.key_secret and deployment.served.metrics_need_key
    return {"secrets": ["metrics-key"]} if wanted else {}


def _secret_of_metrics(deployment: Deployment) -> Object:
    if not _metrics_key(deployment):
        return {}
    return {"secrets": {"metrics-key": {"environment": deployment.served.key_variable}}}
