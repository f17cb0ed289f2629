"""Kubernetes manifests of a deployment, as plain dictionaries."""

from __future__ import annotations

from math import ceil
from typing import Any

from .deployment import (
    DRAIN_SECONDS,
    GIB,
    PORT,
    SHARED_MEMORY_BYTES,
    STEP_ASIDE_SECONDS,
    Deployment,
)

Object = dict[str, Any]
QUEUE_METRIC = "llm_requests_waiting"
"""Name of the custom metric of waiting requests, from the Prometheus adapter to the autoscaler."""


def manifests(deployment: Deployment) -> dict[str, Object]:
    """Manifests by file name."""
    return {
        "deployment.yaml": _deployment(deployment),
        "service.yaml": _service(deployment),
        "cache.yaml": _cache(deployment),
        "autoscaler.yaml": _autoscaler(deployment),
        "service-monitor.yaml": _service_monitor(deployment),
    }


def prometheus_adapter_values(deployment: Deployment) -> Object:
    """Values for the Helm chart of the Prometheus adapter, for the autoscaler's queue metric."""
    name = f"{deployment.metric_prefix}num_requests_waiting"
    rule = {
        "seriesQuery": f'{{__name__="{name}",namespace!="",pod!=""}}',
        "resources": {
            "overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}
        },
        "name": {"as": QUEUE_METRIC},
        "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
    }
    return {"rules": {"custom": [rule]}}


def _metadata(deployment: Deployment, suffix: str = "") -> Object:
    choices = deployment.choices
    return {
        "name": choices.name + suffix,
        "namespace": choices.namespace,
        "labels": {
            "app.kubernetes.io/name": choices.name,
            "app.kubernetes.io/managed-by": "llmopt",
        },
    }


def _selector(deployment: Deployment) -> Object:
    return {"app.kubernetes.io/name": deployment.choices.name}


def _deployment(deployment: Deployment) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(deployment)
        | {"annotations": {"llmopt/plan": "; ".join(deployment.why)}},
        "spec": {
            "replicas": deployment.choices.replicas,
            "selector": {"matchLabels": _selector(deployment)},
            # Devices are scarce: the old pod is stopped before the new one starts.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "template": {"metadata": {"labels": _selector(deployment)}, "spec": _pod(deployment)},
        },
    }


def _pod(deployment: Deployment) -> Object:
    cache = {
        "name": "cache",
        "persistentVolumeClaim": {"claimName": f"{deployment.choices.name}-cache"},
    }
    shared = {"medium": "Memory", "sizeLimit": _gib(SHARED_MEMORY_BYTES)}
    pod: Object = {
        "terminationGracePeriodSeconds": STEP_ASIDE_SECONDS + DRAIN_SECONDS + 15,
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(deployment)],
        "volumes": [cache, {"name": "shared-memory", "emptyDir": shared}],
    }
    if deployment.gpus:
        pod["tolerations"] = [
            {"key": deployment.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        ]
    return pod


def _container(deployment: Deployment) -> Object:
    memory = {"memory": _gib(deployment.memory_bytes)}
    gpus = {deployment.gpu_resource: str(deployment.gpus)} if deployment.gpus else {}
    environment: list[Object] = [{"name": "HF_HOME", "value": "/cache"}]
    if secret := deployment.choices.key_secret:
        source = {"secretKeyRef": {"name": secret, "key": "api-key"}}
        environment.append({"name": deployment.key_variable, "valueFrom": source})
    return {
        "name": "server",
        "image": deployment.image,
        "command": list(deployment.command),
        "env": environment,
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {
            "requests": {"cpu": str(deployment.cpus), **memory, **gpus},
            "limits": {**memory, **gpus},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "cache", "mountPath": "/cache"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        # Loading has a long timeout; after it, an unhealthy engine is restarted within half a minute.
        "startupProbe": _probe("/health", 10, ceil(deployment.startup_seconds / 10)),
        "livenessProbe": _probe("/health", 10, 3),
        "readinessProbe": _probe(deployment.ready_path, 5, 2),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(STEP_ASIDE_SECONDS)]}}},
    }


def _probe(path: str, period: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _service(deployment: Deployment) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(deployment),
        "spec": {
            "selector": _selector(deployment),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _cache(deployment: Deployment) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(deployment, "-cache"),
        "spec": {
            # Replicas share one download, so the volume must be one that several nodes can mount.
            "accessModes": [
                "ReadWriteOnce" if deployment.choices.max_replicas == 1 else "ReadWriteMany"
            ],
            "resources": {"requests": {"storage": _gib(deployment.cache_bytes)}},
        },
    }


def _autoscaler(deployment: Deployment) -> Object:
    choices = deployment.choices
    target = {"type": "AverageValue", "averageValue": str(choices.queue_target)}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _metadata(deployment),
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": choices.name,
            },
            "minReplicas": choices.replicas,
            "maxReplicas": choices.max_replicas,
            "metrics": [
                {"type": "Pods", "pods": {"metric": {"name": QUEUE_METRIC}, "target": target}}
            ],
            "behavior": {
                # A new replica takes minutes to load: add one at a time, and scale down slowly.
                "scaleUp": {
                    "stabilizationWindowSeconds": 30,
                    "policies": [
                        {"type": "Pods", "value": 1, "periodSeconds": deployment.startup_seconds}
                    ],
                },
                "scaleDown": {"stabilizationWindowSeconds": 600},
            },
        },
    }


def _service_monitor(deployment: Deployment) -> Object:
    """The Prometheus operator's ServiceMonitor. vLLM serves metrics without an API key, llmopt does not."""
    endpoint: Object = {"port": "http", "path": "/metrics", "interval": "15s"}
    choices = deployment.choices
    if choices.key_secret and choices.engine == "llmopt":
        endpoint["authorization"] = {
            "type": "Bearer",
            "credentials": {"name": choices.key_secret, "key": "api-key"},
        }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": _metadata(deployment),
        "spec": {"selector": {"matchLabels": _selector(deployment)}, "endpoints": [endpoint]},
    }


def _gib(num_bytes: int) -> str:
    return f"{ceil(num_bytes / GIB)}Gi"
