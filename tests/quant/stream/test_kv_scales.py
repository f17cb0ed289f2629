"""Ranges of keys and values, and the scales made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmopt.base.atomic_io import write_tensors
from llmopt.base.errors import BadInput
from llmopt.quant.convert.verify import verify
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.calls import KvRanges, kv_heads
from safetensors.torch import load_file

from ...support.quant_support import QUICK, STORIES


def test_ranges_are_of_each_head_over_all_updates() -> None:
    ranges = KvRanges()
    keys = torch.tensor([[[[1.0, -3.0]], [[0.5, 0.25]]]])  # two heads, one token
    assert ranges.update(keys, keys * 0)[0] is keys
    ranges.update(keys / 2, keys * 2)
    assert ranges.key.tolist() == [3.0, 0.5] and ranges.value.tolist() == [6.0, 1.0]
    ranges.update(keys[:0], keys[:0])  # no samples
    per_head = ranges.scales("fp8", "attn_head")
    assert per_head["self_attn.k_scale"].flatten().tolist() == pytest.approx([3 / 448, 0.5 / 448])
    assert ranges.scales("fp8")["self_attn.v_scale"].tolist() == pytest.approx([6 / 448])


def test_a_head_without_values_has_a_usable_scale() -> None:
    ranges = KvRanges()
    ranges.update(torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert ranges.scales("fp8", "attn_head")["self_attn.k_scale"].flatten().tolist() == [1.0, 1.0]


def test_a_latent_and_its_rotated_key_have_one_scale() -> None:
    latent, rotated = torch.full((1, 1, 3, 8), 2.0), torch.full((1, 1, 3, 8), -5.0)
    ranges = KvRanges(latent=True)
    ranges.update(latent, rotated)
    assert ranges.checked("m").scales("fp8")["self_attn.k_scale"].tolist() == pytest.approx(
        [5 / 448]
    )
    multi_query = KvRanges()  # one KV head, and no latent
    multi_query.update(latent, rotated)
    assert multi_query.key.tolist() == [2.0] and multi_query.value.tolist() == [5.0]
    expanded = KvRanges(latent=True)
    expanded.update(torch.ones(1, 4, 3, 8), torch.zeros(1, 4, 3, 8))
    with pytest.raises(BadInput, match="its scale was not measured"):
        expanded.checked("m")
    with pytest.raises(BadInput, match="no keys and values"):
        KvRanges().checked("m")


def test_heads_of_a_config() -> None:
    assert kv_heads({"num_key_value_heads": 4, "num_attention_heads": 8}) == 4
    assert kv_heads({"num_attention_heads": 8}) == 8
    assert kv_heads({"num_key_value_heads": 16, "kv_lora_rank": 512}) == 1


def test_int8_scales_are_left_to_the_server(tmp_path: Path) -> None:
    asked = QuantizeRequest(STORIES, tmp_path / "out", "rtn", kv_cache="int8", errors=False)
    result = quantize(asked)
    assert any("int8_per_token_head (vLLM)" in note for note in result.notes)
    assert result.manifest["options"]["kv_cache"] == "int8"
    checkpoint = Checkpoint(result.output)
    assert not [name for name in checkpoint.names if name.endswith("k_scale")]
    assert (checkpoint.quantization_config or {})["kv_cache_scheme"] is None


def test_verify_counts_the_scales(tmp_path: Path) -> None:
    asked = QuantizeRequest(STORIES, tmp_path / "out", "rtn", kv_cache="fp8", **QUICK)  # pyright: ignore[reportArgumentType]
    result = quantize(replace(asked, kv_cache_strategy="attn_head"))
    (result.output / MANIFEST_NAME).unlink()  # its digests would name the file first
    shard = result.output / "model-layer-00000.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(5)
    write_tensors(shard, tensors)
    assert any("k_scale holds 5 scales, not 4" in line for line in verify(result.output).failures)
