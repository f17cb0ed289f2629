"""The plain model that the codes of a checkpoint stand for: what the engine is held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llmopt.base.errors import BadInput
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.model.auto import auto_class, read_config
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.model.meta_model import WeightMap


def dequantized_model(folder: Path) -> Any:
    """A float32 model of a plain or quantized checkpoint, in evaluation mode.

    Raises:
        BadInput: a weight that transformers merges or splits on loading has codes, or one is missing.
    """
    checkpoint = Checkpoint(folder)
    raw = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    config = read_config(raw, folder)
    model: Any = auto_class(config).from_config(config, dtype=torch.float32)
    codes = quantized_modules(checkpoint)
    stored = {name: name for name in checkpoint.names}
    stored |= {f"{module}.weight": module for module in codes}
    targets = WeightMap(stored, model).targets
    tensors = model.state_dict(keep_vars=True)
    filled: set[int] = set()
    for name, source in stored.items():
        target = targets.get(name, name)
        if target not in tensors:
            if source in codes:
                raise BadInput(f"{folder}: transformers has no linear {source}")
            continue  # codes' scales and zeros, or what this model has no use for
        weight = (
            read_quantized(checkpoint, source).dequantize()
            if source in codes
            else checkpoint.tensor(source)
        )
        if weight.shape != tensors[target].shape:
            raise BadInput(f"{folder}: {name} has shape {list(weight.shape)}")
        tensors[target].data.copy_(weight)
        filled.add(tensors[target].data_ptr())
    left = [
        name for name, parameter in model.named_parameters() if parameter.data_ptr() not in filled
    ]
    if left:
        raise BadInput(f"{folder}: {left[0]} of its model is in no file")
    return model.eval()
