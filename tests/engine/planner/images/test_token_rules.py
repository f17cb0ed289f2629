"""Tokens by resolution: each rule against what transformers' processor of the family counts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.quant.families.family import ImageSettings
from llmopt.quant.families.registry import image_tokens
from transformers import (
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    Qwen2VLImageProcessorPil,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

if TYPE_CHECKING:
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
else:  # before transformers 5.23 it imports torchvision
    name = "transformers.models.gemma4.processing_gemma4"
    Gemma4Processor = pytest.importorskip(name, exc_type=ImportError).Gemma4Processor

DRAWN = random.Random(0)
SIZES = [
    (1024, 768), (768, 1024), (32, 32), (336, 336), (4000, 3000), (640, 200), (200, 640), (1, 1),
    *((DRAWN.randint(8, 2500), DRAWN.randint(8, 2500)) for _ in range(60)),
]  # fmt: skip
"""Width and height."""


def _asked(kind: Any, images: Any, **fields: Any) -> Any:
    """A processor without tokenizer, which only counts."""
    processor = kind.__new__(kind)
    processor.image_processor = images
    processor._merge_kwargs = lambda **_: {"images_kwargs": {}}
    for name, value in fields.items():
        setattr(processor, name, value)
    return processor


def _counts(processor: Any, sizes: list[tuple[int, int]]) -> list[int]:
    flipped = [(height, width) for width, height in sizes]
    return list(processor._get_num_multimodal_tokens(image_sizes=flipped)["num_image_tokens"])


def _counted(settings: ImageSettings, sizes: list[tuple[int, int]]) -> list[int]:
    counted = []
    for width, height in sizes:
        tokens = image_tokens(settings, width, height)
        assert tokens is not None
        counted.append(tokens.num_tokens)
    return counted


def test_qwen_resizes_to_multiples_within_a_range() -> None:
    images = Qwen2VLImageProcessorPil(patch_size=14, min_pixels=3136, max_pixels=1003520)
    settings = ImageSettings(
        {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {"min_pixels": 3136, "max_pixels": 1003520},
    )
    for width, height in SIZES:
        patches = images.get_number_of_image_patches(height, width, {})
        tokens = image_tokens(settings, width, height)
        assert tokens is not None
        assert (tokens.num_patches, tokens.num_tokens) == (patches, patches // 4)
    with pytest.raises(BadInput, match="aspect ratios up to 200"):
        image_tokens(settings, 3000, 10)


def test_llava_next_takes_tiles_less_the_padding() -> None:
    pinpoints = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    processor = _asked(
        LlavaNextProcessor,
        LlavaNextImageProcessorPil(size={"shortest_edge": 336}, image_grid_pinpoints=pinpoints),
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )
    config = {
        "model_type": "llava_next",
        "vision_config": {"patch_size": 14, "image_size": 336},
        "image_grid_pinpoints": pinpoints,
    }
    assert _counted(ImageSettings(config, {}), SIZES) == _counts(processor, SIZES)


def test_onevision_pools_beyond_nine_tiles() -> None:
    pinpoints = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
    processor = _asked(
        LlavaOnevisionProcessor,
        LlavaOnevisionImageProcessorPil(image_grid_pinpoints=pinpoints),
        num_image_tokens=729,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )
    config = {
        "model_type": "llava_onevision",
        "vision_config": {"patch_size": 14, "image_size": 384},
        "image_grid_pinpoints": pinpoints,
    }
    assert _counted(ImageSettings(config, {}), SIZES) == _counts(processor, SIZES)


def test_idefics_writes_markers_around_tiles() -> None:
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}
    )
    tokenizer = lambda text, **_: {"input_ids": [0]}  # noqa: E731
    processor = _asked(Idefics3Processor, images, image_seq_len=64, tokenizer=tokenizer)
    settings = ImageSettings(
        {"model_type": "smolvlm", "scale_factor": 4, "vision_config": {"patch_size": 16}},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    )
    assert _counted(settings, SIZES) == _counts(processor, SIZES)


def test_internvl_takes_the_canvas_of_the_nearest_aspect_ratio() -> None:
    images = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=12
    )
    processor = _asked(InternVLProcessor, images, image_seq_length=256)
    config = {"model_type": "internvl", "vision_config": {"patch_size": 14, "image_size": 448}}
    assert _counted(ImageSettings(config, {}), SIZES) == _counts(processor, SIZES)


@pytest.mark.parametrize("merge", [1, 2])
def test_pixtral_breaks_rows(merge: int) -> None:
    patch = 14 * merge
    config = {
        "model_type": "mistral3",
        "spatial_merge_size": merge,
        "vision_config": {"patch_size": 14, "image_size": 1540},
    }
    expected = []
    for width, height in SIZES:
        image = np.broadcast_to(np.uint8(0), (height, width, 3))
        high, wide = get_resize_output_image_size(image, (1540, 1540), (patch, patch))
        expected.append((wide // patch + 1) * (high // patch))
    assert _counted(ImageSettings(config, {}), SIZES) == expected


def test_gemma4_fills_its_budget() -> None:
    images = SimpleNamespace(patch_size=16, pooling_kernel_size=3, max_soft_tokens=280)
    processor = _asked(Gemma4Processor, images)
    config = {"model_type": "gemma4", "vision_config": {"patch_size": 16, "pooling_kernel_size": 3}}
    sizes = [
        (width, height) for width, height in SIZES if max(width, height) < 200 * min(width, height)
    ]
    assert _counted(ImageSettings(config, {}), sizes) == _counts(processor, sizes)


def test_fixed_numbers_and_unknown_types() -> None:
    gemma = ImageSettings({"model_type": "gemma3", "mm_tokens_per_image": 256}, {})
    llava = ImageSettings({"model_type": "llava", "vision_config": {"image_size": 336}}, {})
    assert _counted(gemma, SIZES) == [256] * len(SIZES)
    assert _counted(llava, SIZES) == [576] * len(SIZES)
    assert image_tokens(ImageSettings({"model_type": "llama"}, {}), 8, 8) is None
