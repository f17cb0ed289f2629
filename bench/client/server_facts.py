"""What a server says of itself: its model, version and GPU, by the paths that servers have for it."""

from __future__ import annotations

import json
from typing import Any

from ...quant.base.errors import BadInput
from .address import Address
from .json_http import RequestFailed

VERSION_PATHS = {"/version": "version", "/props": "build_info"}
"""vLLM and llmopt have the first, llama.cpp the second: {path: key of the version}."""
GPU_LABELS = ("gpu", "gpu_name", "modelName")
"""Labels of metrics that name a GPU: llmopt's, common exporters', and that of NVIDIA's DCGM exporter."""
UNREACHABLE = (RequestFailed, ValueError)


def server_facts(address: Address) -> dict[str, str | None]:
    """{`model`, `version`, `gpu`}; None where the server does not say."""
    try:
        card = address.model_card()
    except BadInput:
        card = {}
    root = card.get("root") or card.get("id")
    return {"model": root, "version": server_version(address), "gpu": gpu_of_metrics(address)}


def server_version(address: Address) -> str | None:
    """The server's version by the first path that has one."""
    for path, key in VERSION_PATHS.items():
        try:
            said: Any = json.loads(address.get(path))
        except UNREACHABLE:
            continue
        if isinstance(said, dict) and isinstance(said.get(key), str):
            return said[key]
    return None


def gpu_of_metrics(address: Address) -> str | None:
    """The GPUs named by the labels of the server's Prometheus metrics, sorted."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = address.get("/metrics").decode("utf-8", "replace")
        names = {
            sample.labels[label]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            for label in GPU_LABELS
            if sample.labels.get(label) and not sample.labels[label].isdigit()
        }
    except UNREACHABLE:
        return None
    return ", ".join(sorted(names)) or None
