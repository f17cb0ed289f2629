"""Quantized checkpoints of families with experts, fused projections or a latent: packed, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.kinds.fp4.formats import read_mxfp4
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ...support.model_families import FAMILIES, save_model

TOKENS = torch.randint(3, 500, (1, 60), generator=torch.Generator().manual_seed(0))


def engine(folder: Path) -> Engine:
    return Engine(EngineConfig(folder, dtype="float32", device="cpu", num_threads=1))


def expected_logits(folder: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers' logits of plain weights; `folder` has the config."""
    plain = folder.parent / "plain"
    plain.mkdir()
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(TOKENS).logits[0]


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    "family",
    [
        "qwen3-moe",
        "gemma-2",
        "phi-3",
        "deepseek-v3",
        "qwen2-moe",
        "glm-4-moe",
        "olmo-3",
        "minimax-m2",
        "lfm-2",
        "qwen3-next",
        "granite-4-dense",
        "nemotron-h",
    ],
)
def test_a_quantized_family_has_the_logits_of_its_dequantized_weights(family, tmp_path):
    source, folder = tmp_path / "source", tmp_path / "quantized"
    save_model(source, *FAMILIES[family])
    quantize(QuantizeRequest(source, folder, method="rtn", group_size=8, num_samples=2, seq_len=32))
    checkpoint = Checkpoint(folder)
    modules = quantized_modules(checkpoint)
    assert len(modules) >= 10
    tensors = {f"{m}.weight": read_quantized(checkpoint, m).dequantize() for m in modules}
    packed = tuple(f"{m}." for m in modules)
    plain_names = [n for n in checkpoint.names if not n.startswith(packed) or n.endswith(".bias")]
    tensors |= {n: checkpoint.tensor(n) for n in plain_names}
    built = engine(folder)
    torch.testing.assert_close(
        built.prompt_logits(TOKENS[0].tolist()),
        expected_logits(folder, tensors),
        atol=1e-4,
        rtol=1e-4,
    )
    plain = engine(source).memory.weight_bytes_per_step
    assert built.memory.weight_bytes_per_step < 0.65 * plain


@pytest.fixture
def mxfp4(tmp_path):
    """A gpt-oss whose experts are random codes, in OpenAI's layout, and its plain tensors."""
    source, folder = tmp_path / "source", tmp_path / "mxfp4"
    model = save_model(source, *FAMILIES["gpt-oss"])
    checkpoint, g = Checkpoint(source), torch.Generator().manual_seed(1)
    packed, plain = {}, {}
    for name, tensor in checkpoint.tensors():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = plain[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=g, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    folder.mkdir()
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    for file in source.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder, plain


def test_mxfp4_experts_have_the_logits_of_transformers(mxfp4):
    folder, plain = mxfp4
    built = engine(folder)
    torch.testing.assert_close(
        built.prompt_logits(TOKENS[0].tolist()),
        expected_logits(folder, plain),
        atol=1e-4,
        rtol=1e-4,
    )
    experts = sum(t.numel() for n, t in plain.items() if n.endswith(("gate_up_proj", "down_proj")))
    others = sum(t.nbytes for t in plain.values()) - experts * 4
    assert built.memory.weight_bytes_per_step < others + experts * 0.7, (
        "4 bits and a scale for 32 weights"
    )


def test_mxfp4_of_the_wrong_shape_is_named(mxfp4):
    checkpoint = Checkpoint(mxfp4[0])
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(BadInput, match=r"down_proj_blocks has shape .* implies \(4, 64, 4, 16\)"):
        read_mxfp4(checkpoint, name, 4, 64, 128)
    with pytest.raises(BadInput, match="takes multiples of 32"):
        read_mxfp4(checkpoint, name, 4, 64, 100)
