"""The block type of each weight of a GGUF file: llama.cpp's mixes and their rules (`llama-quant.cpp`).

Some weights of a mix get another type than most: the rules ask the category of a tensor, its place among
those of the category, and the shape of the model; a width that a type does not divide falls back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...base.errors import BadInput
from ...base.option import offer
from ..kinds.ggml.scheme import GGUF_BLOCKS, GgufScheme
from .architecture import to_gguf
from .container import GgufFile

_LOW = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
_LARGER_LOW = ("IQ2_S", "IQ2_M")
# Mixes whose attention output is Q5_K in models of eight experts.
_EIGHT_EXPERTS_OUTPUT = (
    *("Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S"),
    *("IQ3_M", "IQ4_XS"),
)
_OUTPUTS = {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}
# Layers of the models in which eight heads share a value projection.
_LAYERS_OF_70B = {"llama": 80, "qwen2": 80, "olmo": 80}

# Kinds of tensors that the rules tell apart; fused q, k, v count as values.
Category = Enum(
    "Category",
    "OUTPUT ATTENTION_V ATTENTION_K ATTENTION_Q ATTENTION_OUTPUT FFN_UP FFN_GATE FFN_DOWN OTHER",
)

_BY_NAME = {
    **dict.fromkeys(("attn_qkv", "attn_kv_b", "attn_v"), Category.ATTENTION_V),
    "attn_k": Category.ATTENTION_K,
    "attn_q": Category.ATTENTION_Q,
    "attn_output": Category.ATTENTION_OUTPUT,
}
_BY_START = {f"ffn_{name}": Category[f"FFN_{name.upper()}"] for name in ("up", "gate", "down")}


@dataclass(frozen=True, slots=True)
class MixShape:
    """Shape of a model for the rules: `experts` of a layer (0: dense), weighed errors: `has_importance`."""

    layers: int
    heads: int = 1
    kv_heads: int = 1
    experts: int = 0
    architecture: str = "llama"
    has_importance: bool = False

    @property
    def shares_values(self) -> bool:
        return self.heads // self.kv_heads >= 4

    @property
    def is_70b(self) -> bool:
        if self.architecture == "llama" and self.heads == self.kv_heads:
            return False
        return self.layers == _LAYERS_OF_70B.get(self.architecture)


def shape_of(
    config: Mapping[str, Any], architecture: str, *, has_importance: bool = False
) -> MixShape:
    heads = int(config["num_attention_heads"])
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    return MixShape(
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        experts=next((int(config[key]) for key in experts if config.get(key)), 0),
        architecture=architecture,
        has_importance=has_importance,
    )


def category_of(tensor: str) -> Category:
    """The category of a tensor by its GGUF name, such as `blk.3.attn_v`."""
    if tensor in ("output", "lm_head"):
        return Category.OUTPUT
    name = tensor.split(".")[-1]
    starts = (category for start, category in _BY_START.items() if name.startswith(start))
    return next(starts, _BY_NAME.get(name, Category.OTHER))


def default_head(mix: str, default: str, in_features: int) -> str:
    """The output head's type, which a tied embedding has too."""
    if mix.startswith("MXFP4") or in_features % GGUF_BLOCKS[default][0]:
        return "Q8_0"
    if mix in _LOW or mix == "IQ3_XXS":
        return "Q5_K"
    return default if default == "Q8_0" else "Q6_K"


def wanted(
    mix: str,
    default: str,
    category: Category,
    tensor: str,
    number: int,
    values: int,
    shape: MixShape,
) -> str:
    """Type of a layer's tensor, the `number`th of its category, before the fallback for its width. `default`
    is the type of most weights, `values` the number of `ATTENTION_V` tensors."""
    if mix == "MXFP4_MOE":
        return "MXFP4" if tensor.endswith("_exps") else "Q8_0"
    if mix in _LOW:
        return _wanted_low(mix, default, category, number, shape)
    if category is Category.ATTENTION_V:
        return _wanted_values(mix, default, number, values, shape)
    if category in (Category.ATTENTION_K, Category.ATTENTION_Q):
        if shape.experts == 8 and category is Category.ATTENTION_K:
            return "Q8_0"
        return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(mix, default)
    layer = int(tensor.split(".")[1]) if shape.experts > 1 else number
    if category is Category.FFN_DOWN:
        return _wanted_down(mix, default, layer, shape)
    if category is Category.ATTENTION_OUTPUT:
        if shape.experts == 8:
            return "Q5_K" if mix in _EIGHT_EXPERTS_OUTPUT else default
        return _OUTPUTS.get(mix, default)
    inner = shape.layers // 8 <= layer < 7 * shape.layers // 8
    if category in (Category.FFN_GATE, Category.FFN_UP) and mix == "IQ3_XS" and inner:
        return "IQ3_XXS"
    return default


def _wanted_low(mix: str, default: str, category: Category, number: int, shape: MixShape) -> str:
    """Mixes of one and two bits."""
    larger = "IQ3_S" if mix in _LARGER_LOW else "Q2_K"
    if category is Category.ATTENTION_V:
        return "Q4_K" if shape.shares_values or shape.experts >= 4 else larger
    if category is Category.ATTENTION_K and shape.experts == 8:
        return "Q4_K"
    if category is Category.FFN_DOWN and number < shape.layers // 8:
        return larger
    if category is Category.ATTENTION_OUTPUT:
        if shape.experts == 8:
            return "Q5_K"
        if mix in ("IQ1_S", "IQ1_M"):
            return "IQ2_XXS"
        return "IQ3_S" if mix in _LARGER_LOW else default
    return default


def _wanted_values(mix: str, default: str, number: int, values: int, shape: MixShape) -> str:
    block = default
    if mix == "Q2_K":
        block = "Q4_K" if shape.shares_values else "Q3_K"
    elif mix == "IQ3_XXS":
        narrow = "IQ3_XXS" if shape.has_importance else "IQ3_S"
        block = "Q4_K" if shape.shares_values else narrow
    elif (mix in ("Q2_K_S", "IQ3_XS", "IQ3_S") and shape.shares_values) or mix == "IQ3_M":
        block = "Q4_K"
    elif mix == "Q3_K_M":
        block = "Q5_K" if number < 2 else "Q4_K"
    elif mix == "Q3_K_L" or (mix in ("IQ4_NL", "IQ4_XS") and shape.shares_values):
        block = "Q5_K"
    elif mix in ("Q4_K_M", "Q5_K_M") and has_more_bits(number, values):
        block = "Q6_K"
    elif mix == "Q4_K_S" and number < 4:
        block = "Q5_K"
    if shape.is_70b and block in ("Q3_K", "Q4_K"):
        block = "Q5_K"
    return "Q8_0" if shape.experts == 8 else block


def _wanted_down(mix: str, default: str, layer: int, shape: MixShape) -> str:
    first, layers = layer < shape.layers // 8, shape.layers
    if mix == "Q2_K":
        return "Q3_K"
    if mix == "Q2_K_S" and first:
        return "Q4_K"
    if mix == "IQ3_XXS" and not shape.has_importance:
        return "Q4_K" if first else "Q3_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    if mix == "IQ3_M" and (first or (shape.experts == 8 and has_more_bits(layer, layers))):
        return "Q4_K"
    if mix == "Q3_K_L":
        return "Q5_K"
    if mix in ("Q4_K_M", "Q5_K_M") and has_more_bits(layer, layers):
        return "Q6_K"
    if mix in ("IQ4_NL", "IQ4_XS") and first and not shape.has_importance:
        return "Q5_K"
    if mix == "Q4_K_S" and first:
        return "Q5_K"
    if mix in ("Q4_0", "Q5_0") and first and shape.has_importance:
        return "Q4_1" if mix == "Q4_0" else "Q5_1"
    return default


def has_more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


_MIXES = (
    "Q4_0 2, Q4_1 3, Q5_0 8, Q5_1 9, Q8_0 7, Q2_K 10, Q2_K_S 21 Q2_K, Q3_K_S 11 Q3_K, Q3_K_M 12 Q3_K, "
    "Q3_K_L 13 Q3_K, Q4_K_S 14 Q4_K, Q4_K_M 15 Q4_K, Q5_K_S 16 Q5_K, Q5_K_M 17 Q5_K, Q6_K 18, IQ1_S 24, "
    "IQ1_M 31, IQ2_XXS 19, IQ2_XS 20, IQ2_S 28 IQ2_XS, IQ2_M 29 IQ2_S, IQ3_XXS 23, IQ3_XS 22 IQ3_S, "
    "IQ3_S 26, IQ3_M 27 IQ3_S, IQ4_NL 25, IQ4_XS 30, "
    # MXFP4 is every linear here; llama.cpp's own has it in experts alone.
    "MXFP4 38, MXFP4_MOE 38 MXFP4"
)
_MIX_FIELDS = [entry.split() for entry in _MIXES.split(", ")]
# The type that most weights of a mix have, and llama.cpp's number for `general.file_type`.
GGUF_TYPES = {name: (types[0] if types else name, int(n)) for name, n, *types in _MIX_FIELDS}
# What llama.cpp's own quantizer takes these names for.
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
DEFAULT_GGUF_TYPE = "Q4_K_M"

# llama.cpp's fallback types where rows are no multiple of 256.
_FALLBACKS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"), "IQ4_NL"),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


def names_mix(name: str) -> bool:
    """True if the name is one of a GGUF type, or near one: `Q4_KM` is, for `mix_name` to refuse."""
    is_like_one = re.match(r"i?q\d", name, re.IGNORECASE) is not None
    return is_like_one or ALIASES.get(name.upper(), name.upper()) in GGUF_TYPES


def mix_name(type_name: str) -> str:
    """The mix that a name means, in any case: `Q4_K_M` for `q4_k`, as in llama.cpp; else BadInput."""
    name = ALIASES.get(type_name.upper(), type_name.upper())
    if name not in GGUF_TYPES:
        raise BadInput(f"no GGUF type {type_name!r}: {offer(type_name, GGUF_TYPES)}")
    return name


def mix_of(block: str) -> str:
    name = ALIASES.get(block, block)
    if GGUF_TYPES.get(name, ("", 0))[0] == block:
        return name
    return next(mix for mix, (default, _) in GGUF_TYPES.items() if default == block)


def file_type(file: GgufFile, types: Collection[str]) -> str:
    """The mix of a file: by `general.file_type`, else of the blocks that most matrices are in."""
    declared = file.metadata.get("general.file_type")
    named = [mix for mix, (_, number) in GGUF_TYPES.items() if number == declared]
    return named[0] if named else mix_of(max(sorted(set(types)), key=list(types).count))


def mix(
    type_name: str, modules: Mapping[str, tuple[int, int]], shape: MixShape
) -> dict[str, GgufScheme]:
    """The scheme of each linear of the decoder layers, and of `lm_head` where it is among them.

    Where a type does not fit the width, llama.cpp's fallback with blocks of 32 replaces it; modules whose
    inputs are no multiple of 32 are left out. `modules` are `(out_features, in_features)` by full name.

    Raises:
        BadInput: no such type.
    """
    blocks = _wanted(type_name, modules, shape)
    chosen = {name: fitting(block, modules[name][1]) for name, block in blocks.items()}
    return {name: GgufScheme(block) for name, block in chosen.items() if block is not None}


def mix_notes(type_name: str, modules: Mapping[str, tuple[int, int]], shape: MixShape) -> list[str]:
    """One line for each kind of fallback that `mix` made."""
    widths = ((b, modules[name][1]) for name, b in _wanted(type_name, modules, shape).items())
    counts = Counter((b, used, width) for b, width in widths if (used := fitting(b, width)) != b)
    return [
        f"note: {count} linears have {width} inputs, which {block} does not fit: "
        + (f"they become {used}" if used else "they stay unquantized")
        for (block, used, width), count in counts.items()
    ]


def output_type(type_name: str, in_features: int) -> str | None:
    """The block type of the output head, and of a tied embedding; None: none fits."""
    name = mix_name(type_name)
    return fitting(default_head(name, GGUF_TYPES[name][0], in_features), in_features)


def embedding_type(type_name: str, in_features: int) -> str | None:
    """The block type of an untied embedding; None: none fits."""
    name = mix_name(type_name)
    if name.startswith("MXFP4"):
        return fitting("Q8_0", in_features)
    if name in _LARGER_LOW or name == "IQ3_XXS":
        return fitting("IQ3_S", in_features)
    return fitting("Q2_K" if name in _LOW else GGUF_TYPES[name][0], in_features)


def fitting(block: str, in_features: int) -> str | None:
    for candidate in (block, _FALLBACKS.get(block)):
        if candidate and in_features % GGUF_BLOCKS[candidate][0] == 0:
            return candidate
    return None


def _wanted(
    type_name: str, modules: Mapping[str, tuple[int, int]], shape: MixShape
) -> dict[str, str]:
    """The block type of each linear by the mix's rules, before width fallbacks."""
    name = mix_name(type_name)
    default = GGUF_TYPES[name][0]
    # The experts of a layer are one tensor, and so share one type.
    tensors: dict[str, list[str]] = {}
    for module in modules:
        tensors.setdefault(to_gguf(module, shape.architecture) or module, []).append(module)
    ordered = sorted(tensors, key=_file_order)
    categories = {tensor: category_of(tensor) for tensor in ordered}
    values = sum(category is Category.ATTENTION_V for category in categories.values())
    # Tensors of a category before this one, as llama.cpp's rules count layers.
    counts, chosen = Counter[Category](), {}
    for tensor in ordered:
        category = categories[tensor]
        if category is Category.OUTPUT:
            block = default_head(name, default, modules[tensors[tensor][0]][1])
        else:
            block = wanted(name, default, category, tensor, counts[category], values, shape)
            counts[category] += 1
        chosen |= dict.fromkeys(tensors[tensor], block)
    return {module: chosen[module] for module in modules}


def _file_order(tensor: str) -> tuple[int, str]:
    # llama.cpp's order: by layer, then by name.
    parts = tensor.split(".")
    return (int(parts[1]), tensor) if parts[0] == "blk" else (-1, tensor)
