"""Plain checkpoints, for workers whose package has no file format that is read here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load(folder: str) -> Any:
    """The plain model in float32, which holds every value of the checkpoint."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )


def linears_of(model: Any) -> dict[str, Any]:
    """The linears of the decoder layers, by name; not the LM head."""
    return {
        name: module
        for name, module in model.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def save(model: Any, task: dict[str, Any]) -> None:
    """The model with dequantized weights, as a plain checkpoint."""
    model.save_pretrained(task["output"])
