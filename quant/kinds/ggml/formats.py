"""GGUF as a weight format.

A module's blocks go into layer shards; `quant.gguf.assemble` merges the shards into one file at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...base.errors import BadInput
from ...base.scheme import Scheme
from ..base.format import Config, TensorSource, WeightFormat
from ..base.kind import Storage
from ..base.tensor import QuantizedTensor
from .raw import read_gguf
from .scheme import GgufScheme
from .tensor import GgufTensor, as_blocks

BLOCKS_SUFFIX = ".gguf_blocks"


class GgufFormat(WeightFormat):
    """ggml blocks, and weights that convert to blocks exactly."""

    name = "gguf"
    markers: tuple[str, ...] = (BLOCKS_SUFFIX,)
    suffixes: tuple[str, ...] = (BLOCKS_SUFFIX,)

    def check_scheme(self, scheme: Scheme) -> None:
        if scheme.ggml_type is None:
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

    def held(self, module: str, tensor: QuantizedTensor) -> GgufTensor:
        return as_blocks(module, tensor)

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


def _gguf_scheme(scheme: Scheme) -> GgufScheme:
    type_name = scheme.ggml_type
    if type_name is None:
        raise BadInput(f"format gguf cannot hold {scheme.label} weights")
    return GgufScheme(type_name)


STORAGE = Storage(formats=(GgufFormat(),), readers={"gguf": read_gguf})
