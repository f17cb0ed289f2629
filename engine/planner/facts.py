"""A model's facts in one line, from its config and headers: family, size, type of its weights, context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...quant.families.config import has_table_rule, model_shape
from ...quant.gguf.container import GgufFile
from ...quant.gguf.mix import file_type
from ...quant.gguf.read_config import stored_config
from ...quant.kinds.ggml.scheme import GGUF_BLOCKS
from ...quant.model.checkpoint import gguf_file_of, read_json
from ..base.units import format_gib
from .catalog import stored_weight_bytes
from .weights import stored_quantization, stored_recipe


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts by which a model is described wherever one is named.

    Attributes:
        family: its model type.
        num_parameters: None for a family without a rule in the table, which only a probe would count.
        weights: how they are stored, such as `GGUF Q4_K_M`, `gptq int4` or `bfloat16`.
        stored_bytes: of all tensors; None where there are none beside the config.
        context: tokens; None where the config says none.
    """

    family: str
    num_parameters: int | None
    weights: str
    stored_bytes: int | None
    context: int | None

    @property
    def line(self) -> str:
        """`llama, 135M parameters, GGUF Q4_1, 92.10 MiB, context 8,192`."""
        count = self.num_parameters
        size = count and (f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M")
        parts = (
            self.family,
            size and f"{size} parameters",
            self.weights,
            self.stored_bytes and format_gib(self.stored_bytes),
            self.context and f"context {self.context:,}",
        )
        return ", ".join(part for part in parts if part)


def facts_of(path: Path) -> ModelFacts:
    """The facts of a folder with a `config.json`, or of a GGUF file; only headers are read.

    Raises:
        BadInput: a damaged config or header.
    """
    if (file := gguf_file_of(path)) is not None:
        opened = GgufFile(file)
        config, tensors = stored_config(opened), opened.tensors.values()
        num_parameters = _num_parameters(config)
        blocks = [tensor.type for tensor in tensors if tensor.type in GGUF_BLOCKS]
        kinds = blocks or [tensor.type for tensor in tensors if len(tensor.shape) > 1]
        weights = f"GGUF {file_type(opened, blocks) if blocks else kinds[0]}"
        stored_bytes = sum(tensor.nbytes for tensor in tensors)
    else:
        config = read_json(path / "config.json")
        num_parameters = _num_parameters(config)  # refuses fields of a wrong kind
        weights, stored_bytes = _weights(config), stored_weight_bytes(path)
    text = config.get("text_config") or config
    context = text.get("max_position_embeddings")
    return ModelFacts(
        str(config.get("model_type")),
        num_parameters,
        weights,
        stored_bytes,
        context if isinstance(context, int) else None,
    )


def _num_parameters(config: Mapping[str, Any]) -> int | None:
    return model_shape(config).num_parameters if has_table_rule(config) else None


def _weights(config: Mapping[str, Any]) -> str:
    """The quantization's method and grid, else the dtype."""
    stored = stored_quantization(config)
    if stored is None:
        text = config.get("text_config") or {}
        found = (part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype"))
        return str(next(filter(None, found), "bfloat16")).removeprefix("torch.")
    method = str(stored.get("quant_method"))
    try:
        name = stored_recipe(config).name
    except BadInput:
        return method
    return name if name.startswith(method) else f"{method} {name}"
