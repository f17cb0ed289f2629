"""Adapters with random weights, written as PEFT writes them, and models with an adapter merged into them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    targets: tuple[str, ...] = LINEARS,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """An adapter for the modules of `model` whose names end in `targets`; `ranks` by those endings."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        ending = name.rpartition(".")[2]
        if ending not in targets or not hasattr(module, "weight"):
            continue
        out, inputs = module.weight.shape
        if type(module).__name__ == "Conv1D":
            out, inputs = inputs, out
        own = (ranks or {}).get(ending, rank)
        down = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(out, own, generator=generator) * 0.05
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    assert tensors
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": dict(ranks or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def merge(model: Any, folder: Path, scales: Mapping[str, float] | float) -> Any:
    """Add `scale · B·A` to the weights of `model`, in place; scales may be given by module ending."""
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key, down in tensors.items():
            if ".lora_A." not in key:
                continue
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            module = model.get_submodule(name)
            scale = scales[name.rpartition(".")[2]] if isinstance(scales, Mapping) else scales
            change = scale * tensors[key.replace("lora_A", "lora_B")] @ down
            module.weight += change.T if type(module).__name__ == "Conv1D" else change
    return model
