"""Tiny random vision-language models, images for them, and an engine that takes both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from llmopt.engine.base.image_input import ImageInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.cache.step_inputs import Run
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.multimodal.encoder import EncoderCache
from llmopt.engine.multimodal.load_tower import load_encoder
from llmopt.engine.multimodal.open import ImageSupport
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS

from .model_families import FAMILIES, SHAPE, STATEFUL

IMAGE = 500
"""Token id of a placeholder."""
MROPE = {"rope_type": "default", "rope_theta": 1e4}
QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
GEMMA3_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 24, "patch_size": 4,
}  # fmt: skip
GEMMA4_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}  # fmt: skip
GEMMA4_IDS = {"image_token_id": IMAGE, "audio_config": None}

Fields = dict[str, Any]
IMAGE_MODELS: dict[str, tuple[str, Fields, Fields, Fields]] = {
    "qwen-2-vl": (
        "Qwen2VLConfig", {"rope_parameters": {**MROPE, "mrope_section": [1, 2, 1]}},
        {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4},
        QWEN_IDS,
    ),
    "qwen-2.5-vl": (
        "Qwen2_5_VLConfig", {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}},
        {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}, QWEN_IDS,
    ),
    "qwen-3-vl": (
        "Qwen3VLConfig",
        {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}, QWEN_IDS,
    ),
    "gemma-3": (
        "Gemma3Config", FAMILIES["gemma-3"][1], GEMMA3_VISION,
        {"mm_tokens_per_image": 9, "image_token_index": IMAGE, "boi_token_index": 501, "eoi_token_index": 502},
    ),
    "gemma-4": (
        "Gemma4Config",
        {**FAMILIES["gemma-4-keys-as-values"][1], "use_bidirectional_attention": "vision"},
        GEMMA4_VISION, GEMMA4_IDS,
    ),
    "gemma-4-per-layer": (
        "Gemma4Config", FAMILIES["gemma-4-shared-kv"][1], GEMMA4_VISION, GEMMA4_IDS,
    ),
}  # fmt: skip
"""The class of the config, the text model's fields, the vision model's, and fields of its own."""


QWEN35_VISION = {**QWEN_VISION, "num_position_embeddings": 16}
OTHERS: dict[str, tuple[str, Fields, Fields, Fields]] = {
    "qwen-3-vl-moe": (
        "Qwen3VLMoeConfig",
        {
            **IMAGE_MODELS["qwen-3-vl"][1], "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "mlp_only_layers": [1],
        },
        *IMAGE_MODELS["qwen-3-vl"][2:],
    ),
    "qwen-3.5": (
        "Qwen3_5Config",
        {
            **STATEFUL["qwen3.5"][1],
            "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        },
        QWEN35_VISION, QWEN_IDS,
    ),
    "glm-4v": (
        "Glm4vConfig", {"rope_parameters": {**MROPE, "mrope_section": [1, 2, 1]}},
        {**QWEN_VISION, "hidden_size": 64, "image_size": 24}, {"image_token_id": IMAGE, "video_token_id": 501},
    ),
}  # fmt: skip
"""Models that share what makes them differ with one of `IMAGE_MODELS`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with the images' placeholders in them."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()


def save_image_model(folder: Path, name: str) -> Any:
    """A random model, saved by transformers, with the bundled tokenizer beside it."""
    kind, text, vision, fields = (IMAGE_MODELS | OTHERS)[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(
        text_config={**SHAPE, **text}, vision_config=vision, **fields
    )
    model: Any = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.eval().save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODELS / "stories260K").save_pretrained(folder)
    return model


def image(name: str, seed: int, height: int = 6, width: int = 6) -> ImageInput:
    """A random image of `height` x `width` patches, of which 2 x 2 make a token."""
    g = torch.Generator().manual_seed(seed)
    num_tokens = height * width // 4
    if name.startswith(("qwen", "glm")):
        tensors = {
            "pixel_values": torch.randn(height * width, 3 * 2 * 4 * 4, generator=g),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        }
        grid = (1, height, width)
    elif name == "gemma-3":
        tensors, grid, num_tokens = (
            {"pixel_values": torch.randn(1, 3, 24, 24, generator=g)},
            None,
            9,
        )
    else:
        count = height * width
        pixels, places = torch.zeros(1, 40, 3 * 4 * 4), torch.full((1, 40, 2), -1)
        pixels[0, :count] = torch.rand(count, 3 * 4 * 4, generator=g)
        rows, columns = torch.arange(height), torch.arange(width)
        places[0, :count] = torch.cartesian_prod(rows, columns).flip(1)
        tensors, grid = {"pixel_values": pixels, "image_position_ids": places}, None
    content = seed.to_bytes(2, "little") + bytes([height, width])
    return ImageInput(content, 0, num_tokens, tensors, grid)


def prompt(seed: int, *parts: int | ImageInput) -> Prompt:
    """So many tokens of text, images, and text again."""
    g = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    images: list[ImageInput] = []
    for part in parts:
        if isinstance(part, int):
            token_ids += torch.randint(3, 490, (part,), generator=g).tolist()
        else:
            images.append(replace(part, offset=len(token_ids)))
            token_ids += [IMAGE] * part.num_tokens
    return Prompt(token_ids, tuple(images))


def oracle_inputs(given: Prompt) -> dict[str, torch.Tensor]:
    """What transformers' model takes for a prompt."""
    token_ids = torch.tensor([given.token_ids])
    if not given.images:
        return {"input_ids": token_ids}
    names = given.images[0].tensors
    tensors = {name: torch.cat([i.tensors[name] for i in given.images]) for name in names}
    types = (token_ids == IMAGE).int()
    return {"input_ids": token_ids, "mm_token_type_ids": types, "token_type_ids": types, **tensors}


def known_inputs(model: Any, given: Prompt) -> dict[str, torch.Tensor]:
    """`oracle_inputs`, without what this model does not know."""
    inputs = oracle_inputs(given)
    unknown = "token_type_ids" if type(model).__name__[:6] != "Gemma3" else "mm_token_type_ids"
    return {name: value for name, value in inputs.items() if name != unknown}


@torch.no_grad()
def expected_logits(model: Any, given: Prompt) -> torch.Tensor:
    return model(**known_inputs(model, given)).logits[0].float()


@torch.no_grad()
def expected_tokens(model: Any, given: Prompt, count: int) -> list[int]:
    """Greedy tokens of transformers."""
    ids = model.generate(
        **known_inputs(model, given), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return ids[0, len(given.token_ids) :].tolist()


def image_engine(folder: Path, **options: Any) -> Engine:
    """An engine of the checkpoint with its vision tower, for images that are processed already."""
    fixed = {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "block_size": 4,
        "num_blocks": 100,
    }
    engine = Engine(EngineConfig(folder, max_model_len=128, **{**fixed, **options}))
    cpu = torch.device("cpu")
    encoders = EncoderCache(load_encoder(Checkpoint(folder), cpu, torch.float32), 1 << 12)
    engine.images = ImageSupport(encoders=encoders)
    engine.runner.encoders = encoders
    return engine


def engine_logits(engine: Engine, given: Prompt) -> torch.Tensor:
    """Logits of all tokens of a prompt, in one step."""
    rules, pool = engine._image_rules, engine.scheduler.pool
    blocks = pool.allocate(-(-len(given.token_ids) // 4))
    run = Run(
        0, given.token_ids, blocks, images=given.images,
        rope_positions=rules.rope_positions(given.token_ids, given.images),
        bidirectional_images=rules.bidirectional(given.images),
    )  # fmt: skip
    hidden = engine.runner.hidden([run])
    pool.free(blocks)
    return engine.runner.decoder.logits(hidden)


def generated(engine: Engine, prompts: Sequence[Prompt], count: int, n: int = 1) -> list[list[int]]:
    """Greedy tokens of all prompts together, by prompt and completion."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, n=n)
    for index, given in enumerate(prompts):
        engine.add_request(str(index), given.token_ids, params, images=given.images)
    tokens: dict[tuple[int, int], list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault((int(output.request_id), output.index), []).extend(
                output.new_token_ids
            )
        engine.scheduler.check_integrity()
    return [tokens[key] for key in sorted(tokens)]
