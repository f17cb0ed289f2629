"""Kubernetes manifests of a deployment, as plain dictionaries."""

from __future__ import annotations

from math import ceil
from typing import Any

from .container_command import PORT
from .deployment import GIB, SHARED_MEMORY_BYTES, STEP_ASIDE_SECONDS, Deployment
from .dockerfiles import CACHE_FOLDER, USER_ID
from .rules import rules

Object = dict[str, Any]
QUEUE_METRIC = "llm_requests_waiting"
"""Name of the custom metric of waiting requests, from the Prometheus adapter to the autoscaler."""


def manifests(deployment: Deployment) -> dict[str, Object]:
    """Manifests by file name; those that need the engine's metrics only where it has them."""
    held = {
        "deployment.yaml": _deployment(deployment),
        "service.yaml": _service(deployment),
        "cache.yaml": _cache(deployment),
        "disruption-budget.yaml": _disruption_budget(deployment),
    }
    if deployment.served.has_metrics:
        held |= {
            "autoscaler.yaml": _autoscaler(deployment),
            "service-monitor.yaml": _service_monitor(deployment),
            "rules.yaml": _rules(deployment),
        }
    return held


def prometheus_adapter_values(deployment: Deployment) -> Object:
    """Values for the Helm chart of the Prometheus adapter, for the autoscaler's queue metric."""
    name = deployment.served.metric("num_requests_waiting")
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
    surge = deployment.choices.max_surge
    # Where there is an autoscaler the number of replicas is its own: applying the manifest again must not
    # take away what it has added.
    replicas = {} if deployment.served.has_metrics else {"replicas": deployment.choices.replicas}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(deployment)
        | {"annotations": {"llmopt/plan": "; ".join(deployment.why)}},
        "spec": {
            **replicas,
            "selector": {"matchLabels": _selector(deployment)},
            # A new pod is ready before an old one stops; with no devices to spare, one stops first.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": 0 if surge else 1},
            },
            "minReadySeconds": 10,
            # By default a rollout has failed after ten minutes, in which a large model does not load.
            "progressDeadlineSeconds": deployment.startup_seconds + 300,
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
        "terminationGracePeriodSeconds": deployment.stop_seconds,
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, **_user(deployment)},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _selector(deployment)},
            }
        ],
        "containers": [_container(deployment)],
        "volumes": [
            cache,
            {"name": "shared-memory", "emptyDir": shared},
            *({"name": name, "emptyDir": {}} for name in _scratch(deployment)),
        ],
    }
    if deployment.gpus:
        pod["tolerations"] = [
            {"key": deployment.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        ]
    return pod


def _user(deployment: Deployment) -> Object:
    """The user of llmopt's own image; the images of the others run as root."""
    if deployment.choices.engine != "llmopt":
        return {}
    return {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID}


def _scratch(deployment: Deployment) -> Object:
    """Folders to write in beside a root file system that is read-only, by the name of their volume."""
    if deployment.choices.engine != "llmopt":
        return {}
    return {"temporary": "/tmp", "kernels": CACHE_FOLDER}


def _container(deployment: Deployment) -> Object:
    memory = {"memory": _gib(deployment.memory_bytes)}
    gpus = {deployment.gpu_resource: str(deployment.gpus)} if deployment.gpus else {}
    environment: list[Object] = [{"name": "HF_HOME", "value": "/cache"}]
    if secret := deployment.choices.key_secret:
        source = {"secretKeyRef": {"name": secret, "key": "api-key"}}
        environment.append({"name": str(deployment.served.key_variable), "valueFrom": source})
    scratch = _scratch(deployment)
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
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            **({"readOnlyRootFilesystem": True} if scratch else {}),
        },
        "volumeMounts": [
            {"name": "cache", "mountPath": "/cache"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": name, "mountPath": path} for name, path in scratch.items()),
        ],
        # Loading has a long timeout; after it, an unhealthy engine is restarted within half a minute.
        "startupProbe": _probe("/health", 10, ceil(deployment.startup_seconds / 10)),
        "livenessProbe": _probe("/health", 10, 3),
        "readinessProbe": _probe(deployment.served.ready_path, 5, 2),
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
            # Replicas, and both sides of a rollout, share one download: several nodes mount the volume.
            "accessModes": [
                "ReadWriteOnce"
                if deployment.choices.max_replicas + deployment.choices.max_surge == 1
                else "ReadWriteMany"
            ],
            "resources": {"requests": {"storage": _gib(deployment.cache_bytes)}},
        },
    }


def _disruption_budget(deployment: Deployment) -> Object:
    """Drained nodes take one replica at a time, and the only one not before another runs.

    Of pods that do not get ready any may go: they serve nobody, and would hold up the drain.
    """
    is_single = deployment.choices.replicas == 1
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(deployment),
        "spec": {
            **({"minAvailable": 1} if is_single else {"maxUnavailable": 1}),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": _selector(deployment)},
        },
    }


def _rules(deployment: Deployment) -> Object:
    """The Prometheus operator's PrometheusRule."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": _metadata(deployment),
        "spec": rules(deployment),
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
    """The Prometheus operator's ServiceMonitor. llmopt asks for the API key, the others do not."""
    endpoint: Object = {"port": "http", "path": "/metrics", "interval": "15s"}
    choices = deployment.choices
    if choices.key_secret and deployment.served.metrics_need_key:
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
