"""Block-wise fp8 format of DeepSeek-V3 (`quant_method: fp8`), read by transformers, vLLM, this engine.

Per linear `P`, as it is written here:

    P.weight            float8_e4m3fn  [out, in]
    P.weight_scale_inv  float32        [ceil(out/128), ceil(in/128)]   multiplier

Activations are quantized dynamically in groups of 128 channels. Only this form is read alike by all readers.
Per-tensor and per-channel scales are read under both names, `weight_scale` (vLLM) and `weight_scale_inv`
(transformers), with `input_scale` or `activation_scale` where activations are static.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.errors import BadInput
from ..base.scheme import Activations, Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..tensors.base import QuantizedTensor
from ..tensors.fp8 import Fp8Tensor
from .base import (
    SCALE_DTYPES,
    Config,
    TensorSource,
    expect_dtype,
    expect_matrix,
    expect_shape,
    only_scheme,
)

_BLOCK = [128, 128]
_SCHEME = FloatScheme("block", Activations("fp8", "group128"))
_SCALES = (".weight_scale_inv", ".weight_scale")
_INPUT_SCALES = (".input_scale", ".activation_scale")


class Fp8Format:
    """fp8 in 128 × 128 blocks."""

    name = "fp8"
    markers: tuple[str, ...] = _SCALES
    suffixes: tuple[str, ...] = (".weight", *_SCALES, *_INPUT_SCALES)

    def check_scheme(self, scheme: Scheme) -> None:
        if scheme != _SCHEME:
            raise BadInput(
                f"format fp8 holds {_SCHEME.label} weights only, not {scheme.label}: "
                "use --format compressed-tensors"
            )

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        # Blocks at the edge may be smaller, so any width fits.
        self.check_scheme(scheme)

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float32

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, Fp8Tensor)
        return {
            f"{module}.weight": tensor.values,
            f"{module}.weight_scale_inv": tensor.scales.contiguous(),
        }

    def unpack(self, module: str, source: TensorSource, config: Config) -> Fp8Tensor:
        name = f"{module}.weight"
        values = expect_matrix(name, source.tensor(name), torch.float8_e4m3fn)
        name = next(
            (module + ending for ending in _SCALES if module + ending in source),
            module + _SCALES[0],
        )
        scales = expect_dtype(name, source.tensor(name), *SCALE_DTYPES)
        scheme = self.scheme(config, module)
        if scheme.granularity == "block":
            expect_shape(name, scales, scheme.scale_shape(*values.shape))
        elif scales.numel() == 1:
            scales = scales.reshape(1, 1)
        else:  # the config does not tell per-tensor from per-channel scales
            scales = expect_shape(name, scales.reshape(-1, 1), (values.shape[0], 1))
            scheme = FloatScheme("channel", scheme.activations)
        return Fp8Tensor(values, scales, scheme, self._input_scale(module, source, scheme))

    @staticmethod
    def _input_scale(module: str, source: TensorSource, scheme: FloatScheme) -> torch.Tensor | None:
        if scheme.activations is None or scheme.activations.dynamic:
            return None
        name = next(
            (module + ending for ending in _INPUT_SCALES if module + ending in source),
            module + _INPUT_SCALES[0],
        )
        scale = expect_dtype(name, source.tensor(name), *SCALE_DTYPES)
        if scale.numel() != 1:
            raise BadInput(f"{name} has shape {tuple(scale.shape)}: only one scale is supported")
        return scale.to(torch.float32).reshape(1)

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        self.check_scheme(only_scheme(self.name, schemes))
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": _BLOCK,
            "modules_to_not_convert": list(ignore),
        }

    def scheme(self, config: Config, module: str) -> FloatScheme:
        block = config.get("weight_block_size")
        if block is not None and list(block) != _BLOCK:
            raise BadInput(
                f"quant_method fp8 with blocks of {block} is not supported: only {_BLOCK}"
            )
        static = config.get("activation_scheme", "dynamic") == "static"
        if block is not None and static:
            raise BadInput("quant_method fp8 with blocks and static activations is not supported")
        if block is not None:
            return _SCHEME
        granularity = "tensor" if static else "token"
        return FloatScheme("tensor", Activations("fp8", granularity, dynamic=not static))
