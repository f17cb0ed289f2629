"""Bytes of a model's weights under a quantization, summed over its tensors.

Never parameters × bits: linear layers and experts take the quantized bits and their scales, while
embeddings, output head, norms, router and biases stay in 16 bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ...quant.errors import BadInput
from .shapes import ModelShape, Role, Tensor

UNQUANTIZED_BYTES = 2
GROUP_SIZES = (128, 64, 32, 16)  # as `llmopt quantize` tries them


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """How the quantized tensors are stored.

    A scale of `scale_bits` (and a zero point of `zero_bits`) serves `group_size` input channels of
    `rows_per_scale` output channels; group size -1 means all input channels.
    """

    name: str
    bits: int
    group_size: int = -1
    rows_per_scale: int = 1
    scale_bits: int = 16
    zero_bits: int = 0
    roles: tuple[Role, ...] = ("linear", "expert")

    @property
    def label(self) -> str:
        """For people: `int4 g128 asymmetric`."""
        if self.bits == 16:
            return "bf16"
        group = f" g{self.group_size}" if self.group_size > 0 else " per channel"
        return self.name + group + (" asymmetric" if self.zero_bits else "")

    def tensor_bytes(self, tensor: Tensor) -> int:
        """Bytes of one of these tensors on disk and in memory."""
        if self.bits == 16 or tensor.role not in self.roles:
            return tensor.num_elements * UNQUANTIZED_BYTES
        groups = 1 if self.group_size < 0 else ceil(tensor.in_features / self.group_size)
        scales = groups * ceil(tensor.out_features / self.rows_per_scale)
        return ceil(
            (tensor.num_elements * self.bits + scales * (self.scale_bits + self.zero_bits)) / 8
        )


BF16 = WeightRecipe("bf16", 16)
RECIPES = {
    "bf16": BF16,
    "fp8": WeightRecipe("fp8", 8),
    "int8": WeightRecipe("int8", 8),
    "int4": WeightRecipe("int4", 4, group_size=128, zero_bits=4),
}


def recipe_for(name: str, shape: ModelShape, group_size: int | None = None) -> WeightRecipe:
    """The recipe called `name` for this model. Without a group size, int4 takes the largest of
    `GROUP_SIZES` that divides every quantized width, as `llmopt quantize` does.

    Raises:
        BadInput: an unknown name, or a group size that does not divide a width or has no meaning here.
    """
    if name not in RECIPES:
        raise BadInput(f"no weight format {name!r}: choose {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    if recipe.group_size < 0:
        if group_size is not None:
            raise BadInput(f"--group-size has no meaning for {name}: only int4 has groups")
        return recipe
    widths = sorted({t.in_features for t in shape.tensors() if t.role in recipe.roles})
    if group_size is None:
        fitting = [size for size in GROUP_SIZES if not any(width % size for width in widths)]
        if not fitting:
            raise BadInput(f"none of the group sizes {GROUP_SIZES} divides every width of {widths}")
        return replace(recipe, group_size=fitting[0])
    if group_size < 1:
        raise BadInput(f"--group-size {group_size}: a positive number of input channels is needed")
    for width in widths:
        if width % group_size:
            raise BadInput(f"--group-size {group_size} does not divide a layer's width of {width}")
    return replace(recipe, group_size=group_size)


def stored_recipe(config: Mapping[str, Any]) -> WeightRecipe:
    """The recipe of a checkpoint, from its own `quantization_config`; bf16 where it has none.

    Raises:
        BadInput: a quantization whose bytes are not known here.
    """
    stored = config.get("quantization_config")
    if not stored:
        return BF16
    method = stored.get("quant_method")
    if method in ("awq", "gptq"):
        bits = stored.get("bits", stored.get("w_bit", 4))
        return WeightRecipe(f"int{bits}", bits, stored.get("group_size", 128), zero_bits=bits)
    if method == "mxfp4":  # gpt-oss: the experts alone, a shared 8-bit exponent per 32 values
        return WeightRecipe("mxfp4", 4, group_size=32, scale_bits=8, roles=("expert",))
    if method == "fp8":
        rows, columns = stored.get("weight_block_size") or (1, -1)
        return WeightRecipe("fp8", 8, columns, rows, scale_bits=32)
    if method == "compressed-tensors":
        return _compressed_tensors(stored)
    raise BadInput(f"the checkpoint's quant_method {method!r} is not known here: give --weights")


def _compressed_tensors(stored: Mapping[str, Any]) -> WeightRecipe:
    groups = stored.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    if len(weights) != 1 or "num_bits" not in weights[0]:
        raise BadInput("the checkpoint mixes several quantization groups: give --weights")
    scheme = weights[0]
    bits, kind = scheme["num_bits"], scheme.get("type", "int")
    zero_bits = 0 if scheme.get("symmetric", True) else bits
    name = f"{'fp' if kind == 'float' else 'int'}{bits}"
    return WeightRecipe(name, bits, scheme.get("group_size") or -1, zero_bits=zero_bits)


def weight_bytes(shape: ModelShape, recipe: WeightRecipe) -> int:
    """Bytes of all weights."""
    return sum(recipe.tensor_bytes(t) * t.count for t in shape.tensors())


def weight_bytes_per_rank(shape: ModelShape, recipe: WeightRecipe, ranks: int) -> int:
    """Bytes of the weights on each of `ranks` tensor-parallel ranks.

    K and V projections are split no further than there are KV heads; norms, router and biases are whole
    on every rank.
    """
    parts = {"ranks": ranks, "kv_heads": min(ranks, shape.num_kv_heads), "whole": 1}
    return ceil(sum(recipe.tensor_bytes(t) * t.count / parts[t.shard] for t in shape.tensors()))
