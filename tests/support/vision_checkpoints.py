"""Tiny random image-text checkpoints of several families, with their tokenizers and processors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from llmopt.quant.source.load_processor import load_processor, load_tokenizer
from llmopt.recipes import MODELS
from PIL import Image

TEXT = {
    "vocab_size": 544, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
    "vision_use_head": False,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IDS = {
    name: 512 + number
    for number, name in enumerate(
        ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    )
}
IMAGE_TURN = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """One family.

    Attributes:
        placeholder: what its chat template writes in an image's place.
        config: class of the config; `text`, `vision`, `fields`: its parts.
        processor, image_processor: their classes, and their arguments.
        tokens: of the tokenizer, besides the bundled model's, from id 512 on.
    """

    placeholder: str
    config: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    processor: str
    image_processor: str
    tokens: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    pixels: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


_QWEN_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_PIXELS = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 9}
FAMILIES: dict[str, Wrapped] = {
    "qwen2_5_vl": Wrapped(
        _QWEN_PLACEHOLDER, "Qwen2_5_VLConfig",
        {"rope_parameters": MROPE},
        {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
            "out_hidden_size": 128, "window_size": 56, "fullatt_block_indexes": [1], "patch_size": 14,
        },
        "Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil", QWEN_TOKENS, QWEN_IDS,
        {"patch_size": 14, **_QWEN_PIXELS},
    ),
    "qwen3_vl": Wrapped(
        _QWEN_PLACEHOLDER, "Qwen3VLConfig",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
            "out_hidden_size": 128, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            "patch_size": 14,
        },
        "Qwen3VLProcessor", "Qwen2VLImageProcessorPil", QWEN_TOKENS, QWEN_IDS,
        {"patch_size": 14, **_QWEN_PIXELS},
    ),
    "llava_onevision": Wrapped(
        "<image>", "LlavaOnevisionConfig",
        {"model_type": "qwen2"}, SIGLIP,
        "LlavaOnevisionProcessor", "LlavaOnevisionImageProcessorPil", ("<image>", "<video>"),
        {
            "image_token_index": 512, "video_token_index": 513, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": [[56, 56], [56, 112]],
        },
        {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": [[56, 56], [56, 112]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": Wrapped(
        "<image>", "Idefics3Config",
        {"model_type": "llama"},
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        },
        "Idefics3Processor", "Idefics3ImageProcessorPil",
        ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
        {"image_token_id": 513, "scale_factor": 2},
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        {"image_seq_len": 4},
    ),
    "gemma3": Wrapped(
        "<start_of_image>", "Gemma3Config",
        {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}, SIGLIP,
        "Gemma3Processor", "Gemma3ImageProcessorPil",
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        {
            "mm_tokens_per_image": 4, "boi_token_index": 512, "eoi_token_index": 513,
            "image_token_index": 514,
        },
        {"size": {"height": 56, "width": 56}},
        {"image_seq_length": 4},
    ),
}  # fmt: skip


def save_wrapped(folder: Path, name: str, *, seed: int = 0, std: float = 0.05) -> Any:
    """A random model of a family, saved with its tokenizer and processor; returned in float32."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    kind: Any = getattr(transformers, family.config)
    text = {**TEXT, **family.text}
    config = kind(text_config=text, vision_config=dict(family.vision), **family.fields)
    model: Any = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
            elif "norm" in path and path.endswith("weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    save_processor(folder, name)
    return model


def save_processor(folder: Path, name: str) -> None:
    """The tokenizer and processor of a family; its video part needs torchvision, and is left out."""
    family = FAMILIES[name]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODELS / "stories260K")
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens)})
    if name == "gemma3":
        tokenizer.boi_token, tokenizer.eoi_token, tokenizer.image_token = family.tokens
        tokenizer.boi_token_id, tokenizer.eoi_token_id, tokenizer.image_token_id = 512, 513, 514
        tokenizer.init_kwargs |= {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
    tokenizer.chat_template = IMAGE_TURN.replace("IMAGE", family.placeholder)
    tokenizer.save_pretrained(folder)
    image_processor = _image_processor(family)
    image_processor.save_pretrained(folder)
    described = dict(family.settings) | {"processor_class": family.processor}
    (folder / "processor_config.json").write_text(json.dumps(described))


def _image_processor(family: Wrapped) -> Any:
    kind = {
        "Qwen2VLImageProcessorPil": "qwen2_vl",
        "LlavaOnevisionImageProcessorPil": "llava_onevision",
        "Idefics3ImageProcessorPil": "idefics3",
        "Gemma3ImageProcessorPil": "gemma3",
    }[family.image_processor]
    module = import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    return getattr(module, family.image_processor)(**family.pixels)


def save_pictures(folder: Path) -> tuple[Path, ...]:
    """Three small pictures of different shapes, with something in them."""
    paths = []
    for number, size in enumerate(((96, 64), (56, 80), (40, 40))):
        noise = torch.randint(
            0, 256, (*size[::-1], 3), generator=torch.Generator().manual_seed(number)
        )
        path = folder / f"picture-{number}.png"
        Image.fromarray(noise.to(torch.uint8).numpy()).save(path)
        paths.append(path)
    return tuple(paths)


def image_pairs_file(folder: Path, *more: dict[str, Any]) -> str:
    """Three rows with images, and others, beside their pictures."""
    pictures = [path.name for path in save_pictures(folder)]
    rows = [
        {"text": "a small boat", "images": pictures[:1]},
        {
            "messages": [
                {"role": "user", "content": [
                    {"type": "text", "text": "which is older, "}, {"type": "image"},
                    {"type": "text", "text": " or "}, {"type": "image"},
                ]},
                {"role": "assistant", "content": "the first one"},
            ],
            "images": pictures[1:3],
        },
        {"messages": [{"role": "user", "content": "<image> red"}], "images": pictures[2:]},
        *more,
    ]  # fmt: skip
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def image_prompt(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """What a saved family reads of a prompt with one small picture."""
    processor = load_processor(folder, load_tokenizer(folder), trust_remote_code=False)
    picture = Image.open(save_pictures(folder)[0]).convert("RGB")
    text = f"{FAMILIES[name].placeholder} a small boat"
    made = processor(text=[text], images=[picture], return_tensors="pt")
    return {key: value for key, value in made.items() if isinstance(value, torch.Tensor)}


def family_inputs(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """What the tower of a saved family reads of one small picture."""
    made = image_prompt(folder, name)
    wanted = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")
    return {key: made[key] for key in wanted if key in made}
