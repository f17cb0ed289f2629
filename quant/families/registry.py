"""Registry of model families: the file of each model type, loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

from .family import ImageSettings, ImageTokens, ModelFamily

_NAMES = {
    ".llama": """
        llama llama4 llama4_text seed_oss smollm3 mistral mixtral ministral ministral3 mistral3
    """,
    ".qwen": """
        qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text
        qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text
        qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text
    """,
    ".gemma": "gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text",
    ".mixtures": """
        deepseek_v2 deepseek_v3 kimi_k2 kimi_k25 dots1 glm glm4 glm4_moe glm4v_text glm4v_moe_text
        hunyuan_v1_dense hunyuan_v1_moe ernie4_5 ernie4_5_moe minimax_m2 gpt_oss
    """,
    ".gpt": """
        gpt2 falcon RefinedWeb RefinedWebModel starcoder2 phi3 olmo2 olmo3 exaone4 cohere cohere2
    """,
    ".mamba_hybrids": """
        lfm2 lfm2_moe nemotron_h
        granite granitemoe granitemoehybrid granitemoeshared granitemoe_swa
    """,
    ".vision": "llava llava_next llava_onevision internvl idefics3 smolvlm aria",
}
FILES = {module: tuple(names.split()) for module, names in _NAMES.items()}
"""Modules, relative to this folder, and the model types in the `FAMILIES` of each, with their former names.

To add a family: a module with `FAMILIES`, and its names here.
"""


def type_of(config: Any) -> str:
    get = config.get if isinstance(config, Mapping) else partial(getattr, config)
    name = get("model_type", None)
    return name if isinstance(name, str) else ""


def model_family(name: str) -> ModelFamily | None:
    """The family of a model type, which may be a former name of it; None: it has no file."""
    module = next((module for module, names in FILES.items() if name in names), None)
    if module is None:
        return None
    families = _families_of(module)
    return next(item for item in families if name in (item.name, *item.other_names))


def all_families() -> Iterator[ModelFamily]:
    for module in FILES:
        yield from _families_of(module)


def image_tokens(settings: ImageSettings, width: int, height: int) -> ImageTokens | None:
    """The tokens of an image by its family's rule, or None. BadInput: a refused aspect ratio."""
    family = model_family(type_of(settings.config))
    if family is None or family.image_tokens is None:
        return None
    return family.image_tokens(settings, width, height)


@cache
def _families_of(module: str) -> tuple[ModelFamily, ...]:
    return import_module(module, __package__).FAMILIES
