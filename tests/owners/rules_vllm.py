"""vLLM's own rules of its kernels, asked for a CUDA device that is not there.

    python rules_vllm.py QUESTIONS.json ANSWERS.json

A question is a matrix on a rank (`format`, `bits`, `group_size`, `symmetric`, `shape` and `rank_shape` as
`[out, in]`, `experts`), a `kv_cache_scheme`, the `modelopt` config of a checkpoint with an excluded `plain` and
a quantized `linear`, or the `compressed_tensors` config of 4-bit floats; its answer is the kernel's name,
`accepted`, what vLLM's own parser makes of the config, or null.
"""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.utils import verify_group_size_divides_partition
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.model_executor.kernels.linear.mixed_precision import humming, marlin, triton_w4a16
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_wNa16 as wna16,
)
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.platforms.interface import DeviceCapability

CUDA = SimpleNamespace(
    is_cuda=lambda: True,
    is_cuda_alike=lambda: True,
    is_rocm=lambda: False,
    is_cpu=lambda: False,
    is_xpu=lambda: False,
    get_device_capability=lambda: DeviceCapability(8, 9),
)
KERNELS = {
    "Marlin": marlin.MarlinLinearKernel,
    "Triton": triton_w4a16.TritonW4A16LinearKernel,
    "Humming": humming.HummingLinearKernel,
}


def answer(question: dict[str, Any]) -> str | None:
    """The first kernel in vLLM's order that takes the matrix; None: it refuses."""
    if "kv_cache_scheme" in question:
        method = compressed_tensors.CompressedTensorsKVCacheMethod
        try:
            method.validate_kv_cache_scheme(question["kv_cache_scheme"])
        except NotImplementedError:
            return None
        return "accepted"
    if "modelopt" in question:
        return _modelopt(question)
    if "compressed_tensors" in question:
        return _fp4(question["compressed_tensors"])
    symmetric, group_size = question["symmetric"], question["group_size"]
    types = wna16.WNA16_SUPPORTED_TYPES_MAP if symmetric else wna16.WNA16_ZP_SUPPORTED_TYPES_MAP
    weight_type = types[question["bits"]]
    if question["experts"]:
        return _experts(question, weight_type)
    try:
        if group_size > 0:
            verify_group_size_divides_partition(question["rank_shape"][1], group_size)
        if question["format"] == "gptq":
            marlin_utils.verify_marlin_supported(weight_type, group_size)
    except ValueError:
        return None
    config = MPLinearLayerConfig(
        full_weight_shape=tuple(reversed(question["shape"])),
        partition_weight_shape=tuple(reversed(question["rank_shape"])),
        weight_type=weight_type,
        act_type=torch.bfloat16,
        group_size=group_size,
        zero_points=not symmetric,
    )
    names = ["Marlin"] if question["format"] == "gptq" else list(KERNELS)
    return next((name for name in names if KERNELS[name].can_implement(config)[0]), None)


def _modelopt(question: dict[str, Any]) -> str | None:
    """The class that takes a ModelOpt config, its algorithm and KV cache, and whether linears are told apart."""
    kinds = (
        modelopt.ModelOptFp8Config,
        modelopt.ModelOptNvFp4Config,
        modelopt.ModelOptMixedPrecisionConfig,
    )
    config = question["modelopt"]
    named = {"quant_method": "modelopt", **config}
    kind = next((k for k in kinds if k.override_quantization_method(named, None)), kinds[0])
    try:
        parsed = kind.from_config(config)
    except ValueError:
        return None
    if parsed.is_layer_excluded(question["linear"]) or not parsed.is_layer_excluded(
        question["plain"]
    ):
        return "its excluded modules are others"
    algorithm = getattr(parsed, "quant_method", None)
    if algorithm is None:
        algorithm = parsed._resolve_quant_algo(question["linear"])
    cache = getattr(parsed, "kv_cache_quant_method", getattr(parsed, "kv_cache_quant_algo", None))
    return f"{kind.__name__} {algorithm} KV {cache}"


def _fp4(config: dict[str, Any]) -> str:
    """The name of the scheme that vLLM reads from a config of compressed-tensors, and its inputs."""
    parsed = compressed_tensors.CompressedTensorsConfig.from_config(config)
    arguments = parsed.target_scheme_map["Linear"]
    weights, inputs = arguments["weights"], arguments["input_activations"]
    if parsed._is_nvfp4_format(weights):
        return "nvfp4" if inputs is None else f"nvfp4 {parsed._is_nvfp4_format(inputs)}"
    assert parsed._is_mxfp4(weights)
    return "mxfp4" if inputs is None else f"mxfp4 {parsed._is_mxfp4(inputs)}"


def _experts(question: dict[str, Any], weight_type: Any) -> str | None:
    out_features, in_features = question["rank_shape"]
    hidden, inner = (out_features, in_features) if question["down"] else (in_features, out_features)
    config = SimpleNamespace(hidden_dim=hidden, intermediate_size_per_partition_unpadded=inner)
    known = marlin_utils.query_marlin_supported_quant_types(not question["symmetric"])
    fits = marlin_utils.check_moe_marlin_supports_config(config, question["group_size"], True)
    return "Marlin" if fits and weight_type in known else None


def main() -> None:
    for module in (marlin_utils, marlin, triton_w4a16, humming):
        module.current_platform = CUDA
    humming.has_humming = lambda: True
    questions = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(question) for question in questions]))


if __name__ == "__main__":
    main()
