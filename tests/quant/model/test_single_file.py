"""A folder with `model.safetensors` and an index of other shards: the single file, as in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.engine.planner.catalog import stored_weight_bytes
from llmopt.quant.model.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from llmopt.quant.source.models import MODELS
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SMALL = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("are_shards_there", [True, False], ids=["old-shards", "stale-index"])
def test_the_single_file_is_read_as_transformers_does(
    tmp_path: Path, are_shards_there: bool
) -> None:
    torch.manual_seed(0)
    old, new = LlamaForCausalLM(SMALL), LlamaForCausalLM(SMALL)
    old.save_pretrained(tmp_path, max_shard_size="20KB")
    new.save_pretrained(tmp_path / "new")
    single = (tmp_path / "new" / SINGLE_NAME).rename(tmp_path / SINGLE_NAME)
    assert (tmp_path / INDEX_NAME).is_file()
    if not are_shards_there:
        for shard in tmp_path.glob("model-0*.safetensors"):
            shard.unlink()
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.shard_of.values()) == {SINGLE_NAME}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name in checkpoint.names:
        assert torch.equal(checkpoint.tensor(name), theirs[name]), name
    header = int.from_bytes(single.read_bytes()[:8], "little")
    assert stored_weight_bytes(tmp_path) == single.stat().st_size - 8 - header
    assert checkpoint.weight_bytes == single.stat().st_size


def test_an_index_alone_is_followed(tmp_path: Path) -> None:
    LlamaForCausalLM(SMALL).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(set(Checkpoint(tmp_path).shard_of.values())) > 1
    assert set(Checkpoint(MODELS / "stories260K").shard_of.values()) == {SINGLE_NAME}
