"""A random Qwen3-MoE with a skewed router through the pipeline: no expert worse than rtn on held-out tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from transformers import AutoConfig, AutoModelForCausalLM

from ...support.quant_support import STORIES

EXPERTS = 8


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 8 experts; a direction that all tokens share sends most of them to the first ones."""
    folder = tmp_path_factory.mktemp("skewed") / "model"
    config: Any = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    shared = torch.randn(config.hidden_size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
        model.model.embed_tokens.weight.add_(shared * 0.3)
        for layer in model.model.layers:
            tilt = torch.linspace(0.2, -0.2, EXPERTS)[:, None] * shared / shared.norm()
            layer.mlp.gate.weight.add_(tilt)
    model.save_pretrained(folder)
    for path in STORIES.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize(("method", "bits"), [("gptq", 4), ("rtn", 4)])
def test_no_expert_is_worse_than_rounding_on_held_out_tokens(
    tmp_path: Path, skewed: Path, method: str, bits: int
) -> None:
    request = QuantizeRequest(
        skewed,
        tmp_path / "out",
        method=method,
        bits=bits,
        group_size=32,
        format="compressed-tensors",
        num_samples=24,
        seq_len=64,
        held_out=8,
    )
    modules = quantize(request).manifest["modules"]
    experts = [module for module in modules if ".experts." in module["module"]]
    assert len(experts) == 2 * 3 * EXPERTS
    tokens = [module["num_tokens"] for module in experts]
    assert max(tokens) > 20 * min(tokens), "the router is not skewed"
    worse = {
        module["module"]: module["held_out_error"] / module["rtn_held_out_error"]
        for module in experts
        if module["held_out_error"] is not None
        and module["held_out_error"] > module["rtn_held_out_error"]
    }
    assert not worse
