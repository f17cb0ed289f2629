"""The files of a deployment, as text."""

from __future__ import annotations

import json
from typing import Any

import yaml

from . import compose
from .deployment import Deployment
from .dockerfiles import docker_files
from .kubernetes import manifests, prometheus_adapter_values
from .rules import rules
from .systemd import systemd_files


def deploy_files(deployment: Deployment) -> dict[str, str]:
    """Contents by path. Those in `kubernetes/` are for `kubectl apply`."""
    kubernetes = {f"kubernetes/{name}": text for name, text in manifests(deployment).items()}
    files = {
        **{path: _yaml(manifest) for path, manifest in kubernetes.items()},
        "compose/compose.yaml": _yaml(compose.compose(deployment)),
    }
    if deployment.served.has_metrics:
        files |= {
            "prometheus-adapter-values.yaml": _yaml(prometheus_adapter_values(deployment)),
            "compose/prometheus.yml": _yaml(compose.prometheus(deployment)),
            "compose/rules.yml": _yaml(rules(deployment)),
            "compose/grafana-source.yml": _yaml(compose.grafana_source()),
            "compose/grafana-boards.yml": _yaml(compose.grafana_boards()),
            "compose/dashboard.json": json.dumps(compose.dashboard(deployment), indent=1) + "\n",
        }
    if deployment.choices.engine == "llmopt":
        files |= {f"docker/{name}": text for name, text in docker_files(deployment).items()}
        files |= {f"systemd/{name}": text for name, text in systemd_files(deployment).items()}
    return files


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=100)
