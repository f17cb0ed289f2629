"""Tiny random checkpoints of image-text families, with processor files and a tokenizer that has their tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from llmopt.recipes import MODELS
from PIL import Image

VOCAB = 576
"""Of the text models: 512 tokens of the bundled tokenizer, and those of images."""
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
PINPOINTS = [[32, 64], [64, 32], [64, 64]]
SQUARE = {"height": 32, "width": 32}
MIDDLE = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


@dataclass(frozen=True)
class ImageFamily:
    """A family's classes and fields; `{name}` in a field stands for the id of a special token.

    Attributes:
        config: class and fields of the wrapped model's config, text and vision of its parts.
        tokens: special tokens, in order of their ids from 512.
        named_tokens: attributes of the tokenizer.
        processor, image_processor: the contents of the two files.
        placeholder: of one image in a prompt.
    """

    config: str
    placeholder: str
    tokens: tuple[str, ...]
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    named_tokens: dict[str, str] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    image_processor: dict[str, Any] = field(default_factory=dict)


_SMOL_TOKENS = (
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)),
)  # fmt: skip


def _smol(name: str) -> ImageFamily:
    return ImageFamily(
        f"{name}Config",
        "<image>",
        _SMOL_TOKENS,
        text={"model_type": "llama"},
        vision=VISION,
        fields={"image_token_id": 512, "scale_factor": 2},
        processor={"processor_class": f"{name}Processor", "image_seq_len": 4},
        image_processor={
            "image_processor_type": f"{name}ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            **MIDDLE,
        },
    )


IMAGE_FAMILIES: dict[str, ImageFamily] = {
    "llava-1.5": ImageFamily(
        "LlavaConfig",
        "<image>",
        ("<image>",),
        text={"model_type": "llama"},
        vision={**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        fields={"image_token_index": 512, "vision_feature_layer": -2},
        processor={
            "processor_class": "LlavaProcessor", "patch_size": 8, "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        image_processor={
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32},
            "crop_size": SQUARE, **MIDDLE,
        },
    ),
    "llava-next": ImageFamily(
        "LlavaNextConfig",
        "<image>",
        ("<image>",),
        text={"model_type": "mistral"},
        vision={**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        fields={"image_token_index": 512, "image_grid_pinpoints": PINPOINTS},
        processor={
            "processor_class": "LlavaNextProcessor", "patch_size": 8,
            "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default",
        },
        image_processor={
            "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 32},
            "crop_size": SQUARE, "image_grid_pinpoints": PINPOINTS, **MIDDLE,
        },
    ),
    "llava-onevision": ImageFamily(
        "LlavaOnevisionConfig",
        "<image>",
        ("<image>", "<video>"),
        text={"model_type": "qwen2"},
        vision={**VISION, "model_type": "siglip_vision_model"},
        fields={
            "image_token_index": 512, "video_token_index": 513, "image_grid_pinpoints": PINPOINTS,
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
        },
        image_processor={
            "image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE,
            "image_grid_pinpoints": PINPOINTS, **MIDDLE,
        },
    ),
    "internvl": ImageFamily(
        "InternVLConfig",
        "<IMG_CONTEXT>",
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        text={"model_type": "qwen2"},
        vision={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        fields={"image_token_id": 512, "image_seq_length": 4},
        named_tokens={
            "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
            "end_image_token": "</img>", "video_token": "<video>",
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor", "size": SQUARE, "max_patches": 4, **MIDDLE,
        },
    ),
    "idefics3": _smol("Idefics3"),
    "smolvlm": _smol("SmolVLM"),
    "llama-4": ImageFamily(
        "Llama4Config",
        "<|image|>",
        (
            "<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ),
        text={
            "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4,
            "interleave_moe_layer_step": 2, "num_experts_per_tok": 1,
        },
        vision={
            **VISION, "vision_output_dim": 48, "projector_input_dim": 48, "projector_output_dim": 48,
            "intermediate_size": 128,
        },
        fields={"image_token_index": 512, "boi_token_index": 514, "eoi_token_index": 515},
        processor={"processor_class": "Llama4Processor", "patch_size": 8},
        image_processor={
            "image_processor_type": "Llama4ImageProcessorFast", "size": SQUARE, "max_patches": 4, **MIDDLE,
        },
    ),
    "mistral-3": ImageFamily(
        "Mistral3Config",
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        text={"model_type": "mistral", "sliding_window": None},
        vision={**VISION, "image_size": 64, "model_type": "pixtral", "head_dim": 16},
        fields={"image_token_index": 512, "spatial_merge_size": 2},
        processor={
            "processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2,
        },
        image_processor={
            "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64},
            "patch_size": {"height": 8, "width": 8}, **MIDDLE,
        },
    ),
}  # fmt: skip


def save_image_model(folder: Path, family: ImageFamily) -> Any:
    """A random model as transformers saves it, with tokenizer and processor files beside it."""
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(
        text_config={**TEXT, **family.text},
        vision_config=family.vision,
        tie_word_embeddings=False,
        **family.fields,
    )
    model: Any = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Without the ones and zeros that hide mistakes, and large enough that attention matters.
            is_norm = "norm" in name and name.endswith("weight")
            parameter.normal_(mean=float(is_norm), std=0.1 if is_norm else 0.25)
    model.eval().save_pretrained(folder)
    save_processor(folder, family)
    return model


def save_processor(folder: Path, family: ImageFamily) -> None:
    """Tokenizer and processor files."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        MODELS / "stories260K", extra_special_tokens=family.named_tokens
    )
    tokenizer.add_tokens(list(family.tokens), special_tokens=True)
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(list(family.tokens))
    assert ids == list(range(512, 512 + len(ids))), ids
    for name, content in (
        ("processor_config.json", family.processor),
        ("preprocessor_config.json", family.image_processor),
    ):
        (folder / name).write_text(json.dumps(content))


def picture(seed: int, width: int = 48, height: int = 40) -> Image.Image:
    """Random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
