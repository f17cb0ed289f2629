"""Image-text families whose language model treats images in its own way, with their processors."""

from __future__ import annotations

from .image_models import MIDDLE, TEXT, ImageFamily
from .image_oracle import GEMMA3_VISION, GEMMA4_VISION, IMAGE_MODELS

_QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_QWEN_FIELDS = {
    "image_token_id": 512, "vision_start_token_id": 513, "vision_end_token_id": 514, "video_token_id": 515,
}  # fmt: skip
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2,
    "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}, **MIDDLE,
}  # fmt: skip
_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def _qwen(name: str, config: str, processor: str) -> ImageFamily:
    _, text, vision, _ = IMAGE_MODELS[name]
    sections = {**text["rope_parameters"], "mrope_section": [3, 3, 2]}
    return ImageFamily(
        config,
        "<|vision_start|><|image_pad|><|vision_end|>",
        _QWEN_TOKENS,
        text={"rope_parameters": sections},
        vision=vision,
        fields=_QWEN_FIELDS,
        processor={"processor_class": processor},
        image_processor=_QWEN_PROCESSOR,
    )


CHANGED_FAMILIES: dict[str, ImageFamily] = {
    "qwen-2.5-vl": _qwen("qwen-2.5-vl", "Qwen2_5_VLConfig", "Qwen2_5_VLProcessor"),
    "qwen-3-vl": _qwen("qwen-3-vl", "Qwen3VLConfig", "Qwen3VLProcessor"),
    "gemma-3": ImageFamily(
        "Gemma3Config",
        "<start_of_image>",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        text={**_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24},
        vision=GEMMA3_VISION,
        fields={
            "mm_tokens_per_image": 9, "image_token_index": 512, "boi_token_index": 513, "eoi_token_index": 514,
        },
        named_tokens={
            "image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 9},
        image_processor={
            "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}, **MIDDLE,
        },
    ),
    "gemma-4": ImageFamily(
        "Gemma4Config",
        "<|image|>",
        ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
        text={
            **_WINDOWS, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
        },
        vision=GEMMA4_VISION,
        fields={"image_token_id": 512, "boi_token_id": 513, "eoi_token_id": 514, "audio_config": None},
        named_tokens={
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        processor={"processor_class": "Gemma4Processor", "image_seq_length": 9},
        image_processor={
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
    ),
}  # fmt: skip
assert TEXT["num_hidden_layers"] == len(_WINDOWS["layer_types"])
