"""A transformers module from a raw config, on the meta device."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from ....quant.base.errors import BadInput, first_line
from ....quant.families.registry import type_of
from ....quant.model.auto import auto_class


def build_on_meta(config: Any, *, trust_remote_code: bool = False) -> torch.nn.Module:
    """The model of a config with its language head, on the meta device.

    Raises:
        BadInput: no decoder-only language model, or one that cannot be built.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise BadInput(f"{type_of(config)} is an encoder-decoder: only decoders are planned")
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        auto = auto_class(config, trust_remote_code)
        with torch.device("meta"):
            model = auto.from_config(
                config,
                dtype=text_dtype(config),
                attn_implementation="eager",
                trust_remote_code=trust_remote_code,
            )
    except BadInput:
        raise
    except Exception as error:  # a module may raise anything about its config
        raise BadInput(
            f"transformers {transformers.__version__} does not build a {type_of(config)}: "
            f"{first_line(error)}"
        ) from error
    _use_batched_experts(model)
    return model.eval()


def text_dtype(config: Any) -> torch.dtype:
    """The dtype of a config, or of its text model; bfloat16 without one."""
    dtype = getattr(config, "dtype", None) or getattr(
        config.get_text_config(decoder=True), "dtype", None
    )
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.bfloat16


def _use_batched_experts(model: Any) -> None:
    """Experts as one batched GEMM: the loop over hit experts depends on the routing's values."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "batched_mm"
