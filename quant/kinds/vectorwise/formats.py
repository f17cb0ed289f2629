"""How LLM.int8() is stored: bitsandbytes alone.

Per linear `P`: `P.weight` int8 `[out, in]`, `P.SCB` float32 `[out]`, `P.weight_format` uint8 `0`.
"""

from __future__ import annotations

from typing import Any

import torch

from ....base.errors import BadInput
from ..base.containers import BitsAndBytesCodes
from ..base.format import Config, Stored
from ..base.kind import Storage
from ..base.raw import Entries, Raw, read_array
from .kind import VectorwiseTensor
from .scheme import VectorwiseScheme

# Orders of the tiles that `weight_format` names; a GPU's kernels took them before bitsandbytes 0.45.
_TILES = {1: "col32", 2: "col_turing", 3: "col_ampere"}


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
        order = int(stored.tensor("weight_format")) if "weight_format" in stored else 0
        if order:
            raise BadInput(f"{stored.module}.weight_format: {_not_rows(order)}")
        codes = stored.matrix("weight", torch.int8)
        absmax = stored.tensor("SCB", torch.float32, shape=(codes.shape[0],))
        return VectorwiseTensor(codes, absmax, self.scheme(config))

    def read_raw(self, entries: Entries, module: str) -> Raw:
        order = entries.get(f"{module}.weight_format")
        if order is not None and (value := int(read_array(order, "U8").reshape(()))):
            raise ValueError(_not_rows(value))
        codes = read_array(entries[f"{module}.weight"], "I8")
        absmax = read_array(entries[f"{module}.SCB"], "F32")
        if absmax.shape != codes.shape[:1]:
            raise ValueError(f"SCB has shape {absmax.shape} for {codes.shape[0]} rows")
        shape = (codes.shape[0], codes.shape[1])
        return Raw({"codes": codes, "absmax": absmax}, {"absmax": absmax}, shape)


def _not_rows(order: int) -> str:
    return (
        f"the codes lie in the tile order {_TILES.get(order, order)!r}, not in rows: load the "
        "checkpoint with bitsandbytes 0.44 and save it again"
    )


STORAGE = Storage(bitsandbytes=VectorwiseCodes())
