"""The block type of each weight: llama.cpp's rules for its mixes (Q4_K_M, ...)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..base.errors import BadInput
from ..base.scheme import GGUF_BLOCKS, GgufScheme

# The type that most weights of a mix have, and llama.cpp's number for `general.file_type`.
GGUF_TYPES = {
    "Q4_0": ("Q4_0", 2),
    "Q4_1": ("Q4_1", 3),
    "Q5_0": ("Q5_0", 8),
    "Q5_1": ("Q5_1", 9),
    "Q8_0": ("Q8_0", 7),
    "Q4_K": ("Q4_K", 14),
    "Q5_K": ("Q5_K", 16),
    "Q6_K": ("Q6_K", 18),
    "Q4_K_M": ("Q4_K", 15),
    "Q5_K_M": ("Q5_K", 17),
}
DEFAULT_GGUF_TYPE = "Q4_K_M"

# llama.cpp's fallback types where rows are no multiple of 256.
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEAD_TYPES = {"Q8_0": "Q8_0"}  # all others: Q6_K
_SENSITIVE = ("self_attn.v_proj", "mlp.down_proj")


def mix(
    type_name: str, modules: Mapping[str, tuple[int, int]], num_layers: int
) -> dict[str, GgufScheme]:
    """The scheme of each linear of the decoder layers, and of `lm_head` where it is among them.

    In the mixes that end in `_M`, `v_proj` and `down_proj` get Q6_K in the first and the last eighth of
    the layers and in every third between. Where a type does not fit the width, the next larger type
    with blocks of 32 replaces it.

    Args:
        type_name: one of `GGUF_TYPES`.
        modules: `(out_features, in_features)` by full name, such as `model.layers.3.mlp.down_proj`.

    Returns:
        By full name; without modules whose inputs are no multiple of 32, which stay unquantized.

    Raises:
        BadInput: no such type.
    """
    _known(type_name)
    chosen = {
        name: fitting(_wanted(type_name, name, num_layers), in_features)
        for name, (_, in_features) in modules.items()
    }
    return {name: GgufScheme(block) for name, block in chosen.items() if block is not None}


def mix_notes(type_name: str, modules: Mapping[str, tuple[int, int]], num_layers: int) -> list[str]:
    """One line for each kind of fallback that `mix` made."""
    _known(type_name)
    counts: dict[tuple[str, str | None, int], int] = {}
    for name, (_, in_features) in modules.items():
        wanted = _wanted(type_name, name, num_layers)
        used = fitting(wanted, in_features)
        if used != wanted:
            key = wanted, used, in_features
            counts[key] = counts.get(key, 0) + 1
    return [
        f"note: {count} linears have {width} inputs, which {wanted} does not fit: "
        + (f"they become {used}" if used else "they stay unquantized")
        for (wanted, used, width), count in counts.items()
    ]


def output_type(type_name: str, in_features: int) -> str | None:
    """The block type of the output head, and of a tied embedding; None: none fits."""
    return fitting(_HEAD_TYPES.get(type_name, "Q6_K"), in_features)


def embedding_type(type_name: str, in_features: int) -> str | None:
    """The block type of an untied embedding; None: none fits."""
    return fitting(_known(type_name), in_features)


def fitting(block: str, in_features: int) -> str | None:
    """`block`, or its fallback for rows of this width."""
    for candidate in (block, _FALLBACKS.get(block)):
        if candidate and in_features % GGUF_BLOCKS[candidate][0] == 0:
            return candidate
    return None


def _known(type_name: str) -> str:
    if type_name not in GGUF_TYPES:
        raise BadInput(f"no GGUF type {type_name!r}: choose one of {', '.join(GGUF_TYPES)}")
    return GGUF_TYPES[type_name][0]


def _wanted(type_name: str, module: str, num_layers: int) -> str:
    """The block type of a linear by the mix's rules, before width fallbacks."""
    if module == "lm_head":
        return _HEAD_TYPES.get(type_name, "Q6_K")
    layer = _LAYER.match(module)
    if type_name.endswith("_M") and module.endswith(_SENSITIVE) and layer:
        index, eighth = int(layer[1]), num_layers // 8
        if index < eighth or index >= 7 * num_layers // 8 or (index - eighth) % 3 == 2:
            return "Q6_K"
    return _known(type_name)
