"""A model as one for sequences without end: a window over every layer, and the first tokens in sight."""

from __future__ import annotations

from dataclasses import replace

from ....quant.base.errors import BadInput
from ...config.compatibility import refuse
from ...scheduling.window import Window
from .spec import ModelSpec

ENDLESS = 2**31 - 1
"""Tokens of a sequence that nothing but this number limits."""


def streaming_spec(spec: ModelSpec, stream: Window) -> ModelSpec:
    """`spec` with `stream` over each layer.

    Raises:
        BadInput: positions are not rotations, layers have windows of their own, or what is in sight is
            more than the model's context.
    """
    asked = f"window = {stream.length} with attention_sinks = {stream.sinks}"
    if spec.names.positions:
        raise BadInput(
            f"{asked}: this model has a learned vector for each of its {spec.max_model_len} positions, "
            "so its sequences end there: leave both out"
        )
    if any(window is not None for window in spec.shape.windows):
        refuse({"streams", "windows"}, asked)
    if stream.num_visible > spec.max_model_len:
        raise BadInput(
            f"{asked}: together they exceed the model's context of {spec.max_model_len} tokens"
        )
    shape = replace(spec.shape, windows=(stream.length,) * spec.shape.num_layers)
    return replace(spec, shape=shape, stream=stream)
