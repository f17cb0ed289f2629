"""Images beside every other feature of docs/measured/feature-pairs.md: it runs, or is refused with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.compatibility import ALTERNATIVES, FEATURES, REFUSALS, refusal_line
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.core.llm import LLM
from llmopt.quant.kinds.integer.scheme import IntScheme
from transformers import LlamaConfig, LlamaForCausalLM

from ...support.heads_world import write_eagle, write_medusa
from ...support.image_models import (
    IMAGE_FAMILIES,
    TEXT,
    VOCAB,
    picture,
    save_image_model,
    save_processor,
)
from ...support.lora_world import write_adapter
from ...support.model_families import LATENT
from ...support.quantized_world import write_checkpoint
from ..config.test_compatibility import CHECKPOINT, ENGINE, LOSSLESS, REQUEST

LLAVA = IMAGE_FAMILIES["llava-1.5"]
PROMPTS = [
    {"prompt": "Once upon <image> a time", "images": [picture(1)]},
    {"prompt": "<image> and <image>", "images": [picture(2), picture(1)]},
    "Once upon a time",
]
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {"model_type": "llama"},
    "windows": {"model_type": "mistral", "sliding_window": 5},
    "latents": {"model_type": "deepseek_v2", **LATENT, "num_key_value_heads": 4},
    "transformers": {"model_type": "arcee"},
    "states": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
}
OTHERS = [
    name
    for name in FEATURES
    if name not in ("images", "tensor-parallel")
    and frozenset({"images", name}) not in {*REFUSALS, *ALTERNATIVES}
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A LLaVA around each kind of text model; the plain one with an adapter, heads and a draft beside it."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {name: root / name for name in (*TEXTS, "quantized")}
    for name, text in TEXTS.items():
        model = save_image_model(made[name], replace(LLAVA, text=text))
        if name == "plain":
            write_adapter(root / "plain" / "adapter", model, ("down_proj",))
            scheme = IntScheme(bits=8, group_size=32, symmetric=True)
            write_checkpoint(made["quantized"], model, "compressed-tensors", scheme)
            save_processor(made["quantized"], LLAVA)
    write_medusa(root / "plain" / "medusa", hidden=64, vocab=VOCAB)
    write_eagle(root / "plain" / "eagle", hidden=64, vocab=VOCAB)
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_dict(TEXT)).save_pretrained(root / "plain" / "draft")
    save_processor(root / "plain" / "draft", LLAVA)
    return made


def opened(checkpoints: dict[str, Path], name: str = "plain") -> LLM:
    """The engine with a feature."""
    folder = checkpoints.get(name, checkpoints["plain"])
    options: dict[str, Any] = dict(ENGINE.get(name, {}))
    if name in ("draft", "medusa", "eagle"):
        options = {"speculation": SpeculationConfig(name, folder / name)}
    if name == "lora":
        options = {"loras": {"own": folder / "adapter"}}
    fixed = {"dtype": "float32", "num_threads": 1, "block_size": 4, "num_blocks": 100}
    return LLM(folder, **{**fixed, "max_model_len": 120, **options})


def tokens(llm: LLM, name: str = "") -> list[list[int]]:
    """Greedy tokens under a feature of a request."""
    options: dict[str, Any] = {"n": 2, "best_of": 3} if name == "completions" else {}
    options |= {"prompt_logprobs": 1} if name == "prompt-logprobs" else {}
    options |= {"logit_bias": {5: 1.0}} if name == "mask" else {}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **options)
    results = llm.generate(PROMPTS, params, lora="own" if name == "lora" else None)
    assert llm.engine.stats.kv_blocks_used == 0
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("name", OTHERS)
def test_a_feature_goes_with_images(checkpoints, name):
    assert name in {*ENGINE, *CHECKPOINT, *REQUEST}
    found = tokens(opened(checkpoints, name), name)
    assert all(len(each) == 6 for each in found)
    if name in LOSSLESS:
        assert found == tokens(opened(checkpoints))


@pytest.mark.whole
def test_a_divided_model_takes_images(checkpoints):
    llm = opened(checkpoints, "tensor-parallel")
    try:
        assert tokens(llm) == tokens(opened(checkpoints))
    finally:
        llm.engine.close()


@pytest.mark.parametrize("name", ["draft", "eagle"])
def test_a_draft_without_a_vision_tower_is_refused(checkpoints, name):
    line = refusal_line(frozenset({"images", name}))
    llm = opened(checkpoints, name)
    with pytest.raises(BadInput, match=line):
        tokens(llm)
    assert tokens_of_text(llm)


def tokens_of_text(llm: LLM) -> list[int]:
    """The engine still serves text."""
    return llm.generate("Once upon", SamplingParams(temperature=0, max_tokens=4))[0].token_ids
