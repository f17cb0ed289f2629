"""Recipes of the types and methods that `llmopt quantize` has, by the names that it knows them by.

`Q4_K_M` is a mix of llama.cpp, whose rules give each weight its block type; `awq`, `exl3` or `hqq:3` are a
method or the format that it writes, with bits behind the name. What a recipe has no field for counts by the
scheme's bits per weight, its scales included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction

from ...quant.base.errors import BadInput
from ...quant.families.shapes import ModelShape
from ...quant.methods.options import SchemeOptions
from ...quant.methods.registry import METHODS
from .weights import RECIPES, UNQUANTIZED_BYTES, WeightRecipe, chosen_group, recipe_for

_SPELLED = re.compile(r"([a-z][a-z0-9_-]*?)(?:[:@-](\d+)(?:\.0)?(?:bits?|bpw)?)?")
_INT4 = {"awq": "awq", "rtn": "compressed-tensors", "autoround": "compressed-tensors"}
"""Methods whose int4 weights the planner knows to the byte, and the layouts that they are written in."""


def named_recipe(
    name: str,
    shape: ModelShape,
    group_size: int | None = None,
    *,
    symmetric: bool | None = None,
    file_format: str | None = None,
    plain_bytes: int = UNQUANTIZED_BYTES,
) -> WeightRecipe:
    """The recipe of one of the planner's formats, or of a type or a method of `llmopt quantize`.

    Raises:
        BadInput: no such name, or an option that it does not have.
    """
    if name.lower() in RECIPES:
        return recipe_for(
            name.lower(),
            shape,
            group_size,
            symmetric=symmetric,
            file_format=file_format,
            plain_bytes=plain_bytes,
        )
    from ...quant.gguf.mix import ALIASES, DEFAULT_GGUF_TYPE, GGUF_TYPES

    mix = DEFAULT_GGUF_TYPE if name.lower() == "gguf" else name.upper()
    if mix in (*GGUF_TYPES, *ALIASES):
        if (group_size, symmetric, file_format) != (None, None, None):
            raise BadInput(
                f"--weights {name}: a GGUF type has its own groups; leave their options out"
            )
        return _mixed(ALIASES.get(mix, mix), shape)
    found = _SPELLED.fullmatch(name.lower())
    method = None if found is None else _method(found[1])
    if found is None or method is None:
        close = get_close_matches(name.lower(), _names(), n=3, cutoff=0.5)
        offered = f"; close: {', '.join(close)}" if close else ""
        known = ", ".join(RECIPES)
        raise BadInput(
            f"no weight format {name!r}{offered}; choose {known}, a GGUF type such as Q4_K_M, or a method of "
            "quantize, with its bits as in exl3:3"
        )
    bits = None if found[2] is None else int(found[2])
    if method in ("gptq", *_INT4) and METHODS[method].choose_bits(bits) in (4, 8):
        base = recipe_for(
            "gptq" if method == "gptq" else f"int{bits or 4}",
            shape,
            group_size,
            symmetric=symmetric,
            file_format=file_format or (None if method == "gptq" or bits == 8 else _INT4[method]),
            plain_bytes=plain_bytes,
        )
        return base if method != "gptq" or bits in (None, 4) else replace(base, bits=8, zero_bits=8)
    if file_format is not None:
        raise BadInput(f"--format has no meaning for {name}")
    if METHODS[method].grouped:
        group_size = chosen_group(RECIPES["int4"], shape, group_size)
    options = SchemeOptions(bits=bits, group_size=group_size, symmetric=symmetric)
    scheme = METHODS[method].scheme(options)
    if method == "trellis":  # EXL3 with its default codebook, whose multiplier is stored
        label = f"trellis{scheme.bits}"
        return WeightRecipe(label, scheme.bits, bytes_per_input=2, bytes_per_tensor=4)
    linears = [t for t in shape.tensors() if t.role in ("linear", "expert")]
    bits_held = sum(
        t.num_elements * t.count * scheme.bits_per_weight(t.out_features, t.in_features)
        for t in linears
    )
    elements = sum(t.num_elements * t.count for t in linears)
    width = Fraction(bits_held / elements).limit_denominator(1 << 20)
    return WeightRecipe(scheme.label, width, scale_bits=0, plain_bytes=plain_bytes)


def _names() -> list[str]:
    from ...quant.gguf.mix import GGUF_TYPES

    return [*RECIPES, *METHODS, "exl3", *map(str.lower, GGUF_TYPES)]


def _method(name: str) -> str | None:
    """The method of that name, or the first that writes the format of that name."""
    if name in METHODS:
        return name
    return next((one.name for one in METHODS.values() if one.default_format == name), None)


def _mixed(mix: str, shape: ModelShape) -> WeightRecipe:
    """The mean bits of the linears under a mix of llama.cpp, and those of embedding and head."""
    from ...quant.gguf.mix import MixShape, embedding_type, output_type
    from ...quant.gguf.mix import mix as schemes_of
    from ...quant.kinds.ggml.scheme import GGUF_BLOCKS

    experts = shape.experts.count if shape.experts else 0
    rules = MixShape(shape.num_layers, shape.num_heads, shape.num_kv_heads, experts)
    modules = {name: size for name, size, _ in _modules(shape)}
    chosen = schemes_of(mix, modules, rules)
    elements = bits = Fraction(0)
    for name, (out_features, in_features), count in _modules(shape):
        width = out_features * in_features * count
        scheme = chosen.get(name)
        per_weight = 16.0 if scheme is None else scheme.bits_per_weight(out_features, in_features)
        elements, bits = elements + width, bits + width * Fraction(per_weight)

    def bits_of(block: str | None) -> Fraction:
        if block is None:
            return Fraction(16)
        weights, size = GGUF_BLOCKS[block]
        return Fraction(8 * size, weights)

    head = bits_of(output_type(mix, shape.hidden_size))
    embedding = bits_of(embedding_type(mix, shape.hidden_size))
    return WeightRecipe(
        mix,
        bits / elements,
        scale_bits=0,
        head_bits=head,
        embedding_bits=head if shape.tied else embedding,
    )


def _modules(shape: ModelShape) -> Iterator[tuple[str, tuple[int, int], Fraction]]:
    """The linears of each layer under the names of a Llama's, with their sizes and their mean number; those
    of an architecture of its own count as attention outputs, which have the type of most weights."""
    counts: Counter[tuple[str, int, int, str]] = Counter()
    for t in shape.tensors():
        if t.role in ("linear", "expert"):
            counts[t.role, t.out_features, t.in_features, t.shard] += t.count
    for (role, out_features, in_features, shard), count in counts.items():
        per_layer = Fraction(count, shape.num_layers)
        parts = _parts(shape, role, (out_features, in_features), shard, per_layer)
        for index in range(shape.num_layers):
            for part in parts:
                name = f"model.layers.{index}.{part}"
                yield name, (out_features, in_features), per_layer / len(parts)


def _parts(
    shape: ModelShape, role: str, size: tuple[int, int], shard: str, per_layer: Fraction
) -> list[str]:
    """The names that linears of one size have in a layer."""
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    if role == "linear" and shard == "kv_heads":
        return ["self_attn.k_proj", "self_attn.v_proj"]
    if role == "linear" and size in ((queries, hidden), (hidden, queries)) and per_layer <= 2:
        both = ["self_attn.q_proj", "self_attn.o_proj"]
        return both if per_layer == 2 else both[size == (hidden, queries) :][:1]
    if size[1] == hidden and not shape.latent:
        return ["mlp.gate_proj", "mlp.up_proj"]
    is_down = size[0] == hidden and (role == "expert" or not shape.latent)
    return ["mlp.down_proj"] if is_down else ["self_attn.o_proj"]
