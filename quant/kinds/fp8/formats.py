"""How e4m3 weights are stored: in DeepSeek-V3's block-wise format, compressed-tensors and ModelOpt.

Layouts in `docs/formats.md`. Of `quant_method: fp8` only blocks of 128 × 128 are written, as all readers
agree on them. Scales per tensor and channel are read under vLLM's and transformers' names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ....base.errors import BadInput
from ...base.scheme import Activations, Scheme
from ..base.containers import (
    CompressedLayouts,
    ModelOptAlgorithms,
    input_scale_part,
    one_number,
    read_input_scale,
    read_scales,
    read_weights,
    unsupported,
)
from ..base.format import (
    Config,
    Stored,
    TensorSource,
    WeightFormat,
    expect_shape,
    only_scheme,
)
from ..base.kind import EXPERTS, LoaderRules, RankMatrix, Storage
from ..base.raw import Array, Entries, Raw, read_array, read_number, read_numbers
from ..base.raw import read_input_scale as raw_input_scale
from ..base.tensor import SCALE_DTYPES, QuantizedTensor
from .kind import Fp8Tensor
from .scheme import BLOCK, FloatScheme

FLOAT = "float-quantized"
_BLOCK = [128, 128]
_SCHEME = FloatScheme("block", Activations("fp8", "group128"))
_SCALES = (".weight_scale_inv", ".weight_scale")
_INPUT_SCALES = (".input_scale", ".activation_scale")


class Fp8Format(WeightFormat):
    """fp8 in 128 × 128 blocks."""

    name = "fp8"
    markers: tuple[str, ...] = _SCALES
    suffixes: tuple[str, ...] = (".weight", *_SCALES, *_INPUT_SCALES)
    # The tensors' dtypes say what the scales are, and which further modules have codes.
    irrelevant: tuple[str, ...] = ("scale_fmt", "modules_to_convert")
    plain_list = "modules_to_not_convert"

    def check_scheme(self, scheme: Scheme) -> None:
        if scheme != _SCHEME:
            raise BadInput(
                f"format fp8 holds {_SCHEME.label} weights only, not {scheme.label}: "
                "use --format compressed-tensors"
            )

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float32

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        assert isinstance(tensor, Fp8Tensor)
        return {
            f"{module}.weight": tensor.values,
            f"{module}.weight_scale_inv": tensor.scales.contiguous(),
        }

    def unpack(self, module: str, source: TensorSource, config: Config) -> Fp8Tensor:
        stored = Stored(source, module)
        values = stored.matrix("weight", torch.float8_e4m3fn)
        ending, of_inputs = (
            next((name[1:] for name in names if name[1:] in stored), names[0][1:])
            for names in (_SCALES, _INPUT_SCALES)
        )
        scales = stored.tensor(ending, *SCALE_DTYPES)
        scheme = self.scheme(config, module)
        if scheme.granularity == "block":
            stored.tensor(ending, shape=scheme.scale_shape(*values.shape))
        elif scales.numel() == 1:
            scales = scales.reshape(1, 1)
        else:  # the config does not tell per-tensor from per-channel scales
            name = f"{module}.{ending}"
            scales = expect_shape(name, scales.reshape(-1, 1), (values.shape[0], 1))
            scheme = FloatScheme("channel", scheme.activations)
        input_scale = read_input_scale(stored, scheme.activations, of_inputs)
        return Fp8Tensor(values, scales, scheme, input_scale)

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        self.check_scheme(only_scheme(self.name, schemes))
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": _BLOCK,
            "modules_to_not_convert": list(ignore),
        }

    def read_config(self, config: Config, modules: Collection[str]) -> None:
        self.scheme(config, min(modules))
        self.expect(config, fmt=("e4m3", "e4m3fn", "float8_e4m3fn"), expert_dtype=("fp8",))
        self.expect(config, activation_scheme=("dynamic", "static"))

    def scheme(self, config: Config, module: str) -> FloatScheme:
        block = config.get("weight_block_size")
        if block is not None and list(block) != _BLOCK:
            what = f"quant_method fp8 with blocks of {block}"
            raise BadInput(f"{what} is not supported: only {_BLOCK}")
        static = config.get("activation_scheme", "dynamic") == "static"
        if block is not None and static:
            raise BadInput("quant_method fp8 with blocks and static activations is not supported")
        if block is not None:
            return _SCHEME
        granularity = "tensor" if static else "token"
        return FloatScheme("tensor", Activations("fp8", granularity, dynamic=not static))

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        """`quant_method: fp8`, with either name of the scales."""
        names = [f"{module}.weight_scale_inv", f"{module}.weight_scale"]
        scale_name = next((name for name in names if name in entries), names[0])
        static = config.get("activation_scheme") == "static"
        extra = raw_input_scale(entries, module) if static else {}
        return read_float8(entries, module, scale_name, extra)


class FloatLayouts(CompressedLayouts):
    """e4m3 in compressed-tensors: `float-quantized`."""

    layouts = (FLOAT,)
    naive = FLOAT

    def describes(self, weights: Config) -> bool:
        return weights.get("type") == "float" and weights.get("num_bits") != 4

    def layout_of(self, scheme: FloatScheme) -> str | None:
        return FLOAT if scheme.activations is None or scheme.activations.kind == "fp8" else None

    def weights(self, scheme: FloatScheme) -> dict[str, Any]:
        fields = {"type": "float", "symmetric": True, "strategy": scheme.granularity}
        return fields | ({"block_structure": _BLOCK} if scheme.granularity == "block" else {})

    def scheme(self, layout: str, group: Config) -> FloatScheme:
        weights, strategy, activations = read_weights(layout, group, "float", (8,))
        if strategy not in ("tensor", "channel", "block"):
            raise unsupported(f"the {strategy!r} strategy for fp8 weights")
        if strategy == "block" and weights.get("block_structure") not in (_BLOCK, "128x128"):
            raise unsupported(f"blocks of {weights.get('block_structure')}: only {_BLOCK}")
        return FloatScheme(strategy, activations)

    def pack(self, module: str, tensor: Fp8Tensor) -> dict[str, torch.Tensor]:
        scales = tensor.scales.view(1) if tensor.scheme.granularity == "tensor" else tensor.scales
        stored = {f"{module}.weight": tensor.values, f"{module}.weight_scale": scales.contiguous()}
        return stored | input_scale_part(module, tensor.input_scale)

    def unpack(self, stored: Stored, layout: str, scheme: FloatScheme) -> Fp8Tensor:
        values = stored.matrix("weight", torch.float8_e4m3fn)
        scales = read_scales(stored, scheme.scale_shape(*values.shape))
        name = "weight_zero_point"
        if name in stored and bool(stored.tensor(name).float().any()):
            raise BadInput(f"{stored.module}.{name} holds zero points, which fp8 weights have not")
        return Fp8Tensor(values, scales, scheme, read_input_scale(stored, scheme.activations))

    def read_raw(
        self, entries: Entries, module: str, layout: str | None, group: dict[str, Any]
    ) -> Raw:
        activations = group.get("input_activations") or {"dynamic": True}
        extra = {} if activations.get("dynamic") else raw_input_scale(entries, module)
        return read_float8(entries, module, f"{module}.weight_scale", extra)


class Fp8Algorithms(ModelOptAlgorithms):
    """e4m3 in ModelOpt's checkpoints; vLLM and TensorRT-LLM quantize FP8_PB_WO's inputs too, in groups."""

    algorithms: Mapping[str, Scheme] = {
        "FP8": FloatScheme("tensor", Activations("fp8", "tensor", dynamic=False)),
        "FP8_PER_CHANNEL_PER_TOKEN": FloatScheme("channel", Activations("fp8")),
        "FP8_PB_WO": FloatScheme("block"),
    }
    raw_dtype = "F8_E4M3"

    def pack(self, module: str, tensor: Fp8Tensor) -> dict[str, torch.Tensor]:
        scales = tensor.scales.contiguous()
        shapes = {"block": scales[:, None, :, None].shape, "channel": (-1,), "tensor": ()}
        scales = scales.reshape(shapes[tensor.scheme.granularity])
        stored = {f"{module}.weight": tensor.values, f"{module}.weight_scale": scales}
        if tensor.input_scale is not None:
            stored[f"{module}.input_scale"] = tensor.input_scale.reshape(())
        return stored

    def unpack(self, stored: Stored, scheme: FloatScheme) -> Fp8Tensor:
        input_scale = one_number(stored, "input_scale") if scheme.has_static_inputs else None
        values = stored.matrix("weight", torch.float8_e4m3fn)
        scales = stored.tensor("weight_scale", *SCALE_DTYPES)
        if scheme.granularity == "block":
            scales = scales.flatten(2).flatten(0, 1) if scales.dim() == 4 else scales
        elif scales.dim() < 2:
            scales = scales.reshape(-1, 1)
        name = f"{stored.module}.weight_scale"
        expect_shape(name, scales, scheme.scale_shape(*values.shape))
        return Fp8Tensor(values, scales.contiguous(), scheme, input_scale)

    def read_raw(self, entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        name, extra = f"{module}.input_scale", dict[str, Array]()
        if name in entries:
            extra["input_scale"] = read_number(entries, name)
        return read_float8(entries, module, f"{module}.weight_scale", extra)


class FloatRules(LoaderRules):
    """vLLM's fp8 kernels; blocks are split between ranks and merged matrices only at their borders."""

    merges_without_codes = True

    def vllm_kernel(
        self, scheme: FloatScheme, matrix: RankMatrix, format_name: str
    ) -> tuple[bool, str]:
        if scheme.granularity != "block":
            return True, "CUTLASS W8A8" if scheme.activations else "FP8 Marlin"
        if format_name == "modelopt" and matrix.in_features % BLOCK:
            return False, f"FP8_PB_WO needs inputs in multiples of {BLOCK} on a rank"
        split = matrix.parts if matrix.ranks > 1 and not matrix.row_parallel else matrix.parts[:-1]
        if EXPERTS in matrix.module:
            split = [matrix.in_features] if matrix.row_parallel else matrix.parts
        needs = f"fp8 blocks need {{}} in multiples of {BLOCK}"
        if any(out % BLOCK for out in split):
            return False, f"{needs.format('outputs')} where they are split or merged"
        if matrix.ranks > 1 and matrix.row_parallel and matrix.in_features % BLOCK:
            return False, f"{needs.format('inputs')} on a rank"
        if format_name == "modelopt":
            return True, "block W8A8, inputs quantized too"
        return True, "CUTLASS W8A8" if scheme.activations else "FP8 Marlin"

    def vllm_tried(self, scheme: FloatScheme, format_name: str) -> bool:
        return format_name == "compressed-tensors" and scheme.granularity == "channel"

    def vllm_tried_with_images(self, scheme: FloatScheme) -> bool:
        return True

    def merged_right(self, scheme: FloatScheme) -> bool:
        return scheme.granularity != "block"


def read_float8(entries: Entries, module: str, scale_name: str, extra: dict[str, Array]) -> Raw:
    """e4m3 values and their scales: `[1, 1]`, `[out, 1]`, or one for each 128 × 128 block."""
    values = read_array(entries[f"{module}.weight"], "F8_E4M3")
    stored, scales = read_numbers(entries[scale_name])
    out_features, in_features = values.shape
    blocks = (-(-out_features // 128), -(-in_features // 128))
    if scales.ndim == 4:  # ModelOpt's `[blocks, 1, blocks, 1]`
        scales = scales.reshape(scales.shape[0] * scales.shape[1], -1)
    if scales.size == 1:
        shape = (1, 1)
    elif scales.size == out_features and scales.shape != blocks:
        shape = (out_features, 1)
    elif scales.shape == blocks:
        shape = blocks
    else:
        raise ValueError(f"scales {scales.shape} do not fit {values.shape} weights")
    # e4m3fn's only NaN has all seven bits below the sign set; there is no infinity.
    problems = ("has weights that are NaN",) if ((values & 127) == 127).any() else ()
    parts = {"values": values, "scales": stored.reshape(shape)} | extra
    return Raw(parts, {"scales": scales.reshape(shape)}, (out_features, in_features), problems)


STORAGE = Storage(
    formats=(Fp8Format(),),
    compressed_tensors=FloatLayouts(),
    modelopt=Fp8Algorithms(),
    rules=FloatRules(),
)
