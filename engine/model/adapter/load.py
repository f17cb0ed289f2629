"""Loading a checkpoint into transformers' modules, quantized linears as the engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ....quant.base.errors import BadInput, first_line
from ....quant.model.auto import auto_class, read_config
from ....quant.model.checkpoint import Checkpoint
from .linears import CurrentAdapters, QuantizedWeights

_GROWING_ROTATIONS = ("dynamic", "longrope")


def checked_config(checkpoint: Checkpoint) -> Any:
    """The transformers config of a checkpoint that can be served.

    Raises:
        BadInput: an unknown type, no decoder-only language model, or one whose RoPE cannot be cached.
    """
    name, trusted = described(checkpoint), checkpoint.trust_remote_code
    raw = {k: part for k, part in checkpoint.config.items() if k != "quantization_config"}
    try:
        config = read_config(raw, checkpoint.folder, trust_remote_code=trusted)
        model_class(config, trusted)
    except BadInput as error:
        raise BadInput(f"{checkpoint.folder}: {error}") from error
    if config.is_encoder_decoder:
        raise BadInput(f"{name} is an encoder-decoder: only decoders are served")
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    for part in nested or [rope]:
        if part.get("rope_type") in _GROWING_ROTATIONS:
            raise BadInput(
                f"{name} has rope_type {part['rope_type']!r}: what is cached would depend on what follows it"
            )
    return config


def load_model(
    checkpoint: Checkpoint,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    input_bits: int,
    adapters: CurrentAdapters,
) -> Any:
    """The model with its weights. Quantized linears stay quantized; what transformers merges is dequantized.

    Raises:
        BadInput: weights that are broken, or do not match the config.
    """
    kind = model_class(config, checkpoint.trust_remote_code)
    if checkpoint.quantization_config is None:
        model = from_pretrained(kind, checkpoint, config, dtype, checkpoint.folder)
        return model.to(device).eval()
    weights = QuantizedWeights(checkpoint, dtype)
    model = from_pretrained(kind, checkpoint, config, dtype, None, weights.state_dict())
    if merged := weights.not_placed(model):
        state_dict = weights.state_dict(merged)
        model = from_pretrained(kind, checkpoint, config, dtype, None, state_dict)
    weights.place(model, device, input_bits, adapters)
    return model.to(device).eval()


def described(checkpoint: Checkpoint) -> str:
    """The checkpoint's folder and type, with which refusals begin."""
    return f"{checkpoint.folder}: model type {checkpoint.config.get('model_type')!r}"


def model_class(config: Any, trusted: bool) -> Any:
    """The class of a config with its language head: the auto class where the checkpoint brings its code."""
    auto = auto_class(config, trusted)
    if type(config) not in auto._model_mapping:
        return auto
    kinds = auto._model_mapping[type(config)]
    return kinds[0] if isinstance(kinds, tuple) else kinds


def from_pretrained(
    kind: Any,
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    folder: Any,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """A model of a class with its weights: from `folder`, or else of the `state_dict`.

    Raises:
        BadInput: weights that are broken, or do not match the config.
    """
    name = described(checkpoint)
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            state_dict=state_dict,
            output_loading_info=True,
            trust_remote_code=checkpoint.trust_remote_code,
        )
    except Exception as error:  # transformers may fail in any way here
        raise BadInput(f"{name} does not load: {first_line(error)}") from error
    finally:
        if had_bar:
            transformers_logging.enable_progress_bar()
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if wrong:
        raise BadInput(f"{name} does not load: {wrong[0]} is missing or misshapen")
    return model
