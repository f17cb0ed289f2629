"""Open a checkpoint as a model: the native decoder, or transformers' modules for other families."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

from ....base.errors import BadInput
from ....quant.families.spec_parts import NotCovered
from ....quant.model.checkpoint import Checkpoint
from ...base.host import give_back_freed_memory
from ...config.compatibility import refuse
from ..decoder.decoder import Decoder
from ..decoder.loader import load_weights
from ..decoder.reader import decoder_base, model_spec
from ..layers.lora import AdapterBank
from ..layers.parallel import Shard
from ..layers.spec import ENDLESS, LoadingOptions, ModelSpec, streaming_spec

if TYPE_CHECKING:
    from .adapter import TransformersModel

_log = logging.getLogger(__name__)

CausalModel: TypeAlias = "Decoder | TransformersModel"
"""A causal language model: the native decoder, or the transformers backend."""


def open_model(
    checkpoint: Checkpoint, options: LoadingOptions, shard: Shard | None = None
) -> tuple[CausalModel, int]:
    """A model, or a tensor-parallel shard of it, and its `max_model_len`; BadInput: it cannot be served."""
    try:
        spec = model_spec(checkpoint.config)
        decoder_base(checkpoint, spec)
    except NotCovered as reason:
        from .adapter import TransformersModel

        if options.stream is not None:
            refuse({"transformers", "streams"}, str(reason))
        _log.info("%s: transformers' modules are used: %s", checkpoint.folder, reason)
        model = TransformersModel(checkpoint, options, shard)
        return model, _longest(options.max_model_len, model.max_context)
    if options.stream is None:
        longest = _longest(options.max_model_len, spec.shape.max_context)
    else:
        spec, longest = streaming_spec(spec, options.stream), options.max_model_len or ENDLESS
    if shard is None or shard.rank == 0:
        _warn_of_long_factors(spec, longest if spec.stream is None else spec.stream.num_visible)
    if shard is not None:
        shard.check(spec)
    weights = load_weights(checkpoint, spec, options, shard)
    give_back_freed_memory()
    bank = None
    if options.takes_adapters:
        bases = (weights.base, *spec.names.bases)
        bank = AdapterBank(options.loras, weights.linears, bases, options.device, options.dtype)
        if options.max_loras is not None:
            bank.prepare()
    sharded = spec if shard is None else shard.spec(spec)
    return Decoder(sharded, weights, longest, options.dtype, bank, options.cache_dtype), longest


def _warn_of_long_factors(spec: ModelSpec, num_positions: int) -> None:
    """Warn where LongRoPE's factors differ from transformers' for short sequences, as keys are rotated."""
    originals = {
        int(rope.parameters["original_max_position_embeddings"])
        for rope in spec.ropes
        if rope is not None and rope.kind == "longrope"
    }
    for original in originals:
        if num_positions > original:
            _log.warning(
                "LongRoPE: sequences may have %d tokens, so that all of them use the long factors. "
                "transformers uses the short factors up to %d tokens: set max_model_len = %d to have its "
                "results for those",
                *(num_positions, original, original),
            )


def _longest(max_model_len: int | None, context: int | None) -> int:
    if max_model_len is not None and context is not None and max_model_len > context:
        raise BadInput(
            f"max_model_len = {max_model_len} exceeds the model's context of {context} tokens"
        )
    if max_model_len is None and context is None:
        raise BadInput("the model's config names no context length: give max_model_len")
    return max_model_len or context or 0
