"""Open a checkpoint as a model: the native decoder, or transformers' modules for other families."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ....quant.base.errors import BadInput
from ....quant.families.spec_parts import NotCovered
from ....quant.model.checkpoint import Checkpoint
from ...base.host import give_back_freed_memory
from ...config.compatibility import refuse
from ...scheduling.block_pool import Window
from ..decoder.decoder import Decoder
from ..decoder.loader import load_weights
from ..decoder.reader import decoder_base, model_spec
from ..layers.attention import LayerCache, StepInputs
from ..layers.lora import AdapterBank
from ..layers.parallel import Shard
from ..layers.spec import ENDLESS, ImageSpec, KvLayout, streaming_spec
from ..layers.state import StateLayout

_log = logging.getLogger(__name__)


class CausalModel(Protocol):
    """Interface of causal language models: the native decoder and the transformers backend.

    `broadcast`, if set, is called with each call's name and argument first, so that the tensor-parallel
    workers make the same calls. `lora_bank` holds the LoRA adapters, if the model takes any.
    """

    broadcast: Callable[[str, Any], None] | None
    lora_bank: AdapterBank | None

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int | None:
        """Width of the final hidden states, with which the rows of `forward` begin; None: they are logits."""
        ...

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        """Each layer's KV-cache layout."""
        ...

    @property
    def image_spec(self) -> ImageSpec:
        """How it treats the tokens of images."""
        ...

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        """The tensors of a sequence's constant state, over all layers; () without."""
        ...

    @property
    def window(self) -> Window | None:
        """Sinks and window of the widest sliding window; None: some layer has full attention."""
        ...

    @property
    def bytes_held(self) -> int:
        """Bytes of weights in memory."""
        ...

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step may read."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether steps can be captured into a graph: static shapes, no data-dependent control flow."""
        ...

    @property
    def captures_any_step(self) -> bool:
        """Whether a captured step serves others of as many tokens, however they are spread over sequences."""
        ...

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step and fill the KV caches; returns a row for each token."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of some of those rows."""
        ...


@runtime_checkable
class CheckedShard(Protocol):
    """A model whose shard is compared with the whole once all ranks have joined their group."""

    def check_shards(self) -> None:
        """Raises BadInput where the results differ; every rank calls it."""
        ...


def open_model(
    checkpoint: Checkpoint,
    max_model_len: int | None,
    device: torch.device,
    dtype: torch.dtype,
    input_bits: int = 16,
    loras: Mapping[str, Path] | None = None,
    shard: Shard | None = None,
    stream: Window | None = None,
    max_loras: int | None = None,
    cache_dtype: torch.dtype | None = None,
) -> tuple[CausalModel, int]:
    """Load a model; returns it and its `max_model_len`.

    With `input_bits` 8 the kernels of quantized weights may quantize activations to 8 bits (W8A8, W4A8).
    `loras` are PEFT folders by adapter name; with `max_loras` others may be loaded later. With `shard` only
    that tensor-parallel shard is loaded. `cache_dtype` is that of stored keys and values, for which attention
    kernels are chosen; None: the model's. With `stream` (StreamingLLM) sequences may exceed the model's
    context.

    Raises:
        BadInput: a broken checkpoint, a model that cannot be served, or a `max_model_len` beyond the
            model's context.
    """
    try:
        spec = model_spec(checkpoint.config)
        decoder_base(checkpoint, spec)
    except NotCovered as reason:
        from .adapter import TransformersModel

        if stream is not None:
            refuse({"transformers", "streams"}, str(reason))
        _log.info("%s: transformers' modules are used: %s", checkpoint.folder, reason)
        model = TransformersModel(
            checkpoint, device, dtype, input_bits, loras, shard, may_add_loras=max_loras is not None
        )
        return model, _longest(max_model_len, model.max_context)
    if stream is None:
        longest = _longest(max_model_len, spec.max_model_len)
    else:
        spec, longest = streaming_spec(spec, stream), max_model_len or ENDLESS
    sharded = spec
    if shard is not None:
        shard.check(spec)
        sharded = shard.spec(spec)
    takes_adapters = bool(loras or max_loras)
    weights = load_weights(
        checkpoint, spec, device, dtype, input_bits, shard, takes_adapters=takes_adapters
    )
    give_back_freed_memory()
    bank = None
    if loras or max_loras:
        bases = (weights.base, *spec.names.bases)
        bank = AdapterBank(loras or {}, weights.linears, bases, device, dtype)
        if max_loras is not None:
            bank.prepare()
    return Decoder(sharded, weights, longest, dtype, bank, cache_dtype), longest


def _longest(max_model_len: int | None, context: int | None) -> int:
    if max_model_len is not None and context is not None and max_model_len > context:
        raise BadInput(
            f"max_model_len = {max_model_len} exceeds the model's context of {context} tokens"
        )
    if max_model_len is None and context is None:
        raise BadInput("the model's config names no context length: give max_model_len")
    return max_model_len or context or 0
