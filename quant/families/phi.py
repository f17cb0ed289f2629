"""Phi 3 and 4: stacked projections, LongRoPE, a part of each head rotated."""

from __future__ import annotations

from .choices import same_rope
from .family import GGUF_NORMS, Choices, GgufRules, ModelFamily
from .shape_rules import Config, ShapeRules, sliding_everywhere
from .shapes import ModelShape
from .spec_parts import Names


def _phi3(shape: ModelShape, config: Config) -> Choices:
    options = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if options.get("rope_type", options.get("type")) in ("su", "yarn"):  # earlier names
        config = {**config, "rope_parameters": {**options, "rope_type": "longrope"}}
    part = config.get("partial_rotary_factor", options.get("partial_rotary_factor", 1.0))
    return {
        **same_rope(shape, {"original_max_position_embeddings": 4096, **config}),
        "names": Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "rotary_width": int(shape.head_dim * part),
    }


FAMILIES = (
    ModelFamily(
        "phi3",
        ShapeRules({"max_position_embeddings": 4096}, sliding_everywhere),
        _phi3,
        gguf=GgufRules(
            "phi3",
            stems=(
                *GGUF_NORMS,
                *("self_attn.qkv_proj", "self_attn.o_proj"),
                *("mlp.gate_up_proj", "mlp.down_proj"),
            ),
            constants={"partial_rotary_factor": 1.0},
            slides=True,
        ),
    ),
)
