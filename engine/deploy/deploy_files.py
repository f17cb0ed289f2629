"""The files of a deployment: templates in `templates/`, rendered with a `Deployment`.

A template lies where its file does. YAML is rendered, read and written again, so that comments stay with the
templates and every value is quoted as it must be. Jinja's delimiters are [[ ]] and [% %]: Prometheus and
Grafana have the usual ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ...base.errors import BadInput
from .deployment import GIB, PORT, SHARED_MEMORY_BYTES, STEP_ASIDE_SECONDS, ServerDeployment

TEMPLATES = Path(__file__).with_name("templates")
DASHBOARD = TEMPLATES / "compose/dashboard.json"
QUEUE_METRIC = "llm_requests_waiting"
"""Name of the custom metric of waiting requests, from the Prometheus adapter to the autoscaler."""
USER_ID = 10001
"""User of llmopt's own images, which is not root."""
CACHE_FOLDER = "/var/cache/llmopt"
"""Kernels are compiled into it for the processor that a container meets, once."""

_MANIFESTS = ("deployment", "service", "cache", "disruption-budget")
_WATCHED_MANIFESTS = ("autoscaler", "service-monitor", "rules")
_WATCHERS = ("prometheus", "rules", "grafana-source", "grafana-boards")
_PANEL_METRIC = re.compile(r"\bllmopt_(\w+)")
_RULE_METRIC = re.compile(r"\bm\.(\w+)")
_RECORD = re.compile(r"\bjob_model:\w+:\w+")


def deploy_files(deployment: ServerDeployment) -> dict[str, str]:
    """Contents by path. Those in `kubernetes/` are for `kubectl apply`. Manifests and services that need the
    engine's metrics are there where it has them, images where it is llmopt."""
    has_metrics = deployment.served.has_metrics
    manifests = [*_MANIFESTS, *(_WATCHED_MANIFESTS if has_metrics else ())]
    paths = [*(f"kubernetes/{name}.yaml" for name in manifests), "compose/compose.yaml"]
    if has_metrics:
        paths += ["prometheus-adapter-values.yaml", *(f"compose/{name}.yml" for name in _WATCHERS)]
    files = {}
    for path in paths:
        is_rules = path == "compose/rules.yml"
        content = rules(deployment) if is_rules else yaml.safe_load(_render(path, deployment))
        files[path] = yaml.safe_dump(content, sort_keys=False, width=100)
    if has_metrics:
        files["compose/dashboard.json"] = json.dumps(dashboard(deployment), indent=1) + "\n"
    if deployment.choices.engine != "llmopt":
        return files
    pins = pinned_requirements("llmopt", "serve")
    torch = next((pin for pin in pins if pin.startswith("torch==")), None)
    if torch is None:
        raise BadInput(
            "deploy: llmopt runs from a checkout that is not installed, so the versions for the image are "
            "unknown: install it (pip install -e .) and run again"
        )
    for device in ("cpu", "cuda"):
        image = {"on_gpus": device == "cuda", "torch": torch}
        files[f"docker/Dockerfile.{device}"] = _render("docker/Dockerfile", deployment, **image)
    files["docker/constraints.txt"] = _render("docker/constraints.txt", deployment, pins=pins)
    files["docker/.dockerignore"] = _render("docker/dockerignore", deployment)
    return files


def rules(deployment: ServerDeployment) -> dict[str, Any]:
    """Prometheus' rule file in the names of the engine's metrics, without rules whose metric it has not. An
    alert on a rule that was left out is left out too."""
    document = yaml.safe_load(_render("compose/rules.yml", deployment))
    recorded, alerts = document["groups"]
    recorded["rules"] = _in_names(deployment, recorded["rules"])
    records = {rule["record"] for rule in recorded["rules"]}
    alerts["rules"] = [
        rule
        for rule in _in_names(deployment, alerts["rules"])
        if records.issuperset(_RECORD.findall(rule["expr"]))
    ]
    return document


def dashboard(deployment: ServerDeployment) -> dict[str, Any]:
    """The Grafana dashboard in the engine's names, without panels of metrics that it lacks."""
    text = DASHBOARD.read_text(encoding="utf-8")
    metric = deployment.served.metric
    if deployment.choices.engine != "llmopt":
        text = text.replace("label_values(llmopt_ready", "label_values(llmopt_num_requests_running")
    board = json.loads(text)
    board["panels"] = [
        panel
        for panel in board["panels"]
        if all(metric(name) for name in _PANEL_METRIC.findall(json.dumps(panel)))
    ]
    return json.loads(_PANEL_METRIC.sub(lambda match: str(metric(match[1])), json.dumps(board)))


def pinned_requirements(name: str, *extras: str) -> list[str]:
    """`name==version` of everything that a distribution requires here with some of its extras, sorted. Of a
    build such as 2.13.0+cpu the release alone is pinned: a constraint without a build fits each. What is not
    installed here, such as the CUDA libraries of another build, is not pinned."""
    versions: dict[str, str] = {}
    visited: set[tuple[str, tuple[str, ...]]] = set()
    pending = [(name, extras)]
    while pending:
        required, wanted = pending.pop()
        key = canonicalize_name(required)
        if (key, wanted) in visited or (key in versions and not wanted):
            continue
        visited.add((key, wanted))
        try:
            installed = distribution(required)
        except PackageNotFoundError:
            continue
        versions[key] = Version(installed.version).public
        for requirement in map(Requirement, installed.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                pending.append((requirement.name, tuple(sorted(requirement.extras))))
    versions.pop(canonicalize_name(name), None)
    return [f"{package}=={pinned}" for package, pinned in sorted(versions.items())]


def _render(path: str, deployment: ServerDeployment, **values: Any) -> str:
    choices, served = deployment.choices, deployment.served
    return _ENVIRONMENT.get_template(f"{path}.jinja").render(
        deployment=deployment,
        choices=choices,
        served=served,
        is_ours=choices.engine == "llmopt",
        # Prometheus has to send the clients' key where `/metrics` wants it.
        asks_key_of_metrics=bool(choices.key_secret and served.metrics_need_key),
        **values,
    )


def _in_names(
    deployment: ServerDeployment, rules: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rules with `m.name` replaced by the engine's metric, without those whose metric it has not."""
    metric, renamed = deployment.served.metric, []
    for rule in rules:
        names = {name: metric(name) for name in _RULE_METRIC.findall(rule["expr"])}
        if None not in names.values():
            expression = _RULE_METRIC.sub(lambda m, names=names: str(names[m[1]]), rule["expr"])
            renamed.append({**rule, "expr": expression})
    return renamed


_ENVIRONMENT = Environment(
    block_start_string="[%",
    block_end_string="%]",
    variable_start_string="[[",
    variable_end_string="]]",
    comment_start_string="[#",
    comment_end_string="#]",
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
    autoescape=False,
    loader=FileSystemLoader(TEMPLATES),
)
_ENVIRONMENT.filters |= {
    "yaml": lambda value: json.dumps(value, ensure_ascii=False),  # JSON is YAML
    "json": json.dumps,
    "ceil": ceil,
    "gib": lambda num_bytes: f"{ceil(num_bytes / GIB)}Gi",
}
_ENVIRONMENT.globals |= {
    "rules": rules,
    "version": version,
    "PORT": PORT,
    "SHARED_MEMORY_BYTES": SHARED_MEMORY_BYTES,
    "STEP_ASIDE_SECONDS": STEP_ASIDE_SECONDS,
    "QUEUE_METRIC": QUEUE_METRIC,
    "USER_ID": USER_ID,
    "CACHE_FOLDER": CACHE_FOLDER,
}
