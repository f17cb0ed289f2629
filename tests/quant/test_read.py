"""Checkpoints of other tools, as the engine's loader meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from llmopt.quant.checkpoint import Checkpoint
from llmopt.quant.errors import BadInput
from llmopt.quant.read import quantized_modules, read_quantized, tensor_names
from llmopt.quant.verify import UNPROVEN, verify
from quant_support import STORIES
from safetensors.torch import save_file

MODULE = "model.layers.0.mlp.up_proj"
HEAD = torch.randn(16, 64)


def write(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]
) -> Checkpoint:
    save_file(tensors | {"lm_head.weight": HEAD}, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder)


AUTOAWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def autoawq_words(values: torch.Tensor) -> torch.Tensor:
    """Pack as AutoAWQ's writer does, one nibble at a time, in Python integers."""
    rows = []
    for row in values.tolist():
        words = []
        for start in range(0, len(row), 8):
            word = 0
            for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                word |= row[start + column] << (4 * nibble)
            words.append(word - 2**32 if word >= 2**31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def test_a_checkpoint_of_autoawq(tmp_path: Path) -> None:
    codes, zeros = torch.randint(0, 16, (64, 24)), torch.randint(0, 16, (2, 24))
    scales = torch.rand(2, 24).half() + 0.1
    stored = {
        f"{MODULE}.qweight": autoawq_words(codes),
        f"{MODULE}.qzeros": autoawq_words(zeros),
        f"{MODULE}.scales": scales,
        f"{MODULE}.bias": torch.zeros(24),
    }
    checkpoint = write(tmp_path, stored, AUTOAWQ)
    assert quantized_modules(checkpoint) == {MODULE}
    assert tensor_names(checkpoint, MODULE) == stored.keys() - {f"{MODULE}.bias"}
    expected = (codes - zeros.repeat_interleave(32, dim=0)) * scales.float().repeat_interleave(
        32, dim=0
    )
    assert torch.equal(read_quantized(checkpoint, MODULE).dequantize(), expected.T)
    assert verify(tmp_path).status == UNPROVEN


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_checkpoint_of_compressed_tensors(tmp_path: Path, symmetric: bool) -> None:
    codes = torch.randint(-8, 8, (24, 64), dtype=torch.int8)
    zeros = torch.zeros(24, 2, dtype=torch.int8)
    if not symmetric:
        zeros = torch.randint(-8, 8, (24, 2), dtype=torch.int8)
    scales = (torch.rand(24, 2) + 0.1).to(torch.bfloat16)
    stored = {
        f"{MODULE}.weight_packed": pack_to_int32(codes, 4),
        f"{MODULE}.weight_scale": scales,
        f"{MODULE}.weight_shape": torch.tensor([24, 64]),
    }
    if not symmetric:
        stored[f"{MODULE}.weight_zero_point"] = pack_to_int32(zeros, 4, packed_dim=0).contiguous()
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": 32,
        "observer": "minmax",
        "actorder": None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    checkpoint = write(
        tmp_path,
        stored,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    )
    assert quantized_modules(checkpoint) == {MODULE}
    assert tensor_names(checkpoint, MODULE) == set(stored)
    expected = (codes.float() - zeros.repeat_interleave(32, dim=1)) * (
        scales.float().repeat_interleave(32, dim=1)
    )
    assert torch.equal(read_quantized(checkpoint, MODULE).dequantize(), expected)
    assert verify(tmp_path).status == UNPROVEN


def test_a_plain_checkpoint_has_no_quantized_modules() -> None:
    assert quantized_modules(Checkpoint(STORIES)) == set()


def test_unknown_methods_name_folder_and_method(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {}, {"quant_method": "hqq"})
    with pytest.raises(BadInput, match=rf"{tmp_path}: quant_method 'hqq' is not supported"):
        quantized_modules(checkpoint)


def test_a_config_that_promises_codes_is_held_to_it(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {f"{MODULE}.weight": torch.randn(24, 64)}, AUTOAWQ)
    with pytest.raises(BadInput, match="no tensor in it ends in"):
        quantized_modules(checkpoint)


def test_a_module_without_its_scales_names_the_tensor(tmp_path: Path) -> None:
    stored = {
        f"{MODULE}.qweight": torch.zeros(64, 3, dtype=torch.int32),
        f"{MODULE}.qzeros": torch.zeros(2, 3, dtype=torch.int32),
    }
    checkpoint = write(tmp_path, stored, AUTOAWQ)
    with pytest.raises(BadInput, match=rf"no tensor '{MODULE}\.scales'"):
        read_quantized(checkpoint, MODULE)
    assert not verify(tmp_path).ok
