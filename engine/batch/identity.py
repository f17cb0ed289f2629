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
    "kv_cache_dtype",
    "loras",
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
    paths = sorted(model.iterdir()) if model.is_dir() else [model]
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in paths
        if path.is_file()
    ]
    options = {name: getattr(config, name) for name in ANSWER_OPTIONS}
    facts = {"files": files, "options": options, **for_app}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
