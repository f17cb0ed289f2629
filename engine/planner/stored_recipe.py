"""The recipe of a checkpoint's weights, by what its `quantization_config` says of them.

Configs describe most linears in a few fields. What they leave to rules by module is refused, since a mean
would be a guess: `catalog` has the bytes of the files for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ...base.errors import BadInput
from ...quant.families.shapes import Role
from ...quant.kinds.ggml.scheme import GgufScheme
from .weights import BF16, RECIPES, SHAPE_RECORD_BYTES, WeightRecipe

_E8P_BITS = {"E8P12": 2, "E8P12RVQ3B": 3, "E8P12RVQ4B": 4}
_USUAL_SHAPE = (4096, 4096)  # whose bits per weight stand for those of every shape
_MODELOPT = {  # by `quant_algo`; quantized inputs have a scale next to the weight's
    "NVFP4": replace(RECIPES["nvfp4"], bytes_per_tensor=8),
    "W4A16_NVFP4": RECIPES["nvfp4"],
    "MXFP8": RECIPES["mxfp8"],
    "FP8": WeightRecipe("fp8", 8, scale_bits=0, bytes_per_tensor=8),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightRecipe("fp8", 8, scale_bits=32),
    "FP8_PB_WO": RECIPES["fp8-block"],
}
_TORCHAO = {
    "Int4WeightOnlyConfig": 4,
    "Int8WeightOnlyConfig": 8,
    "Int8DynamicActivationInt8WeightConfig": 8,
}
# A module of one layer that is left out, as Unsloth's 4-bit checkpoints of bitsandbytes have them.
_OF_A_LAYER = re.compile(r"layers\.\d+(\.(self_attn|mlp))?(\.\w+_proj)?$")


def stored_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config` of a checkpoint; of a wrapped model it may be its text model's."""
    text = config.get("text_config") or {}
    return config.get("quantization_config") or text.get("quantization_config")


def stored_recipe(config: Mapping[str, Any]) -> WeightRecipe:
    """The recipe of a checkpoint, from its `quantization_config`; bf16 without one. Raises BadInput: an
    unsupported quantization."""
    stored = stored_quantization(config)
    if not stored:
        return BF16
    method = str(stored.get("quant_method"))
    try:
        return _recipe_of(stored, method)
    except (AttributeError, KeyError, TypeError) as error:
        raise BadInput(
            f"the checkpoint's quantization_config of {method} is not read here ({error!r}): give --weights"
        ) from error


def _recipe_of(stored: Mapping[str, Any], method: str) -> WeightRecipe:
    if method in ("awq", "gptq") or "auto-round" in method:
        return _integers(stored, method)
    if method == "mxfp4":  # gpt-oss: the experts alone, a shared 8-bit exponent per 32 values
        return replace(RECIPES["mxfp4"], roles=("expert",))
    if method == "exl3":
        return _exl3(stored)
    if method == "gguf":
        return _gguf(stored)
    if method == "QUiP" and stored.get("codebook") in _E8P_BITS:
        bits = _E8P_BITS[stored["codebook"]]
        return WeightRecipe(f"e8p{bits}", bits, bytes_per_input=2, bytes_per_tensor=4)
    if (recipe := _with_roles_of(stored, method)) is None:
        raise BadInput(
            f"the checkpoint's quant_method {method!r} is not known here: give --weights"
        )
    return replace(recipe, roles=_roles(stored.get("quantization") or stored))


def _with_roles_of(stored: Mapping[str, Any], method: str) -> WeightRecipe | None:
    """The recipe of a method whose config lists the plain modules; None for a method that is not known."""
    if method in ("fp8", "fbgemm_fp8"):
        rows, columns = stored.get("weight_block_size") or (1, -1)
        return WeightRecipe("fp8", 8, columns, rows, scale_bits=32)
    if method == "compressed-tensors":
        return _compressed_tensors(stored)
    if method.startswith("modelopt"):
        return _modelopt(stored)
    if method == "quark" and not stored.get("layer_quant_config"):
        return _quark((stored.get("global_quant_config") or {}).get("weight"))
    if method == "hqq" and (codes := (stored.get("quant_config") or {}).get("weight_quant_params")):
        bits = codes["nbits"]
        width = Fraction(32, 10) if bits == 3 else bits  # ten codes of 3 bits in an int32
        return WeightRecipe(f"int{bits}", width, codes.get("group_size") or -1, zero_bits=16)
    if method == "torchao" and isinstance(kinds := stored.get("quant_type"), Mapping):
        kind = kinds.get("default") or {}
        if bits := _TORCHAO.get(kind.get("_type", "")):
            group = (kind.get("_data") or {}).get("group_size", 128) if bits == 4 else -1
            return WeightRecipe(f"int{bits}", bits, group, zero_bits=16 * (bits == 4))
    if any(map(_OF_A_LAYER.search, stored.get("llm_int8_skip_modules") or ())):
        raise BadInput("the checkpoint leaves modules of some layers plain: give --weights")
    from ...quant.kinds.registry import classes_in

    for kind in classes_in(method):
        scheme = kind.from_config(stored)
        if scheme is not None:
            width = scheme.bits_per_weight(*_USUAL_SHAPE)
            bits = Fraction(width).limit_denominator(1 << 14)
            return WeightRecipe(scheme.label, bits, scale_bits=0)
    return None


def _integers(stored: Mapping[str, Any], method: str) -> WeightRecipe:
    """AWQ's, GPTQ's and AutoRound's linears, which may have rules for modules of other bits."""
    bits, dtype = stored.get("bits", stored.get("w_bit", 4)), stored.get("data_type") or "int"
    group = stored.get("group_size", stored.get("q_group_size", 128))
    if not dtype.startswith("int"):
        raise BadInput(f"AutoRound's data_type {dtype!r} is not known here: give --weights")
    rules = {**(stored.get("dynamic") or {}), **(stored.get("extra_config") or {})}
    widths = {name: rule.get("bits", bits) for name, rule in rules.items() if rule}
    if {*widths.values()} - {bits, 16, 32}:
        raise BadInput("the checkpoint gives some modules other bits: give --weights")
    plain = [name for name, width in widths.items() if width >= 16]
    sizes = {"zero_bits": bits, "bytes_per_input": 4 * (method == "gptq")}  # with g_idx
    roles = _roles({**stored, "exclude": plain})
    return WeightRecipe(f"int{bits}", bits, group, roles=roles, **sizes)


def _compressed_tensors(stored: Mapping[str, Any]) -> WeightRecipe:
    groups = stored.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    if len(weights) != 1 or "num_bits" not in weights[0]:
        raise BadInput("the checkpoint mixes several quantization groups: give --weights")
    shape = SHAPE_RECORD_BYTES if stored.get("format") == "pack-quantized" else 0
    recipe = _of_arguments(weights[0], shape)
    inputs = any(group.get("input_activations") for group in groups.values())
    return _MODELOPT["NVFP4"] if inputs and recipe is RECIPES["nvfp4"] else recipe


def _of_arguments(weights: Mapping[str, Any], bytes_per_tensor: int = 0) -> WeightRecipe:
    """The recipe of compressed-tensors' `QuantizationArgs`."""
    bits, kind = weights["num_bits"], weights.get("type", "int")
    block = weights.get("block_structure") or (1, weights.get("group_size") or -1)
    rows, group = map(int, re.findall(r"-?\d+", block) if isinstance(block, str) else block)
    if kind == "float" and (bits == 4 or (bits, group) == (8, 32)):
        return RECIPES["mxfp8" if bits == 8 else "nvfp4" if group == 16 else "mxfp4"]
    zero_bits = 0 if weights.get("symmetric", True) else bits
    name = f"{'fp' if kind == 'float' else 'int'}{bits}"
    sizes = {"zero_bits": zero_bits, "bytes_per_tensor": bytes_per_tensor}
    return WeightRecipe(name, bits, group, rows, **sizes)


def _quark(weight: Any) -> WeightRecipe | None:
    """The recipe of AMD Quark's spec of weights, such as `fp4` in groups of 32, or `fp8_e4m3`."""
    fields = weight if isinstance(weight, Mapping) else {}
    dtype = re.fullmatch(r"(u?int|fp)([48])(?:_e4m3)?", str(fields.get("dtype")))
    if dtype is None:
        return None
    kind = "float" if dtype[1] == "fp" else "int"
    named = {"num_bits": int(dtype[2]), "type": kind, "group_size": fields.get("group_size")}
    return _of_arguments({**named, "symmetric": fields.get("symmetric") is not False})


# An attention, or its projections but the small ones of a linear attention, in a list of plain modules.
_LEFT_OUT = re.compile(r"attn(?:$|\W*\*|\.(?:q|q_b|qkv|o|in_proj_qkvz?|out)(?:_proj)?$)")
_OTHERS = re.compile(r"vision|visual|audio|talker|code2wav|encoder|mtp")


def _roles(fields: Mapping[str, Any]) -> tuple[Role, ...]:
    """Quantized roles: experts alone where the attention is left out (Kimi-K2.5, NVIDIA's NVFP4, Qwen3.5)."""
    keys = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
    keys += ("exclude", "skip_modules", "llm_int8_skip_modules")
    names = [str(name) for key in keys for name in fields.get(key) or ()]
    names += [rule for rule in fields.get("dynamic") or () if rule.startswith("-:")]
    left_out = [name for name in names if _LEFT_OUT.search(name) and not _OTHERS.search(name)]
    layers = {name.partition("layers.")[2].partition(".")[0] for name in left_out}
    return ("expert",) if "" in layers or len(layers) > 1 else ("linear", "expert")


def _gguf(stored: Mapping[str, Any]) -> WeightRecipe:
    """The blocks of most tensors."""
    types = list((stored.get("types") or {}).values())
    if not types:
        raise BadInput("the checkpoint's quantization_config has no types: give --weights")
    scheme = GgufScheme(max(sorted(set(types)), key=types.count))
    weights, num_bytes = scheme.block
    scale_bits = 8 * num_bytes - scheme.bits * weights
    return WeightRecipe(scheme.type, scheme.bits, group_size=weights, scale_bits=scale_bits)


def _exl3(stored: Mapping[str, Any]) -> WeightRecipe:
    """Mean bits of the linears, by their stored tensors where the config lists them, and the head's."""
    weights = num_words = 0
    for module, entry in (stored.get("tensor_storage") or {}).items():
        tensor = (entry.get("stored_tensors") or {}).get(f"{module}.trellis")
        if tensor and module != "lm_head":
            inputs, outputs, length = tensor["shape"]  # tiles of 256 weights, in int16 words
            weights += inputs * outputs * 256
            num_words += inputs * outputs * length
    bits = Fraction(16 * num_words, weights) if weights else Fraction(stored.get("bits", 16))
    return WeightRecipe(
        f"trellis{float(bits):.4g}",
        bits,
        bytes_per_input=2,
        bytes_per_tensor=4 * (stored.get("codebook") in ("mcg", "mul1")),  # its multiplier
        head_bits=stored.get("head_bits", 16),
    )


def _modelopt(stored: Mapping[str, Any]) -> WeightRecipe:
    algorithm = str((stored.get("quantization") or stored).get("quant_algo")).upper()
    if algorithm not in _MODELOPT:
        raise BadInput(f"ModelOpt's quant_algo {algorithm} is not known here: give --weights")
    return _MODELOPT[algorithm]
