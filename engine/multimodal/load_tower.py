"""Load a vision tower and its projector into transformers' modules; the language model is left out.

transformers builds the wrapped model on the meta device and maps the checkpoint's tensor names. A subclass
drops the language model before weights are loaded: its tensors match no module and are never read. This is a
file of its own, because every engine imports the cache of encoder.py, and transformers' models take 190 MiB
and seconds to import.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from ...base.errors import BadInput
from ...quant.model.checkpoint import Checkpoint
from ..model.adapter.linears import (
    CurrentAdapters,
    QuantizedWeights,
    checked_config,
    described,
    from_pretrained,
    model_class,
)
from ..model.adapter.text_model import text_decoder
from .encoder import VisionEncoder


def takes_images(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint is of an image-text model whose images become embeddings of tokens."""
    try:
        kind = model_class(checked_config(checkpoint), checkpoint.trust_remote_code)
    except BadInput:
        return False
    return hasattr(kind, "get_image_features")


def asks_for_token_types(checkpoint: Checkpoint) -> bool:
    """True if a pass is told image tokens for its masks, not for M-RoPE, which has its own function."""
    config = checked_config(checkpoint)
    takes = inspect.signature(model_class(config, checkpoint.trust_remote_code).forward).parameters
    has_positions = hasattr(MODEL_MAPPING.get(type(config), None), "get_rope_index")
    return not has_positions and bool(takes.keys() & {"token_type_ids", "mm_token_type_ids"})


def load_encoder(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> VisionEncoder:
    """Vision encoder; quantized linears stay so. BadInput: weights are broken or do not match the config."""
    config = checked_config(checkpoint)
    kind = _tower_class(model_class(config, checkpoint.trust_remote_code))
    if checkpoint.quantization_config is None:
        model = from_pretrained(kind, checkpoint, config, dtype)
    else:
        weights = QuantizedWeights(checkpoint, dtype, device)
        model = from_pretrained(kind, checkpoint, config, dtype, weights.state_dict())
        weights.place(model, device, 16, CurrentAdapters())
    if config.get_text_config(decoder=True) is config:
        raise BadInput(f"{described(checkpoint)} has no language model of its own to leave out")
    hidden_size = config.get_text_config(decoder=True).hidden_size
    return VisionEncoder(model.to(device).eval(), hidden_size, device, dtype)


def _tower_class(kind: Any) -> Any:
    """A subclass whose language model and head are empty modules."""

    def __init__(self: Any, config: Any, *arguments: Any, **keywords: Any) -> None:
        kind.__init__(self, config, *arguments, **keywords)
        decoder, head = text_decoder(self), self.get_output_embeddings()
        for name, module in list(self.named_modules()):
            if module is decoder or module is head:
                self.set_submodule(name, nn.Identity())

    members = {
        "__init__": __init__,
        "_tied_weights_keys": {},
        "_keys_to_ignore_on_load_unexpected": [".*"],
    }
    return type(kind.__name__, (kind,), members)
