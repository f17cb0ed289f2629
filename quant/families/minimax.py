"""MiniMax-M2: experts with corrected sigmoid routing, QK-norm over whole projections."""

from __future__ import annotations

from dataclasses import replace

from .choices import experts, ropes
from .family import Choices, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape
from .spec_parts import Names, RouterSpec

_BLOCK = "block_sparse_moe"


def _minimax_m2(shape: ModelShape, config: Config) -> Choices:
    return {
        **ropes(config),
        "shape": replace(shape, experts=experts(config, shape.intermediate_size)),
        "names": Names(
            router=f"{_BLOCK}.gate",
            correction=f"{_BLOCK}.e_score_correction_bias",
            experts=f"{_BLOCK}.experts",
            expert=("w1", "w3", "w2"),
        ),
        "router": RouterSpec(scoring="sigmoid", correction=True),
        "qk_norm_whole": True,
    }


FAMILIES = (ModelFamily("minimax_m2", ShapeRules(qk_norm=True), _minimax_m2),)
