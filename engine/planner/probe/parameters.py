"""Parameters of a module by role, layer and part, tied ones once."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

from .facts import Parameters, Part

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_VISION = re.compile(
    r"vision|visual|image_|audio|sound|speech|vit(?:_|\.|$)|sam_|patch_embed|video|resampler|embed_vision"
)
_PROJECTOR = re.compile(
    r"multi_modal_projector|projector|connector|merger|aligner|mm_|embed_vision|embed_audio|vlm?_connector"
)
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|wg|classifier)(?:\.|$)")
_LATENT_DOWN = re.compile(r"q_a_proj|kv_a_proj|q_down|kv_down|fused_qkv_a|wq_a|wkv_a|indexer")
_KV = re.compile(r"(?:^|[._])(?:k_proj|v_proj|key|value|kv_proj)(?:\.|$)")


def measure_parameters(model: Any, num_experts: int, per_token: int) -> tuple[Parameters, ...]:
    """All parameters of a model, equal ones of a layer in one row.

    A parameter that several modules share is counted where it comes first. Of stacked experts, the first
    dimension counts them.
    """
    head = model.get_output_embeddings()
    output = None if head is None else getattr(head, "weight", None)
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    count: Counter[tuple[Part, str, str, int, int, int]] = Counter()
    for name, parameter in model.named_parameters():
        part = _part(name)
        layer = _layer(name) if part == "text" else -1
        role, shard, experts = _role(name, parameter, num_experts)
        if id(parameter) in tables:
            role, shard = "embedding", "ranks"
        elif parameter is output:
            role, shard = "head", "ranks"
        if part != "text":
            role, shard, experts = part, "whole", 1
        rows, columns = _matrix(parameter, experts)
        key = (part, role, shard, layer, rows, columns)
        count[key] += max(1, experts)
    return tuple(
        Parameters(*key, number, _used(key[1], number, num_experts, per_token))
        for key, number in count.items()
    )


def _part(name: str) -> Part:
    if re.search(r"(?:^|\.)(?:language_model|text_model|lm_head)\.", name):
        return "text"
    if _PROJECTOR.search(name):
        return "projector"
    return "vision" if _VISION.search(name) else "text"


def _layer(name: str) -> int:
    match = _LAYER.search(name)
    return int(match.group(1)) if match else -1


def _role(name: str, parameter: torch.Tensor, num_experts: int) -> tuple[str, str, int]:
    """Role, placement under tensor parallelism, and the experts that the parameter stacks."""
    in_experts = re.search(r"(?:^|\.)experts(?:\.|$)", name) is not None
    if parameter.dim() < 2:
        return ("bias" if name.endswith("bias") else "norm"), "whole", 1
    if in_experts and num_experts and parameter.dim() >= 2 and parameter.shape[0] == num_experts:
        stacked_bias = parameter.dim() == 2
        return ("expert_bias" if stacked_bias else "expert"), "ranks", num_experts
    if in_experts and num_experts:
        return "expert", "ranks", 1
    if _ROUTER.search(name) and num_experts and num_experts in parameter.shape:
        return "router", "whole", 1
    if _LATENT_DOWN.search(name):
        return "linear", "whole", 1
    return "linear", "kv_heads" if _KV.search(name) else "ranks", 1


def _matrix(parameter: torch.Tensor, experts: int) -> tuple[int, int]:
    """Rows and columns of one of the stacked matrices; further dimensions are columns."""
    shape = tuple(parameter.shape[1:]) if experts > 1 else tuple(parameter.shape)
    if not shape:
        return 1, 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns


def _used(role: str, number: int, num_experts: int, per_token: int) -> int:
    if role not in ("expert", "expert_bias") or not num_experts:
        return number
    return number * per_token // num_experts
