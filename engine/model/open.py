"""A checkpoint as a model: the decoder where it has the family, transformers' modules elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ...quant.base.errors import BadInput
from ...quant.model.checkpoint import Checkpoint
from ..base.host import give_back_freed_memory
from ..config.compatibility import refuse
from ..scheduling.window import Window
from .decoder.decoder import Decoder
from .decoder.families import model_spec
from .decoder.loader import load_weights
from .layers.attention import LayerCache, StepInputs
from .lora.bank import AdapterBank
from .parallel.shard import Shard
from .spec.spec import KvLayout, NotCovered
from .spec.streaming import ENDLESS, streaming_spec

_log = logging.getLogger(__name__)


class CausalModel(Protocol):
    """What the engine asks of a model, whoever computes it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        """What each layer keeps of a token."""
        ...

    @property
    def window(self) -> Window | None:
        """What the farthest-looking layer sees; None: some layer sees all."""
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
        """Whether steps of one shape are the same operations whatever their values."""
        ...

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step and fill the caches; returns a row for each token."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, float32 [rows, vocab], of some of those rows."""
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
) -> tuple[CausalModel, int]:
    """Load a model; returns it and the longest sequence that it will be asked for.

    With `input_bits` 8 the kernels of quantized weights may round their inputs to 8 bits. `loras` are
    folders of adapters by name. With `shard` it is the part of the model that one process holds. With
    `stream`, sequences may go past the model's context.

    Raises:
        BadInput: a broken checkpoint, a model that cannot be served, or a `max_model_len` beyond the
            model's context.
    """
    try:
        spec = model_spec(checkpoint.config)
    except NotCovered as reason:
        from .adapter.adapter import TransformersModel

        asked = {"lora": loras, "tensor-parallel": shard, "streams": stream}
        refuse({"transformers", *(name for name in asked if asked[name])}, str(reason))
        _log.info("%s: transformers' modules are used: %s", checkpoint.folder, reason)
        model = TransformersModel(checkpoint, device, dtype)
        return model, _longest(max_model_len, model.max_context)
    if stream is None:
        longest = _longest(max_model_len, spec.max_model_len)
    else:
        spec, longest = streaming_spec(spec, stream), max_model_len or ENDLESS
    own = spec
    if shard is not None:
        shard.check(spec)
        own = shard.spec(spec)
    weights = load_weights(checkpoint, spec, device, dtype, input_bits, shard)
    give_back_freed_memory()
    bank = None
    if loras:
        bank = AdapterBank(loras, weights.linears, spec.names.bases, device, dtype)
    return Decoder(own, weights, longest, dtype, bank), longest


def _longest(asked: int | None, own: int | None) -> int:
    if asked is not None and own is not None and asked > own:
        raise BadInput(f"max_model_len = {asked} exceeds the model's context of {own} tokens")
    if asked is None and own is None:
        raise BadInput("the model's config names no context length: give max_model_len")
    return asked or own or 0
