"""Smoothing maps of vision blocks: which linears share an input, and where scales may be folded.

By the names of transformers' modules: CLIP and SigLIP (LLaVA, Gemma 3, SmolVLM), Pixtral, InternVL, Qwen-VL.
What is not named here is quantized without scales. A test holds each fold against the module itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .families import Family, Fold

_SHARED: tuple[tuple[str, ...], ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("feed_forward.gate_proj", "feed_forward.up_proj"),
)
_FOLDS = (
    Fold("layer_norm1", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Fold("layer_norm2", ("mlp.fc1",)),
    Fold("self_attn.v_proj", ("self_attn.out_proj",)),
    Fold("attention_norm", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
    Fold("attention.v_proj", ("attention.o_proj",)),
    Fold("ffn_norm", ("feed_forward.gate_proj", "feed_forward.up_proj")),
    Fold("feed_forward.up_proj", ("feed_forward.down_proj",)),
    Fold("layernorm_before", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
    Fold("attention.v_proj", ("attention.projection_layer",)),
    Fold("layernorm_after", ("mlp.fc1",)),
    Fold("norm1", ("attn.qkv",)),
    Fold("norm2", ("mlp.gate_proj", "mlp.up_proj")),
    Fold("norm2", ("mlp.fc1",)),
    Fold("norm2", ("mlp.linear_fc1",)),
    Fold("mlp.up_proj", ("mlp.down_proj",)),
)


def vision_family(linears: Sequence[str], names: Collection[str]) -> Family:
    """The family of a block or projector.

    Args:
        linears: in the order of its modules.
        names: its tensors.
    """
    groups: list[tuple[str, ...]] = []
    for linear in linears:
        shared = next((group for group in _SHARED if linear in group), (linear,))
        shared = shared if set(shared) <= set(linears) else (linear,)
        groups += [shared] if shared not in groups else []
    folds = tuple(
        fold
        for fold in _FOLDS
        if f"{fold.source}.weight" in names and set(fold.targets) <= set(linears)
    )
    return Family(tuple(groups), folds, frozenset())
