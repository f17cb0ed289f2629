"""bitsandbytes format (`quant_method: bitsandbytes`): 4-bit codes, or LLM.int8(), by their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...base.errors import BadInput
from ..base.scheme import Scheme
from ..kinds.base.containers import BitsAndBytesCodes
from ..kinds.base.format import (
    COMPUTE_DTYPE,
    Config,
    Stored,
    TensorSource,
    WeightFormat,
    only_scheme,
)
from ..kinds.base.kind import storage_of
from ..kinds.base.raw import Entries, Raw
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.registry import classes_in

_PARTS = [
    part
    for kind in classes_in("bitsandbytes")
    if (part := storage_of(kind).bitsandbytes) is not None
]


def _part(scheme: Scheme) -> BitsAndBytesCodes:
    part = storage_of(scheme).bitsandbytes
    if part is None:
        raise BadInput(
            f"format bitsandbytes cannot hold {scheme.label} weights: only nf4, fp4 and LLM.int8()"
        )
    return part


class BitsAndBytesFormat(WeightFormat):
    """bitsandbytes: nf4, fp4 and LLM.int8()."""

    name = "bitsandbytes"
    plain_list = "llm_int8_skip_modules"
    markers: tuple[str, ...] = tuple(part.marker for part in _PARTS)
    suffixes: tuple[str, ...] = tuple(
        dict.fromkeys(suffix for part in _PARTS for suffix in part.suffixes)
    )

    irrelevant: tuple[str, ...] = (
        *("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit", "llm_int8_threshold"),
        *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "bnb_4bit_quant_type"),
        *("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"),
    )

    def check_scheme(self, scheme: Scheme) -> None:
        _part(scheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        _part(scheme).check(module, out_features, in_features, scheme)

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float32

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return _part(tensor.scheme).pack(module, tensor)

    def unpack(self, module: str, source: TensorSource, config: Config) -> QuantizedTensor:
        stored = Stored(source, module)
        return _of_bits(8 if "SCB" in stored else 4).unpack(stored, config)

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        scheme = only_scheme(self.name, schemes)
        part = _part(scheme)
        four = part.bits == 4
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "_load_in_4bit": four,
            "_load_in_8bit": not four,
            "bnb_4bit_quant_type": "fp4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": COMPUTE_DTYPE,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": list(ignore),
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        } | part.fields(scheme)

    def scheme(self, config: Config, module: str) -> Scheme:
        eight_bit = config.get("load_in_8bit") or config.get("_load_in_8bit")
        return _of_bits(8 if eight_bit else 4).scheme(config)

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        return _of_bits(8 if f"{module}.SCB" in entries else 4).read_raw(entries, module)


def _of_bits(bits: int) -> BitsAndBytesCodes:
    return next(part for part in _PARTS if part.bits == bits)


FORMAT = BitsAndBytesFormat()
