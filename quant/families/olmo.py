"""OLMo 2 and 3, EXAONE 4: norms after attention and MLP, none before."""

from __future__ import annotations

from .choices import POST_NORMS, QK_NORM, is_sliding, ropes
from .family import GGUF_ATTENTION, GGUF_MLP, GGUF_QK_NORMS, Choices, GgufRules, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape


def _olmo(_: ModelShape, config: Config) -> Choices:
    return {**ropes(config), "names": POST_NORMS, "qk_norm_whole": True}


def _exaone4(_: ModelShape, config: Config) -> Choices:
    has_rope = None if config.get("sliding_window") is None else is_sliding(config)
    return {**ropes(config, has_rope), "names": POST_NORMS}


FAMILIES = (
    ModelFamily(
        "olmo2",
        QK_NORM,
        _olmo,
        gguf=GgufRules(
            "olmo2",
            stems=(
                *("post_attention_layernorm", "post_feedforward_layernorm"),
                *(*GGUF_ATTENTION, *GGUF_QK_NORMS, *GGUF_MLP),
            ),
        ),
        plain_tokenizer=True,
    ),
    ModelFamily("olmo3", QK_NORM, _olmo),
    ModelFamily("exaone4", ShapeRules(qk_norm=True), _exaone4),
)
