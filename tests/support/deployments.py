"""Deployments as `llmopt deploy` plans them, and their files, parsed."""

from __future__ import annotations

import json
from typing import Any

import yaml
from llmopt.engine.deploy.deploy_files import deploy_files
from llmopt.engine.deploy.deployment import DeployChoices, ServerDeployment, deployment_for
from llmopt.engine.planner.catalog import StoredQuantization
from llmopt.engine.planner.plan_request import PlanRequest, plan_for

OURS: dict[str, Any] = {"engine": "llmopt", "image": "registry.example/llmopt:1"}
OTHERS: dict[str, Any] = {"key_secret": None}


def deployment(
    ask: dict[str, Any] | None = None, stored: StoredQuantization | None = None, **choices: Any
) -> ServerDeployment:
    asked = {"model": "llama-70b", "context": "32k", "sequences": 16, "gpus": ("H100 SXM",)}
    chosen = {"model": "org/model", "name": "big-model", "key_secret": "llm-key", **choices}
    engine = "llmopt" if chosen.get("engine") == "llmopt" else "vllm"
    plan = plan_for(PlanRequest(**{**asked, "engine": engine, **(ask or {})}))
    return deployment_for(DeployChoices(**chosen), plan, stored)


def small(**choices: Any) -> ServerDeployment:
    """A model of a billion parameters on one GPU."""
    return deployment({"model": "llama-3.2-1b", "sequences": 4}, **choices)


def documents(planned: ServerDeployment) -> dict[str, Any]:
    """YAML and JSON files by path."""
    return {
        name: json.loads(text) if name.endswith("json") else yaml.safe_load(text)
        for name, text in deploy_files(planned).items()
        if name.endswith(("json", "yaml", "yml"))
    }
