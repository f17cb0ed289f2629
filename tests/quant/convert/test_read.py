"""Loading checkpoints of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from llmopt.base.errors import BadInput
from llmopt.quant.convert.verify import UNPROVEN, verify
from llmopt.quant.formats.registry import quantized_modules, read_quantized, tensor_names
from llmopt.quant.model.checkpoint import Checkpoint
from safetensors.torch import save_file

from ...support.quant_support import STORIES

MODULE = "model.layers.0.mlp.up_proj"
HEAD = torch.randn(16, 64)


def write(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]
) -> Checkpoint:
    save_file(tensors | {"lm_head.weight": HEAD}, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "single_linear", "quantization_config": quantization}
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


def autogptq_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack `[n, columns]` down the columns as AutoGPTQ's writer does, value after value.

    In 3 bits, values 10 and 21 of 32 are split between two words: two and one bits, one and two.
    """
    words = torch.zeros(values.shape[0] * bits // 32, values.shape[1], dtype=torch.int64)
    values = values.to(torch.int64)
    if bits != 3:
        for index, row in enumerate(values):
            words[index * bits // 32] |= row << (bits * index % 32)
    else:
        for block in range(values.shape[0] // 32):
            row, word = values[block * 32 :], words[block * 3 :]
            for index in range(10):
                word[0] |= row[index] << (3 * index)
                word[1] |= row[11 + index] << (3 * index + 1)
                word[2] |= row[22 + index] << (3 * index + 2)
            word[0] |= (row[10] & 3) << 30
            word[1] |= row[10] >> 2
            word[1] |= (row[21] & 1) << 31
            word[2] |= row[21] >> 1
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("label", ["gptq", None])
@pytest.mark.parametrize("order", ["in order", "permuted", "zeros"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_checkpoint_of_autogptq(tmp_path: Path, bits: int, order: str, label: str | None) -> None:
    """Asymmetric, with one taken from each zero code before it was packed. A g_idx of zeros alone is none."""
    permuted = order == "permuted"
    codes = torch.randint(0, 2**bits, (64, 32))
    zeros = torch.randint(1, 2**bits, (2, 32))
    scales = torch.rand(2, 32).half() + 0.1
    groups = torch.randperm(64) // 32 if permuted else torch.arange(64) // 32
    stored = {
        f"{MODULE}.qweight": autogptq_words(codes, bits),
        f"{MODULE}.qzeros": autogptq_words((zeros - 1).T, bits).T.contiguous(),
        f"{MODULE}.scales": scales,
        f"{MODULE}.g_idx": groups.to(torch.int32) * (order != "zeros"),
        f"{MODULE}.bias": torch.zeros(32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": permuted}
    config |= {"sym": False} | ({} if label is None else {"checkpoint_format": label})
    checkpoint = write(tmp_path, stored, config)
    assert quantized_modules(checkpoint) == {MODULE}
    assert tensor_names(checkpoint, MODULE) == stored.keys() - {f"{MODULE}.bias"}
    expected = (codes - zeros[groups]) * scales.float()[groups]
    assert torch.equal(read_quantized(checkpoint, MODULE).dequantize(), expected.T)
    assert verify(tmp_path).status == UNPROVEN


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_gemv_layout_of_autoawq(tmp_path: Path, group_size: int) -> None:
    """Its zero codes and scales are padded to a multiple of words that depends on the group size."""
    groups, width = 256 // group_size, {32: 4, 64: 2, 128: 1}[group_size]
    codes, zeros = torch.randint(0, 16, (24, 256)), torch.zeros(24, width * 8, dtype=torch.int64)
    zeros[:, :groups] = torch.randint(0, 16, (24, groups))
    scales = torch.zeros(24, width * 8).half()
    scales[:, :groups] = torch.rand(24, groups).half() + 0.1
    stored = {
        f"{MODULE}.qweight": autogptq_words(codes.T, 4).T.contiguous(),
        f"{MODULE}.qzeros": autogptq_words(zeros.T, 4).T.contiguous(),
        f"{MODULE}.scales": scales,
    }
    checkpoint = write(tmp_path, stored, AUTOAWQ | {"group_size": group_size, "version": "GEMV"})
    wide = [tensor[:, :groups].repeat_interleave(group_size, dim=1) for tensor in (zeros, scales)]
    assert torch.equal(
        read_quantized(checkpoint, MODULE).dequantize(), (codes - wide[0]) * wide[1].float()
    )
    assert verify(tmp_path).failures == []


FP8: dict[str, tuple[dict[str, Any], str, tuple[int, ...], str]] = {
    "vLLM, one scale": ({"activation_scheme": "static"}, "weight_scale", (), "input_scale"),
    "vLLM, dynamic": ({"activation_scheme": "dynamic"}, "weight_scale", (1,), ""),
    "transformers": ({"activation_scheme": "static"}, "weight_scale_inv", (), "activation_scale"),
    "channels": ({"activation_scheme": "dynamic"}, "weight_scale_inv", (256, 1), ""),
    "blocks": ({"weight_block_size": [128, 128]}, "weight_scale_inv", (2, 3), ""),
}


@pytest.mark.parametrize("form", FP8)
def test_checkpoints_in_fp8(tmp_path: Path, form: str) -> None:
    config, name, shape, input_name = FP8[form]
    values = torch.randn(256, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(shape) + 0.1
    stored = {f"{MODULE}.weight": values, f"{MODULE}.{name}": scales}
    if input_name:
        stored[f"{MODULE}.{input_name}"] = torch.tensor(0.25)
    checkpoint = write(tmp_path, stored, {"quant_method": "fp8"} | config)
    wide = scales
    if form == "blocks":
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :300]
    read = read_quantized(checkpoint, MODULE)
    assert torch.equal(read.dequantize(), values.float() * wide)
    assert (read.parts().get("input_scale") is not None) is bool(input_name)
    assert tensor_names(checkpoint, MODULE) == set(stored)
    assert verify(tmp_path).failures == []


def test_targets_of_compressed_tensors(tmp_path: Path) -> None:
    """A module's own name counts before a pattern, and a pattern before the kind of layer."""
    other = "model.layers.0.mlp.gate_proj"
    weights = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"weights": weights | {"strategy": "tensor"}, "targets": ["Linear"]}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": group,
            "group_1": group
            | {"weights": weights | {"strategy": "channel"}, "targets": ["re:.*gate_proj$"]},
        },
        "ignore": ["re:.*lm_head"],
    }
    values = torch.randn(16, 64).to(torch.float8_e4m3fn)
    stored = {
        f"{MODULE}.weight": values,
        f"{MODULE}.weight_scale": torch.tensor([0.5]),
        f"{other}.weight": values.clone(),
        f"{other}.weight_scale": torch.rand(16, 1) + 0.1,
    }
    checkpoint = write(tmp_path, stored, config)
    for module in (MODULE, other):
        expected = values.float() * stored[f"{module}.weight_scale"]
        assert torch.equal(read_quantized(checkpoint, module).dequantize(), expected)
    assert verify(tmp_path).failures == []


def test_codes_without_scales_are_noticed_though_others_have_theirs(tmp_path: Path) -> None:
    values = torch.randn(16, 64).to(torch.float8_e4m3fn)
    stored = {
        f"{MODULE}.weight": values,
        f"{MODULE}.weight_scale_inv": torch.tensor(1.0),
        "model.layers.0.mlp.gate_proj.weight": values.clone(),
    }
    checkpoint = write(tmp_path, stored, {"quant_method": "fp8"})
    with pytest.raises(BadInput, match=r"gate_proj\.weight holds F8_E4M3 codes, but its scales"):
        quantized_modules(checkpoint)


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
