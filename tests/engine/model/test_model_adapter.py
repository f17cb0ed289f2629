"""Models run through transformers' modules: their batches, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.quant.base.errors import BadInput
from llmopt.quant.model.checkpoint import Checkpoint

from ...support.model_families import ADAPTED, SHAPE, VOCAB, save_model


def adapted(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    return TransformersModel(Checkpoint(folder), torch.device("cpu"), dtype)


@pytest.mark.parametrize("family", ADAPTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_takes_one_pass_for_all_sequences_where_it_can(family, dtype, tmp_path):
    config_class, overrides, way, _ = ADAPTED[family]
    save_model(tmp_path, config_class, overrides)
    model = adapted(tmp_path, dtype)
    assert type(model._forward).__name__ == way
    plain = sum(parameter.nbytes for parameter in model._model.parameters())
    assert model.bytes_held == plain
    table = 0 if model._model.config.tie_word_embeddings else VOCAB * 64 * dtype.itemsize
    assert model.bytes_per_step == plain - table


STATES = {
    "mamba": ("MambaConfig", {}),
    "convolutions": ("Lfm2Config", {"layer_types": ["full_attention", "conv", "full_attention"]}),
    "linear attention": ("MiniMaxConfig", {"num_local_experts": 2}),
}


@pytest.mark.parametrize("state", STATES)
def test_a_state_that_is_no_kv_cache_is_refused(state, tmp_path):
    save_model(tmp_path, *STATES[state])
    with pytest.raises(BadInput, match="keeps a state that is not a KV cache") as refusal:
        Engine(EngineConfig(tmp_path, dtype="float32", device="cpu", num_threads=1))
    assert "\n" not in str(refusal.value)


def changed(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "no_such_type"}, "is not known to transformers"),
        ({"model_type": "t5"}, "is not a causal language model"),
        ({"hidden_size": 72}, "does not load"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"quantization_config": {"quant_method": "awq"}}, "this checkpoint is quantized"),
    ],
)  # fmt: skip
def test_what_transformers_cannot_serve_is_refused(changes, complaint, tmp_path):
    save_model(tmp_path, "ArceeConfig", {})
    with pytest.raises(BadInput, match=complaint) as refusal:
        adapted(changed(tmp_path, **changes))
    assert "\n" not in str(refusal.value)


def test_a_model_whose_cached_results_differ_from_its_own_is_refused(tmp_path, monkeypatch):
    save_model(tmp_path, "BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 8})
    monkeypatch.setattr(TransformersModel, "_agrees", lambda *_: False)
    with pytest.raises(BadInput, match=r"does not run over a paged cache: .*the results differ"):
        adapted(tmp_path)


def test_a_family_with_an_option_that_the_decoder_lacks_goes_to_transformers(tmp_path):
    save_model(tmp_path, "GPT2Config", {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": SHAPE["max_position_embeddings"],
        "scale_attn_by_inverse_layer_idx": True,
    })  # fmt: skip
    built = Engine(EngineConfig(tmp_path, dtype="float32", device="cpu", num_threads=1))
    assert isinstance(built.runner.decoder, TransformersModel)


def test_a_model_without_a_context_length_needs_one(tmp_path):
    save_model(tmp_path, *ADAPTED["bloom-alibi"][:2])
    with pytest.raises(BadInput, match="names no context length: give max_model_len"):
        Engine(EngineConfig(tmp_path, dtype="float32", device="cpu", num_threads=1))
