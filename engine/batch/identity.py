"""Digest of what a batch's answers depend on: checkpoint and options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.config import EngineConfig

ANSWER_OPTIONS = (
    "attention_sinks",
    "cpu_activations",
    "dtype",
    "kv_budget",
    "kv_cache_dtype",
    "kv_eviction",
    "max_model_len",
    "seed",
    "window",
)
"""Fields of `EngineConfig` that change answers. The others change speed and memory, so that a run that had
too little of it can be resumed with other ones."""


def digest_of(model: Path, config: EngineConfig, for_app: Mapping[str, Any]) -> str:
    """The digest.

    The checkpoint is told by names, sizes and times of its files: weights of many GiB are not read for it.

    Args:
        model: a folder or a GGUF file.
        for_app: served name, chat template and parsers.
    """
    options = {name: getattr(config, name) for name in ANSWER_OPTIONS}
    loras = {name: _files(Path(folder)) for name, folder in config.loras.items()}
    facts = {"files": _files(model), "loras": loras, "options": options, **for_app}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _files(model: Path) -> list[tuple[str, int, int]]:
    """Names, sizes in bytes and times in nanoseconds of a checkpoint's files."""
    paths = sorted(model.iterdir()) if model.is_dir() else [model]
    return [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in paths
        if path.is_file()
    ]
