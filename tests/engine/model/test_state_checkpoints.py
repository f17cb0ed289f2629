"""Checkpoints of families with constant state as they lie on the hub: fused experts, prediction layers, dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.decoder.reader import model_spec
from llmopt.quant.families.spec_parts import NotCovered
from llmopt.quant.model.checkpoint import Checkpoint
from safetensors.torch import load_file, save_file

from ...support.model_families import STATEFUL, VOCAB, save_model

TOKENS = torch.randint(3, VOCAB, (30,), generator=torch.Generator().manual_seed(3)).tolist()


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    built = Engine(EngineConfig(folder, dtype=dtype, device="cpu", num_threads=1, block_size=4))
    return built.prompt_logits(TOKENS)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def test_experts_may_be_fused_or_modules(tmp_path):
    """transformers writes modules, Qwen3.5's files have two tensors of all experts."""
    save_model(tmp_path, *STATEFUL["qwen3.5-moe"][:2])
    expected = logits(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{i}.{name}.weight") for i in range(8)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{prefix}down_proj"] = down
    rewrite(tmp_path, tensors)
    assert torch.equal(logits(tmp_path), expected)


@pytest.mark.parametrize("family", ["qwen3-next", "nemotron-h"])
def test_layers_for_multi_token_prediction_are_left_out_and_others_are_errors(family, tmp_path):
    save_model(tmp_path, *STATEFUL[family][:2])
    expected, tensors = logits(tmp_path), load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {**tensors, "mtp.layers.0.input_layernorm.weight": torch.ones(64)})
    assert torch.equal(logits(tmp_path), expected)
    rewrite(tmp_path, {**tensors, "mixture.weight": torch.ones(64)})
    with pytest.raises(BadInput, match=r"1 tensors have no place .* mixture\.weight"):
        logits(tmp_path)
    name = next(name for name in tensors if name.endswith("A_log"))
    rewrite(tmp_path, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(BadInput, match="A_log"):
        logits(tmp_path)
    rewrite(tmp_path, {**tensors, name: torch.ones(3)})
    with pytest.raises(BadInput, match=r"A_log has shape \(3,\), but config\.json makes it"):
        logits(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("lfm-2", {"layer_types": ["conv", "chunked_attention", "conv"]}, "chunked_attention"),
        ("qwen3.5", {"hidden_act": "gelu"}, "after a convolution"),
        ("granite-4", {"hidden_act": "gelu"}, "after a convolution"),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "after a convolution"),
    ],
)
def test_what_is_not_covered_runs_through_transformers(family, changes, complaint, tmp_path):
    save_model(tmp_path, *STATEFUL[family][:2])
    config: dict[str, Any] = {**Checkpoint(tmp_path).config, **changes}
    with pytest.raises(NotCovered, match=complaint):
        model_spec(config)


@pytest.mark.parametrize("family", ["qwen3.5", "granite-4-dense", "nemotron-h"])
def test_a_bf16_model_keeps_its_recurrent_state_in_float32(family, tmp_path):
    save_model(tmp_path, *STATEFUL[family][:2])
    exact, rounded = logits(tmp_path).log_softmax(-1), logits(tmp_path, "bfloat16").log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 0 < divergence < 0.02
    built = Engine(EngineConfig(tmp_path, dtype="bfloat16", device="cpu", num_threads=1))
    window, recurrent = list(built.runner.decoder.state_layouts)[:2]
    assert (window.dtype, recurrent.dtype) == (torch.bfloat16, torch.float32)
