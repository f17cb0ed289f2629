"""Folds of vision blocks: scales moved along each of them leave the image features of a model as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.plan.selection import vision_layers
from transformers import AutoConfig, AutoModelForImageTextToText, Mistral3Config

from ...support.releases import skip_without_torchvision
from ...support.vision_checkpoints import TEXT, family_inputs, save_wrapped


def mistral(folder: Path) -> None:
    """Pixtral's tower, which has names of its own."""
    vision = {
        "model_type": "pixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "head_dim": 32, "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    text = {**TEXT, "model_type": "mistral"}
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=512)
    AutoModelForImageTextToText.from_config(config).eval().save_pretrained(folder)


def internvl(folder: Path) -> None:
    config = AutoConfig.for_model(
        "internvl",
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": [56, 56], "patch_size": [14, 14],
        },
    )  # fmt: skip
    AutoModelForImageTextToText.from_config(config).eval().save_pretrained(folder)


OTHERS: dict[str, tuple[Any, dict[str, torch.Tensor], int]] = {
    "mistral3": (
        mistral,
        {"pixel_values": torch.randn(1, 3, 56, 56), "image_sizes": torch.tensor([[56, 56]])},
        8,
    ),
    "internvl": (internvl, {"pixel_values": torch.randn(1, 3, 56, 56)}, 6),
}
FOLDS = {"qwen2_5_vl": 6, "qwen3_vl": 4, "llava_onevision": 6, "idefics3": 6, "gemma3": 6}


def features(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found = model.model.get_image_features(**inputs, return_dict=True).pooler_output
    parts = found if isinstance(found, (list, tuple)) else [found]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("name", [*FOLDS, *OTHERS])
def test_scales_along_every_fold_change_nothing(name: str, tmp_path: Path) -> None:
    skip_without_torchvision(name)
    if name in OTHERS:
        save, inputs, folds = OTHERS[name]
        save(tmp_path)
    else:
        save_wrapped(tmp_path, name)
        inputs, folds = family_inputs(tmp_path, name), FOLDS[name]
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    before = features(model, inputs)
    architecture = vision_layers(Checkpoint(tmp_path), name)
    units, moved = architecture.meta_model, 0
    generator = torch.Generator().manual_seed(0)
    for index, family in enumerate(architecture.layers):
        names = units.names_in_layer(index)
        layer = model.get_submodule(units.paths[index])
        for fold in family.folds:
            source = layer.get_submodule(names[f"{fold.source}.weight"].removesuffix(".weight"))
            targets = [
                layer.get_submodule(names[f"{target}.weight"].removesuffix(".weight"))
                for target in fold.targets
            ]
            scales = torch.rand(targets[0].weight.shape[1], generator=generator) + 0.5
            for tensor in (source.weight, getattr(source, "bias", None)):
                if tensor is not None:
                    tensor.data = tensor.data / scales.view(-1, *[1] * (tensor.dim() - 1))
            for target in targets:
                target.weight.data = target.weight.data * scales
            moved += 1
    assert moved == folds
    assert before.std() > 1e-3
    torch.testing.assert_close(features(model, inputs), before, atol=1e-4, rtol=1e-4)
