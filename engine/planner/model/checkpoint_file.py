"""Predicted size of the safetensors files that `llmopt quantize` writes, headers included.

In memory only the tensors count. On disk each file begins with a JSON header that lists its tensors by
name, nearly a percent of a small model's size; so the tensor names are generated here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....quant.base.atomic_io import Entry, file_bytes
from ....quant.families.shapes import ModelShape
from .weights import WeightRecipe

_WRITTEN = ("llama", "mistral", "qwen2", "qwen3")

Named = tuple[str, Entry]


def checkpoint_file_bytes(shape: ModelShape, recipe: WeightRecipe) -> int | None:
    """Bytes of all weight files of a model quantized to int4 or int8; None for a model type or
    a recipe that `llmopt quantize` does not support."""
    if shape.family not in _WRITTEN or recipe.name not in ("int4", "int8"):
        return None
    writer = _Writer(shape, recipe)
    files = [dict(writer.layer(index)) for index in range(shape.num_layers)]
    return sum(map(file_bytes, (*files, dict(writer.others()))))


class _Writer:
    """Names, dtypes and shapes of the checkpoint's tensors."""

    def __init__(self, shape: ModelShape, recipe: WeightRecipe) -> None:
        self._shape, self._recipe = shape, recipe
        self._plain = "F32" if recipe.plain_bytes == 4 else "BF16"

    def others(self) -> Iterator[Named]:
        """Tensors outside the layers: embedding, output head, final norm."""
        shape = self._shape
        matrix = (shape.vocab_size, shape.hidden_size)
        yield "model.embed_tokens.weight", (self._plain, matrix)
        if not shape.tied:
            yield "lm_head.weight", (self._plain, matrix)
        yield "model.norm.weight", (self._plain, (shape.hidden_size,))

    def layer(self, index: int) -> Iterator[Named]:
        """The tensors of one layer."""
        shape, prefix = self._shape, f"model.layers.{index}"
        hidden, width = shape.hidden_size, shape.intermediate_size
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        for name, out_features, in_features, biased in (
            (f"{attention}.q_proj", queries, hidden, shape.qkv_bias),
            (f"{attention}.k_proj", keys, hidden, shape.qkv_bias),
            (f"{attention}.v_proj", keys, hidden, shape.qkv_bias),
            (f"{attention}.o_proj", hidden, queries, shape.output_bias),
            (f"{mlp}.gate_proj", width, hidden, shape.mlp_bias),
            (f"{mlp}.up_proj", width, hidden, shape.mlp_bias),
            (f"{mlp}.down_proj", hidden, width, shape.mlp_bias),
        ):
            yield from self._linear(name, out_features, in_features)
            if biased:
                yield f"{name}.bias", (self._plain, (out_features,))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (self._plain, (hidden,))
        if shape.qk_norm:
            for norm in ("q_norm", "k_norm"):
                yield f"{attention}.{norm}.weight", (self._plain, (shape.head_dim,))

    def _linear(self, name: str, out_features: int, in_features: int) -> Iterator[Named]:
        recipe = self._recipe
        bits = recipe.bits
        groups = 1 if recipe.group_size < 0 else in_features // recipe.group_size
        if recipe.bytes_per_tensor == 0:  # AWQ stores no weight_shape
            yield f"{name}.qweight", ("I32", (in_features, out_features * bits // 32))
            yield f"{name}.qzeros", ("I32", (groups, out_features * bits // 32))
            yield f"{name}.scales", ("F16", (groups, out_features))
            return
        yield f"{name}.weight_packed", ("I32", (out_features, in_features * bits // 32))
        yield f"{name}.weight_scale", (self._plain, (out_features, groups))
        yield f"{name}.weight_shape", ("I64", (2,))
        if recipe.zero_bits:
            yield f"{name}.weight_zero_point", ("I32", (out_features * bits // 32, groups))
