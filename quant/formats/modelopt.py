"""NVIDIA ModelOpt's format (`quant_method: modelopt`), read by TensorRT-LLM, vLLM and SGLang.

Per linear `P`, by `quant_algo`:

    FP8                        P.weight e4m3 [out, in], P.weight_scale and P.input_scale float32 scalars
    FP8_PER_CHANNEL_PER_TOKEN  P.weight e4m3 [out, in], P.weight_scale float32 [out]
    FP8_PB_WO                  P.weight e4m3 [out, in], P.weight_scale float32 [out/128, 1, in/128, 1]
    NVFP4                      P.weight uint8 [out, in/2], P.weight_scale e4m3 [out, in/16],
                               P.weight_scale_2 and P.input_scale float32 scalars
    W4A16_NVFP4                the same without P.input_scale

All scales are multipliers: `weight_scale_2 = max|w| / (448 * 6)` is the reciprocal of compressed-tensors'
global scale, and so is NVFP4's `input_scale`. With several algorithms `quant_algo` is `MIXED_PRECISION`, and
`quantized_layers` has each linear's. The same facts lie in `hf_quant_config.json`, which TensorRT-LLM reads.
Scales of an fp8 KV cache are `k_proj.k_scale` and `v_proj.v_scale`.

Source: `modelopt/torch/export` of NVIDIA's TensorRT-Model-Optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from ..base.errors import BadInput
from ..base.scheme import Activations, Scheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..tensors.base import QuantizedTensor
from ..tensors.fp4 import Fp4Tensor
from ..tensors.fp8 import Fp8Tensor
from .base import (
    SCALE_DTYPES,
    Config,
    TensorSource,
    expect_dtype,
    expect_matrix,
    expect_shape,
    pack_nibbles,
    unpack_nibbles,
)
from .ct_fp4 import block_scales, check_blocks, one_number

ModelOptScheme = FloatScheme | Fp4Scheme
ALGORITHMS: dict[str, ModelOptScheme] = {
    "FP8": FloatScheme("tensor", Activations("fp8", "tensor", dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": FloatScheme("channel", Activations("fp8")),
    "FP8_PB_WO": FloatScheme("block"),
    "NVFP4": Fp4Scheme("nvfp4", Activations("nvfp4", "group16", dynamic=False)),
    "W4A16_NVFP4": Fp4Scheme("nvfp4"),
}
"""What each `quant_algo` stores; vLLM and TensorRT-LLM quantize the inputs of FP8_PB_WO too, in groups."""

MIXED = "MIXED_PRECISION"
HF_QUANT_CONFIG = "hf_quant_config.json"
_LATENT = ("kv_a_proj_with_mqa", "kv_a_proj")


class ModelOptFormat:
    """ModelOpt's unified checkpoints: FP8 and NVFP4."""

    name = "modelopt"
    markers: tuple[str, ...] = (".weight_scale",)
    suffixes: tuple[str, ...] = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")

    def check_scheme(self, scheme: Scheme) -> None:
        _algorithm(scheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self.check_scheme(scheme)
        if isinstance(scheme, Fp4Scheme):
            check_blocks(module, in_features, scheme)

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float32

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        if isinstance(tensor, Fp4Tensor):
            assert tensor.global_scale is not None
            stored = {
                f"{module}.weight": pack_nibbles(tensor.codes),
                f"{module}.weight_scale": tensor.scales.contiguous(),
                f"{module}.weight_scale_2": (1 / tensor.global_scale).reshape(()),
            }
            if tensor.input_scale is not None:
                stored[f"{module}.input_scale"] = (1 / tensor.input_scale).reshape(())
            return stored
        assert isinstance(tensor, Fp8Tensor)
        scales = tensor.scales.contiguous()
        if tensor.scheme.granularity == "block":
            scales = scales[:, None, :, None]
        else:
            scales = (
                scales.flatten() if tensor.scheme.granularity == "channel" else scales.reshape(())
            )
        stored = {f"{module}.weight": tensor.values, f"{module}.weight_scale": scales}
        if tensor.input_scale is not None:
            stored[f"{module}.input_scale"] = tensor.input_scale.reshape(())
        return stored

    def unpack(self, module: str, source: TensorSource, config: Config) -> QuantizedTensor:
        scheme = self.scheme(config, module)
        name, scale_name = f"{module}.weight", f"{module}.weight_scale"
        static = scheme.activations is not None and not scheme.activations.dynamic
        input_scale = one_number(f"{module}.input_scale", source) if static else None
        if isinstance(scheme, Fp4Scheme):
            codes = unpack_nibbles(expect_matrix(name, source.tensor(name), torch.uint8))
            return Fp4Tensor(
                codes,
                block_scales(scale_name, source, codes, scheme),
                scheme,
                1 / one_number(f"{module}.weight_scale_2", source),
                None if input_scale is None else 1 / input_scale,
            )
        values = expect_matrix(name, source.tensor(name), torch.float8_e4m3fn)
        scales = expect_dtype(scale_name, source.tensor(scale_name), *SCALE_DTYPES)
        shape = scheme.scale_shape(*values.shape)
        if scheme.granularity == "block":
            scales = scales.flatten(2).flatten(0, 1) if scales.dim() == 4 else scales
        elif scales.dim() < 2:
            scales = scales.reshape(-1, 1)
        expect_shape(scale_name, scales, shape)
        return Fp8Tensor(values, scales.contiguous(), scheme, input_scale)

    def config(
        self,
        schemes: Mapping[str, Scheme],
        ignore: Sequence[str],
        *,
        kv_cache: str | None = None,
        kv_cache_strategy: str = "tensor",
    ) -> dict[str, Any]:
        """See `WeightFormat.config`: as ModelOpt writes it into `config.json`.

        Args:
            kv_cache: `fp8` where `k_proj.k_scale` and `v_proj.v_scale` are stored.
        """
        if kv_cache_strategy != "tensor":
            raise BadInput(
                f"--kv-cache-strategy {kv_cache_strategy}: format modelopt has a scale for each layer"
            )
        if kv_cache is not None and any(name.endswith(_LATENT) for name in schemes):
            raise BadInput(
                "--kv-cache: format modelopt has no names for scales of latent attention"
            )
        algorithms = {module: _algorithm(scheme) for module, scheme in schemes.items()}
        kinds = list(dict.fromkeys(algorithms.values()))
        groups = {f"group_{n}": _group(ALGORITHMS[kind]) for n, kind in enumerate(kinds)}
        config: dict[str, Any] = {
            "quant_method": self.name,
            "quant_algo": kinds[0] if len(kinds) == 1 else MIXED,
            "ignore": list(ignore),
            "producer": {"name": "llmopt", "version": version("llmopt")},
        }
        if len(kinds) == 1:
            config["config_groups"] = groups
        else:
            config["quantized_layers"] = {
                module: {"quant_algo": kind} | _group_size(ALGORITHMS[kind])
                for module, kind in algorithms.items()
            }
        if kv_cache is not None:
            config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return config

    def scheme(self, config: Config, module: str) -> ModelOptScheme:
        fields: Config = config.get("quantization", config)
        algorithm = str(fields.get("quant_algo")).upper()
        if algorithm == MIXED:
            fields = _layer_fields(fields.get("quantized_layers") or {}, module)
            algorithm = str(fields.get("quant_algo")).upper()
        if algorithm not in ALGORITHMS:
            raise BadInput(
                f"quant_method modelopt with quant_algo {algorithm} is not supported: "
                f"only {', '.join(ALGORITHMS)} and {MIXED}"
            )
        scheme = ALGORITHMS[algorithm]
        size = fields.get("group_size")
        if isinstance(scheme, Fp4Scheme) and size not in (None, scheme.block_size):
            raise BadInput(
                f"quant_method modelopt with {algorithm} in groups of {size} is not supported: only "
                f"{scheme.block_size}"
            )
        if algorithm == "NVFP4" and _without_inputs(config):
            return ALGORITHMS["W4A16_NVFP4"]
        return scheme

    def kv_scale_name(self, name: str) -> str:
        """The name on disk of a `self_attn.k_scale` or `self_attn.v_scale`."""
        parent, _, leaf = name.rpartition(".")
        return f"{parent}.{leaf[0]}_proj.{leaf}"


def hf_quant_config(config: Config) -> dict[str, Any]:
    """The content of `hf_quant_config.json`, from the `quantization_config` of `ModelOptFormat`."""
    algorithm = config["quant_algo"]
    fields: dict[str, Any] = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8" if config.get("kv_cache_scheme") else None,
    }
    if algorithm == MIXED:
        fields["quantized_layers"] = config["quantized_layers"]
    else:
        fields |= _group_size(ALGORITHMS[algorithm])
    fields["exclude_modules"] = config["ignore"]
    return {"producer": config["producer"], "quantization": fields}


def _algorithm(scheme: Scheme) -> str:
    """The `quant_algo` of a scheme; BadInput where there is none."""
    for algorithm, held in ALGORITHMS.items():
        if held == scheme:
            return algorithm
    labels = ", ".join(held.label for held in ALGORITHMS.values())
    raise BadInput(f"format modelopt cannot hold {scheme.label} weights: only {labels}")


def _group_size(scheme: ModelOptScheme) -> dict[str, int]:
    return {"group_size": scheme.block_size} if isinstance(scheme, Fp4Scheme) else {}


def _group(scheme: ModelOptScheme) -> dict[str, Any]:
    """An entry of `config_groups`, without which vLLM takes NVFP4 inputs as quantized."""
    fields = {"dynamic": False, "num_bits": scheme.bits, "type": "float"} | _group_size(scheme)
    inputs = None if scheme.activations is None else dict(fields)
    if inputs is not None:
        inputs["dynamic"] = bool(scheme.activations and scheme.activations.dynamic)
    return {"input_activations": inputs, "weights": fields, "targets": ["Linear"]}


def _layer_fields(layers: Mapping[str, Config], module: str) -> Config:
    """The entry of a linear, or of a module that it lies in, such as all experts of a layer."""
    name = module
    while name and name not in layers:
        name = name.rpartition(".")[0]
    if not name:
        raise BadInput(f"no entry of quantized_layers is for {module}")
    return layers[name]


def _without_inputs(config: Config) -> bool:
    """Whether every group leaves its inputs in 16 bits, which vLLM reads as W4A16_NVFP4."""
    groups = config.get("config_groups")
    return bool(groups) and all(not group.get("input_activations") for group in groups.values())
