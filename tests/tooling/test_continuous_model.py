"""The real model off its 4-bit grid, and the wider twin: on small tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from tools.continuous_model import (
    add_noise,
    block_steps,
    logit_difference,
    unpermuted,
    widened,
    write,
)
from tools.quality.gguf_file import permuted

CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def q4_1(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A GGUF file of two linears, and the tensors of its plain checkpoint."""
    generator = torch.Generator().manual_seed(0)
    path, tensors = tmp_path / "model.gguf", {}
    writer = GGUFWriter(path, "llama")
    for name, target, heads in (("attn_q", "self_attn.q_proj", 2), ("ffn_up", "mlp.up_proj", 0)):
        values = torch.randn(16, 64, generator=generator)
        packed = quantize(values.numpy(), GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
        plain = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q4_1))
        plain = unpermuted(plain, heads) if heads else plain
        tensors[f"model.layers.0.{target}.weight"] = plain.bfloat16()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_noise_is_within_half_a_step_of_its_own_block(
    q4_1: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = q4_1
    linears = block_steps(path, CONFIG)
    before = {name: values for name, (_, values) in linears.items()}
    moved = dict(before)
    add_noise(moved, linears, seed=0)
    for name, tensor in moved.items():
        steps = linears[name][0].repeat_interleave(32, dim=1)
        shares = (tensor - before[name]) / steps
        assert shares.abs().max() <= 0.5 + 1e-4
        assert shares.abs().max() > 0.45  # and it reaches there
        assert abs(float(shares.mean())) < 0.05


def test_a_file_of_another_model_is_refused(q4_1: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = q4_1
    linears = block_steps(path, CONFIG)
    add_noise(dict(tensors), linears, seed=0)  # its own is taken
    swapped = {name: tensor.flip(0) for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match="is not that of the checkpoint"):
        add_noise(swapped, linears, seed=0)


def test_the_permutation_of_heads_is_undone() -> None:
    rows = torch.arange(24.0)[:, None].expand(24, 3)
    assert torch.equal(unpermuted(permuted(rows, 3), 3), rows)
    assert not torch.equal(permuted(rows, 3), rows)


def test_the_twin_is_the_same_function(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,  # large, so that a wrong one is seen
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)
    plain, twin = tmp_path / "plain", tmp_path / "twin"
    model.save_pretrained(plain)
    fields = json.loads((plain / "config.json").read_text())
    tensors = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    write(twin, plain, *widened(tensors, fields, 48))
    assert json.loads((twin / "config.json").read_text())["num_key_value_heads"] == 2
    assert logit_difference(plain, twin) < 1e-5
