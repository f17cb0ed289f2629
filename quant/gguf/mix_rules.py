"""llama.cpp's rules of a mix: which weights get another type than most (`llama-quant.cpp`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ..kinds.ggml.scheme import GGUF_BLOCKS

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


class Category(Enum):
    """Kinds of tensors that the rules tell apart; fused q, k, v count as values."""

    OUTPUT = auto()
    ATTENTION_V = auto()
    ATTENTION_K = auto()
    ATTENTION_Q = auto()
    ATTENTION_OUTPUT = auto()
    FFN_UP = auto()
    FFN_GATE = auto()
    FFN_DOWN = auto()
    OTHER = auto()


_BY_NAME = {
    "attn_qkv": Category.ATTENTION_V,
    "attn_kv_b": Category.ATTENTION_V,
    "attn_v": Category.ATTENTION_V,
    "attn_k": Category.ATTENTION_K,
    "attn_q": Category.ATTENTION_Q,
    "attn_output": Category.ATTENTION_OUTPUT,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the rules ask of a model.

    Attributes:
        experts: of a layer; 0: dense.
        architecture: `general.architecture`.
        has_importance: whether importance weighs the errors.
    """

    layers: int
    heads: int = 1
    kv_heads: int = 1
    experts: int = 0
    architecture: str = "llama"
    has_importance: bool = False

    @property
    def shares_values(self) -> bool:
        """Whether at least four heads share a value projection."""
        return self.heads // self.kv_heads >= 4

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp takes it for a 70B model."""
        if self.architecture == "llama" and self.heads == self.kv_heads:
            return False
        return self.layers == _LAYERS_OF_70B.get(self.architecture)


def shape_of(
    config: Mapping[str, Any], architecture: str, *, has_importance: bool = False
) -> ModelShape:
    """The shape of a `config.json`."""
    heads = int(config["num_attention_heads"])
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    return ModelShape(
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
    for start, category in (
        ("ffn_up", Category.FFN_UP),
        ("ffn_gate", Category.FFN_GATE),
        ("ffn_down", Category.FFN_DOWN),
    ):
        if name.startswith(start):
            return category
    return _BY_NAME.get(name, Category.OTHER)


def default_head(mix: str, default: str, in_features: int) -> str:
    """The output head's type, which a tied embedding has too."""
    if mix.startswith("MXFP4") or in_features % GGUF_BLOCKS[default][0]:
        return "Q8_0"
    if mix in _LOW or mix == "IQ3_XXS":
        return "Q5_K"
    return default if default == "Q8_0" else "Q6_K"


def default_embedding(mix: str, default: str) -> str:
    """The type of an embedding with a head of its own."""
    if mix.startswith("MXFP4"):
        return "Q8_0"
    if mix in _LARGER_LOW or mix == "IQ3_XXS":
        return "IQ3_S"
    return "Q2_K" if mix in _LOW else default


def wanted(
    mix: str,
    default: str,
    category: Category,
    tensor: str,
    number: int,
    values: int,
    shape: ModelShape,
) -> str:
    """The type of a tensor of the decoder layers, before the fallback for its width.

    Args:
        default: the type that most weights of the mix have.
        number: how many tensors of the category came before, in llama.cpp's order.
        values: tensors of the category `ATTENTION_V` in the whole model.
    """
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


def _wanted_low(mix: str, default: str, category: Category, number: int, shape: ModelShape) -> str:
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


def _wanted_values(mix: str, default: str, number: int, values: int, shape: ModelShape) -> str:
    """The value projections."""
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


def _wanted_down(mix: str, default: str, layer: int, shape: ModelShape) -> str:
    """The down projections."""
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
