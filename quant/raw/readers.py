"""Registry of raw readers by `quant_method`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .container import Entries, Raw
from .floating import read_bitsandbytes, read_float8, read_fp8, read_input_scale, read_squeezellm
from .fp4 import read_modelopt, read_packed_fp4
from .gguf import read_gguf
from .integer import read_awq, read_gptq, read_int_quantized, read_pack_quantized
from .quip import read_quip
from .trellis import read_exl3

Reader = Callable[[Entries, str, dict[str, Any]], Raw]


def read_compressed_tensors(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
    """compressed-tensors: find the module's group of the config, then its layout."""

    def rank(group: dict[str, Any]) -> int:
        targets = group.get("targets") or []
        if module in targets:
            return 0
        if any(name.startswith("re:") and re.match(name[3:], module) for name in targets):
            return 1
        return 2 if "Linear" in targets else 3

    group = min(config["config_groups"].values(), key=rank)
    weights = group["weights"]
    if weights.get("num_bits") == 4 and weights.get("type") == "float":
        return read_packed_fp4(entries, module, group)
    activations = group.get("input_activations") or {"dynamic": True}
    extra = {} if activations.get("dynamic") else read_input_scale(entries, module)
    if weights.get("type") == "float":
        return read_float8(entries, module, f"{module}.weight_scale", extra)
    if (group.get("format") or config.get("format")) == "pack-quantized":
        return read_pack_quantized(entries, module, weights)
    return read_int_quantized(entries, module, weights, extra)


READERS: dict[str, Reader] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "exl3": read_exl3,
    "fp8": read_fp8,
    "gguf": read_gguf,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "quip": read_quip,
    "squeezellm": read_squeezellm,
}
