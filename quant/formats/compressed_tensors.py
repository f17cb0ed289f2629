"""The `pack-quantized` format of compressed-tensors, read by transformers, vLLM and this engine.

Per linear `P`, for `b`-bit codes and `G` groups per row:

    P.weight_packed      int32        [out, in*b/32]   code + 2**(b-1), lowest bits first along `in`
    P.weight_scale       model dtype  [out, G]
    P.weight_zero_point  int32        [out*b/32, G]    asymmetric only; packed along `out`
    P.weight_shape       int64        [2]              (out, in)

The library counts codes from -2**(b-1) and adds 2**(b-1) before it packs; ours count from 0, so what
lies on disk is our code as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import BadInput
from ..scheme import PER_CHANNEL, IntScheme, Scheme
from ..tensors.base import QuantizedTensor
from ..tensors.integer import IntTensor
from .base import (
    Config,
    TensorSource,
    check_groups,
    expect_shape,
    int_scheme,
    only_scheme,
    pack_words,
    unpack_words,
)

_LAYOUT = "pack-quantized"
_BITS = (4, 8)


def _unsupported(what: str) -> BadInput:
    return BadInput(f"quant_method compressed-tensors with {what} is not supported")


class CompressedTensorsFormat:
    """compressed-tensors `pack-quantized`: int4 or int8 weights, 16-bit activations."""

    name = "compressed-tensors"
    markers: tuple[str, ...] = (".weight_packed",)
    suffixes: tuple[str, ...] = (
        ".weight_packed",
        ".weight_scale",
        ".weight_zero_point",
        ".weight_shape",
    )

    def check_scheme(self, scheme: Scheme) -> None:
        scheme = int_scheme(self.name, scheme)
        if scheme.bits not in _BITS or scheme.activations is not None or scheme.permuted:
            raise BadInput(f"format compressed-tensors cannot hold {scheme.label} weights yet")

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        scheme = int_scheme(self.name, scheme)
        per_word = 32 // scheme.bits
        widths = [("inputs", in_features)]
        if not scheme.symmetric:
            widths.append(("outputs", out_features))  # zero codes are packed along the outputs
        for side, width in widths:
            if width % per_word:
                raise BadInput(
                    f"format compressed-tensors cannot pack {module}: its {width} {side} are no "
                    f"multiple of {per_word}; leave it out with --ignore, or use --bits 8"
                )
        check_groups(module, in_features, scheme)

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return weights

    def loads_in(self, scheme: Scheme) -> str:
        if int_scheme(self.name, scheme).symmetric:
            return "llmopt, vLLM, transformers (with compressed-tensors)"
        return (
            "llmopt, vLLM, transformers (with compressed-tensors, and only when asked with "
            "CompressedTensorsConfig(dequantize=True))"
        )

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, IntTensor)
        bits = tensor.scheme.bits
        packed = {
            f"{module}.weight_packed": pack_words(tensor.codes, bits),
            f"{module}.weight_scale": tensor.scales.contiguous(),
            f"{module}.weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
        }
        if not tensor.scheme.symmetric:
            zeros = pack_words(tensor.zeros.t(), bits).t().contiguous()
            packed[f"{module}.weight_zero_point"] = zeros
        return packed

    def unpack(self, module: str, source: TensorSource, config: Config) -> IntTensor:
        scheme = self.scheme(config, module)
        words = source.tensor(f"{module}.weight_packed")
        shape = expect_shape(
            f"{module}.weight_shape", source.tensor(f"{module}.weight_shape"), (2,)
        )
        out_features, in_features = (int(width) for width in shape)
        check_groups(module, in_features, scheme)
        groups = scheme.num_groups(in_features)
        per_word = 32 // scheme.bits
        expect_shape(f"{module}.weight_packed", words, (out_features, -(-in_features // per_word)))
        scales = expect_shape(
            f"{module}.weight_scale",
            source.tensor(f"{module}.weight_scale"),
            (out_features, groups),
        )
        if scheme.symmetric:
            zeros = torch.full((out_features, groups), scheme.middle, dtype=torch.uint8)
        else:
            name = f"{module}.weight_zero_point"
            packed = expect_shape(name, source.tensor(name), (-(-out_features // per_word), groups))
            zeros = unpack_words(packed.t().contiguous(), scheme.bits)
            zeros = zeros[:, :out_features].t().contiguous()
        return IntTensor(
            # The library pads a row to whole words, so a foreign file may hold more fields than codes.
            codes=unpack_words(words, scheme.bits)[:, :in_features].contiguous(),
            scales=scales,
            zeros=zeros,
            scheme=scheme,
        )

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        scheme = int_scheme(self.name, only_scheme(self.name, schemes))
        weights: dict[str, Any] = {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": "channel",
            "dynamic": False,
        }
        if scheme.group_size != PER_CHANNEL:
            weights |= {"strategy": "group", "group_size": scheme.group_size}
        return {
            "quant_method": "compressed-tensors",
            "format": _LAYOUT,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }

    def scheme(self, config: Config, module: str) -> IntScheme:
        layout = config.get("format")
        if layout != _LAYOUT:
            raise BadInput(
                f"quant_method compressed-tensors with format {layout!r} is not supported: "
                f"only {_LAYOUT!r}"
            )
        if config.get("kv_cache_scheme"):
            raise _unsupported("a quantized KV cache")
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise _unsupported("no config_groups")
        schemes = {self._group_scheme(group) for group in groups.values()}
        if len(schemes) != 1:
            raise _unsupported("several schemes in one model")
        return schemes.pop()

    @staticmethod
    def _group_scheme(group: Config) -> IntScheme:
        weights = group.get("weights") or {}
        if group.get("input_activations") or group.get("output_activations"):
            raise _unsupported("quantized activations")
        if weights.get("type", "int") != "int" or weights.get("num_bits") not in _BITS:
            raise _unsupported(f"{weights.get('num_bits')}-bit {weights.get('type')} weights")
        if weights.get("actorder") == "group":
            raise _unsupported("permuted groups (actorder: group)")
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
        if strategy not in ("group", "channel"):
            raise _unsupported(f"the {strategy!r} strategy")
        return IntScheme(
            bits=weights["num_bits"],
            group_size=int(weights["group_size"]) if strategy == "group" else PER_CHANNEL,
            symmetric=bool(weights.get("symmetric", True)),
        )
