"""What Ollama tells of a model: size, digest, family, parameters, quantization, capabilities."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....quant.base.errors import BadInput
from ....quant.model.checkpoint import gguf_file_of
from ...engine import Engine
from ...planner.model.families import has_table_rule
from ...planner.model.shapes import ModelShape
from ...text.pooling import read_pooling
from ..endpoints.generation import Service


class ModelFacts:
    """The served model and its adapters, as Ollama lists and shows models."""

    def __init__(self, service: Service, engine: Engine) -> None:
        self._service = service
        self._engine = engine
        self._config: Mapping[str, Any] = engine.model_config
        self._num_parameters = _num_parameters(self._config)

    def listed(self) -> list[dict[str, Any]]:
        """The entries of `/api/tags`."""
        folders = {self._service.model_name: self._engine.folder, **self._service.adapters}
        return [self._entry(name, folder) for name, folder in folders.items()]

    def shown(self) -> dict[str, Any]:
        """The body of `/api/show`."""
        text, family = self._service.text, self._family
        capabilities = ["embedding"] if self._has_pooling else ["completion"]
        capabilities += ["tools"] if text.takes_tools and text.tool_format else []
        capabilities += ["thinking"] if text.reasoning_format else []
        capabilities += ["vision"] if self._service.images.are_taken else []
        return {
            "modelfile": "",
            "parameters": "",
            "template": text.template_text,
            "details": self._details,
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": self._num_parameters,
                f"{family}.context_length": self._engine.max_model_len,
            },
            "capabilities": capabilities,
            "modified_at": _changed(self._engine.folder),
        }

    def _entry(self, name: str, folder: Path) -> dict[str, Any]:
        paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        # An adapter that is loaded is served on when its folder is deleted.
        files = [(path.name, path.stat().st_size) for path in paths if path.is_file()]
        return {
            "name": name,
            "model": name,
            "modified_at": _changed(folder),
            "size": sum(size for _, size in files),
            "digest": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
            "details": self._details,
        }

    @property
    def _family(self) -> str:
        return str(self._config.get("model_type", "unknown"))

    @property
    def _has_pooling(self) -> bool:
        try:
            return read_pooling(self._engine.folder) is not None
        except BadInput:
            return False

    @property
    def _details(self) -> dict[str, Any]:
        quantized = self._config.get("quantization_config") or {}
        dtype = str(self._engine.dtype).removeprefix("torch.")
        count = self._num_parameters
        return {
            "parent_model": "",
            "format": "gguf" if gguf_file_of(self._engine.folder) else "safetensors",
            "family": self._family,
            "families": [self._family],
            "parameter_size": "unknown" if count is None else _short(count),
            "quantization_level": quantized.get("quant_method", dtype),
        }


def _num_parameters(config: Mapping[str, Any]) -> int | None:
    """From the planner's table of families; None for another type, which would have to be probed."""
    try:
        raw = dict(config)
        return ModelShape.from_config(raw).num_parameters if has_table_rule(raw) else None
    except BadInput:
        return None


def _short(count: int) -> str:
    """As Ollama writes it: 134.5M, 8.0B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _changed(folder: Path) -> str:
    seconds = folder.stat().st_mtime if folder.exists() else 0
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
