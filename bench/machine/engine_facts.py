"""Record parts of an in-process engine: memory and roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quant.base.errors import BadInput
from ...quant.open import open_checkpoint
from ..metrics.trace import LoadPass
from .ceilings import measure_ceilings
from .roofline import ByteSizes, roofline_part

if TYPE_CHECKING:
    from ...engine.engine import Engine


def memory_part(engine: Engine, model: Path, peak_bytes: int | None) -> dict[str, Any]:
    """`llmopt.memory`: bytes held by the engine, checkpoint size, and peak resident bytes of the process; the
    peak is None where other models share the process."""
    checkpoint = open_checkpoint(model)
    text = checkpoint.text_config
    return {
        "weight_bytes": engine.memory.weight_bytes,
        "checkpoint_bytes": checkpoint.weight_bytes,
        "checkpoint_dtype": text.get("dtype") or text.get("torch_dtype"),
        "kv_cache_bytes": engine.memory.kv_cache_bytes,
        "state_bytes": engine.memory.state_bytes,
        "kv_cache": {
            "dtype": engine.stats.kv_dtype,
            "bytes_per_token": engine.memory.kv_bytes_per_token,
            "tokens": engine.stats.kv_tokens_total,
            "blocks": engine.stats.kv_blocks_total,
        },
        "peak_resident_bytes": peak_bytes,
    }


def place_on_roofline(
    engine: Engine, model: Path, passes: Sequence[LoadPass]
) -> dict[str, Any] | None:
    """Measured ceilings and roofline points; None for a model whose shape the planner does not know."""
    from ...engine.planner.model.shapes import ModelShape

    try:
        shape = ModelShape.from_config(open_checkpoint(model).config)
    except BadInput:
        return None
    memory = engine.memory
    # A tied embedding is also the LM head; the planner counts it once, as read.
    weight_bytes = memory.weight_bytes_per_step if shape.tied else memory.weight_bytes
    return roofline_part(
        [step for load_pass in passes for step in load_pass.steps],
        shape,
        measure_ceilings(engine.device, engine.dtype, weight_bytes),
        ByteSizes(
            weight_bytes,
            kv_bytes_per_element=memory.kv_bytes_per_token / shape.kv_bytes_per_token(1),
            unquantized_bytes=engine.dtype.itemsize,
        ),
    )
