"""GGUF as a weight format. A module's blocks go into layer shards; `quant.gguf.assemble` merges the shards
into one file at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.ggml.scheme import GgufScheme
from ..tensors.base import QuantizedTensor
from ..tensors.fp4 import Fp4Tensor
from ..tensors.gguf import GgufTensor
from ..tensors.integer import IntTensor
from .base import Config, TensorSource
from .gguf_fp4 import fp4_to_gguf
from .gguf_integer import block_type_of, int_to_gguf

BLOCKS_SUFFIX = ".gguf_blocks"


class GgufFormat:
    """ggml blocks, and weights that convert to blocks exactly (`gguf_integer`, `gguf_fp4`)."""

    name = "gguf"
    markers: tuple[str, ...] = (BLOCKS_SUFFIX,)
    suffixes: tuple[str, ...] = (BLOCKS_SUFFIX,)

    def check_scheme(self, scheme: Scheme) -> None:
        if block_type_of(scheme) is None:
            raise BadInput(
                f"format gguf cannot hold {scheme.label} weights: choose a block type with "
                "--gguf-type, 4- or 8-bit symmetric ones in groups of 32, or mxfp4"
            )

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self.check_scheme(scheme)
        width, _ = _gguf_scheme(scheme).block
        if in_features % width:
            raise BadInput(
                f"{module} has {in_features} inputs, no multiple of the {width} weights in a "
                f"{_gguf_scheme(scheme).type} block: leave it out with --ignore"
            )

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float16

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return {module + BLOCKS_SUFFIX: as_blocks(module, tensor).data}

    def unpack(self, module: str, source: TensorSource, config: Config) -> GgufTensor:
        scheme, data = self.scheme(config, module), source.tensor(module + BLOCKS_SUFFIX)
        if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] % scheme.block[1]:
            raise BadInput(f"{module}: its {tuple(data.shape)} bytes are no {scheme.type} blocks")
        return GgufTensor(data, scheme)

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": self.name,
            "types": {module: _gguf_scheme(scheme).type for module, scheme in schemes.items()},
            "modules_to_not_convert": list(ignore),
        }

    def scheme(self, config: Config, module: str) -> GgufScheme:
        types = config.get("types")
        if not isinstance(types, Mapping) or module not in types:
            raise BadInput(f"the quantization_config gives {module} no GGUF type")
        return GgufScheme(str(types[module]))


def as_blocks(module: str, tensor: QuantizedTensor) -> GgufTensor:
    """The same weight in ggml's blocks.

    Raises:
        BadInput: no block type holds it without loss.
    """
    if isinstance(tensor, IntTensor):
        return int_to_gguf(tensor, name=module)
    if isinstance(tensor, Fp4Tensor) and tensor.scheme == Fp4Scheme("mxfp4"):
        return fp4_to_gguf(tensor)
    if not isinstance(tensor, GgufTensor):
        raise BadInput(f"{module}: format gguf cannot hold {tensor.scheme.label} weights")
    return tensor


def _gguf_scheme(scheme: Scheme) -> GgufScheme:
    type_name = block_type_of(scheme)
    if type_name is None:
        raise BadInput(f"format gguf cannot hold {scheme.label} weights")
    return GgufScheme(type_name)
