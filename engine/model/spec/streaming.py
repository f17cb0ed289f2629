"""StreamingLLM: attention sinks and a sliding window over every layer of a model (arXiv:2309.17453)."""

from __future__ import annotations

from dataclasses import replace

from ....quant.base.errors import BadInput
from ...config.compatibility import refuse
from ...scheduling.block_pool import Window
from .spec import ModelSpec

ENDLESS = 2**31 - 1
"""`max_model_len` of streamed sequences without a configured limit."""


def streaming_spec(spec: ModelSpec, stream: Window) -> ModelSpec:
    """`spec` with the sinks and window of `stream` in every layer.

    Raises:
        BadInput: positions are not rotary, layers already have sliding windows, or sinks and window exceed
            the model's context.
    """
    options = f"window = {stream.length} with attention_sinks = {stream.sinks}"
    if spec.names.positions:
        raise BadInput(
            f"{options}: this model has a learned vector for each of its {spec.max_model_len} positions, "
            "so its sequences end there: leave both out"
        )
    if any(window is not None for window in spec.shape.windows):
        refuse({"streams", "windows"}, options)
    if stream.num_visible > spec.max_model_len:
        raise BadInput(
            f"{options}: together they exceed the model's context of {spec.max_model_len} tokens"
        )
    shape = replace(spec.shape, windows=(stream.length,) * spec.shape.num_layers)
    return replace(spec, shape=shape, stream=stream)
