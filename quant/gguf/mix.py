"""The block type of each weight: llama.cpp's rules for its mixes (`llama_tensor_get_type`, Q4_K_M, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..base.errors import BadInput
from ..kinds.ggml.scheme import GGUF_BLOCKS, GgufScheme
from .mix_rules import Category, ModelShape, category_of, default_embedding, default_head, wanted
from .names import to_gguf

# The type that most weights of a mix have, and llama.cpp's number for `general.file_type`.
GGUF_TYPES = {
    "Q4_0": ("Q4_0", 2),
    "Q4_1": ("Q4_1", 3),
    "Q5_0": ("Q5_0", 8),
    "Q5_1": ("Q5_1", 9),
    "Q8_0": ("Q8_0", 7),
    "Q2_K": ("Q2_K", 10),
    "Q2_K_S": ("Q2_K", 21),
    "Q3_K_S": ("Q3_K", 11),
    "Q3_K_M": ("Q3_K", 12),
    "Q3_K_L": ("Q3_K", 13),
    "Q4_K_S": ("Q4_K", 14),
    "Q4_K_M": ("Q4_K", 15),
    "Q5_K_S": ("Q5_K", 16),
    "Q5_K_M": ("Q5_K", 17),
    "Q6_K": ("Q6_K", 18),
    "IQ1_S": ("IQ1_S", 24),
    "IQ1_M": ("IQ1_M", 31),
    "IQ2_XXS": ("IQ2_XXS", 19),
    "IQ2_XS": ("IQ2_XS", 20),
    "IQ2_S": ("IQ2_XS", 28),
    "IQ2_M": ("IQ2_S", 29),
    "IQ3_XXS": ("IQ3_XXS", 23),
    "IQ3_XS": ("IQ3_S", 22),
    "IQ3_S": ("IQ3_S", 26),
    "IQ3_M": ("IQ3_S", 27),
    "IQ4_NL": ("IQ4_NL", 25),
    "IQ4_XS": ("IQ4_XS", 30),
    "MXFP4": ("MXFP4", 38),  # every linear; llama.cpp's own has MXFP4 in experts alone
    "MXFP4_MOE": ("MXFP4", 38),
}
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


def mix_name(type_name: str) -> str:
    """The mix that a name means: `Q4_K_M` for `Q4_K`, as in llama.cpp.

    Raises:
        BadInput: no such type.
    """
    name = ALIASES.get(type_name, type_name)
    if name not in GGUF_TYPES:
        raise BadInput(f"no GGUF type {type_name!r}: choose one of {', '.join(GGUF_TYPES)}")
    return name


def mix_of(block: str) -> str:
    """The mix of a file whose weights are mostly of one block type."""
    name = ALIASES.get(block, block)
    if GGUF_TYPES.get(name, ("", 0))[0] == block:
        return name
    return next(mix for mix, (default, _) in GGUF_TYPES.items() if default == block)


def mix(
    type_name: str, modules: Mapping[str, tuple[int, int]], shape: ModelShape
) -> dict[str, GgufScheme]:
    """The scheme of each linear of the decoder layers, and of `lm_head` where it is among them.

    Where a type does not fit the width, llama.cpp's fallback with blocks of 32 replaces it.

    Args:
        type_name: one of `GGUF_TYPES`.
        modules: `(out_features, in_features)` by full name, such as `model.layers.3.mlp.down_proj`.

    Returns:
        By full name; without modules whose inputs are no multiple of 32, which stay unquantized.

    Raises:
        BadInput: no such type.
    """
    chosen = {
        name: fitting(block, modules[name][1])
        for name, block in _wanted(type_name, modules, shape).items()
    }
    return {name: GgufScheme(block) for name, block in chosen.items() if block is not None}


def mix_notes(
    type_name: str, modules: Mapping[str, tuple[int, int]], shape: ModelShape
) -> list[str]:
    """One line for each kind of fallback that `mix` made."""
    counts: dict[tuple[str, str | None, int], int] = {}
    for name, block in _wanted(type_name, modules, shape).items():
        in_features = modules[name][1]
        used = fitting(block, in_features)
        if used != block:
            key = block, used, in_features
            counts[key] = counts.get(key, 0) + 1
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
    return fitting(default_embedding(name, GGUF_TYPES[name][0]), in_features)


def fitting(block: str, in_features: int) -> str | None:
    """`block`, or its fallback for rows of this width."""
    for candidate in (block, _FALLBACKS.get(block)):
        if candidate and in_features % GGUF_BLOCKS[candidate][0] == 0:
            return candidate
    return None


@dataclass(slots=True)
class _Counts:
    """Tensors of a category that were seen before this one, as llama.cpp's rules count layers."""

    seen: dict[Category, int] = field(default_factory=dict)

    def next(self, category: Category) -> int:
        number = self.seen.get(category, 0)
        self.seen[category] = number + 1
        return number


def _wanted(
    type_name: str, modules: Mapping[str, tuple[int, int]], shape: ModelShape
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
    counts, chosen = _Counts(), {}
    for tensor in ordered:
        category = categories[tensor]
        if category is Category.OUTPUT:
            block = default_head(name, default, modules[tensors[tensor][0]][1])
        else:
            number = counts.next(category)
            block = wanted(name, default, category, tensor, number, values, shape)
        chosen |= dict.fromkeys(tensors[tensor], block)
    return {module: chosen[module] for module in modules}


def _file_order(tensor: str) -> tuple[int, str]:
    """llama.cpp's order: by layer, then by name."""
    parts = tensor.split(".")
    return (int(parts[1]), tensor) if parts[0] == "blk" else (-1, tensor)
