"""The quantization that the files of a checkpoint name, and the KV cache's dtype that they have scales for.

ModelOpt's facts are in `quantization_config` of `config.json`, and in `hf_quant_config.json`, the only file
of the two that TensorRT-LLM 1.2.1 reads for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quant.model.checkpoint import HF_QUANT_CONFIG, read_json
from .catalog import PlannedModel

KV_DTYPES = {"FP8": "fp8", "NVFP4": "nvfp4"}
"""The planner's name by `kv_cache_quant_algo`."""


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The quantization that a checkpoint's files name.

    Attributes:
        method: `quant_method`.
        algorithm: ModelOpt's `quant_algo` as it is spelled, for other methods empty.
        layer_algorithms: algorithms of a mixed checkpoint.
        kv_dtype: the planner's name of the KV cache's dtype that there are scales for; None without.
        has_hf_file: True if there is `hf_quant_config.json`; None where only `config.json` was seen.
        config: `quantization_config`.
    """

    method: str
    algorithm: str
    layer_algorithms: frozenset[str]
    kv_dtype: str | None
    has_hf_file: bool | None
    config: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.method} {self.algorithm}".strip()


def stored_quantization_of(model: PlannedModel) -> StoredQuantization | None:
    """The quantization of a model's checkpoint; None for a plain one. Raises `BadInput`:
    `hf_quant_config.json` is no JSON object."""
    folder = Path(model.source).parent
    is_local = Path(model.source).is_file()
    has_file = (folder / HF_QUANT_CONFIG).is_file() if is_local else None
    config = dict(model.config.get("quantization_config") or {})
    if has_file and (not config or config.get("quant_method") == "modelopt"):
        config = {"quant_method": "modelopt", **read_json(folder / HF_QUANT_CONFIG)}
    if not config:
        return None
    method = str(config.get("quant_method"))
    fields = config.get("quantization") or config
    layers = fields.get("quantized_layers") or {}
    algorithms = frozenset(str(layer.get("quant_algo")) for layer in layers.values())
    if method != "modelopt":
        return StoredQuantization(method, "", algorithms, None, has_file, config)
    cache, scheme = fields.get("kv_cache_quant_algo"), fields.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        cache = cache or "FP8"
    kv_dtype, algorithm = KV_DTYPES.get(str(cache).upper()), str(fields.get("quant_algo"))
    return StoredQuantization(method, algorithm, algorithms, kv_dtype, has_file, config)
