"""How LLM.int8() is stored: bitsandbytes alone.

Per linear `P`: `P.weight` int8 `[out, in]`, `P.SCB` float32 `[out]`, `P.weight_format` uint8 `0`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..base.containers import BitsAndBytesCodes
from ..base.format import Config, Stored
from ..base.kind import Storage
from ..base.raw import Entries, Raw, read_array
from .kind import VectorwiseTensor
from .scheme import VectorwiseScheme


class VectorwiseCodes(BitsAndBytesCodes):
    """LLM.int8() in bitsandbytes."""

    bits = 8
    marker = ".SCB"
    suffixes: tuple[str, ...] = (".weight", ".SCB", ".weight_format")

    def fields(self, scheme: VectorwiseScheme) -> dict[str, Any]:
        return {"llm_int8_threshold": scheme.threshold}

    def scheme(self, config: Config) -> VectorwiseScheme:
        return VectorwiseScheme(float(config.get("llm_int8_threshold", 6.0)))

    def pack(self, module: str, tensor: VectorwiseTensor) -> dict[str, torch.Tensor]:
        return {
            f"{module}.weight": tensor.codes,
            f"{module}.SCB": tensor.absmax,
            f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def unpack(self, stored: Stored, config: Config) -> VectorwiseTensor:
        codes = stored.matrix("weight", torch.int8)
        absmax = stored.tensor("SCB", torch.float32, shape=(codes.shape[0],))
        return VectorwiseTensor(codes, absmax, self.scheme(config))

    def read_raw(self, entries: Entries, module: str) -> Raw:
        codes = read_array(entries[f"{module}.weight"], "I8")
        absmax = read_array(entries[f"{module}.SCB"], "F32")
        if absmax.shape != codes.shape[:1]:
            raise ValueError(f"SCB has shape {absmax.shape} for {codes.shape[0]} rows")
        shape = (codes.shape[0], codes.shape[1])
        return Raw({"codes": codes, "absmax": absmax}, {"absmax": absmax}, shape)


STORAGE = Storage(bitsandbytes=VectorwiseCodes())
