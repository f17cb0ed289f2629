"""Models that transformers' modules run: text models in multimodal ones, shared keys and values, masks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.engine.model.adapter.open import open_model
from llmopt.engine.model.adapter.packed import PAGED, LayerMask, layer_mask
from llmopt.engine.model.layers.spec import LoadingOptions
from llmopt.quant.model.checkpoint import Checkpoint
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from tools.survey.engine_column import EngineColumn

from ...support.releases import skip_unknown_type
from ...support.survey.case import Case, spread_weights, surveyed_types

ON_CPU = LoadingOptions(torch.device("cpu"), torch.float32)


def case(model_type: str, folder: Path, **changes: Any) -> Case:
    return Case(model_type, {**surveyed_types()[model_type], **changes}, folder)


def saved(built: Case) -> Checkpoint:
    spread_weights(copy.deepcopy(built.model)).save_pretrained(built.folder / "saved")
    return Checkpoint(built.folder / "saved")


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        ("qwen3_vl", "decoder"),  # M-RoPE: three rows of positions
        ("qwen3_5_moe", "decoder"),  # a text model whose first layer has no attention
        ("nemotron_h_omni", "decoder"),  # a head beside a decoder of another name
        ("ernie4_5_vl_moe", "packed"),
        ("gemma3n_text", "decoder"),  # layers that share keys and values
        ("gemma4_unified", "sequential"),
        ("step3p7", "sequential"),
        ("granite4_vision", "sequential"),  # does not return the cache that it is given
        ("qwen4_exp_text", "sequential"),  # caches positions
        ("xlstm", "sequential"),  # states in tuples
    ],
)
def test_tokens_are_those_of_transformers(model_type: str, way: str, tmp_path: Path) -> None:
    skip_unknown_type(model_type)
    verdict = EngineColumn().verdict(case(model_type, tmp_path))
    assert (verdict.outcome, verdict.detail) == ("exact", way)


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl"])
@pytest.mark.parametrize("outer", [True, False])
def test_the_outer_tie_is_the_one_that_counts(model_type: str, outer: bool, tmp_path: Path) -> None:
    ties = {"tie_word_embeddings": outer, "text_config.tie_word_embeddings": not outer}
    assert EngineColumn().verdict(case(model_type, tmp_path, **ties)).outcome == "exact"


def test_towers_that_text_does_not_reach_are_not_held(tmp_path: Path) -> None:
    built = case("qwen3_vl", tmp_path)
    model = TransformersModel(saved(built), ON_CPU)
    towers = sum(p.nbytes for p in built.model.model.visual.parameters())
    every = sum(p.nbytes for p in built.model.parameters())
    assert model.bytes_held == every - towers
    assert 0 < towers < every


def test_layers_that_share_keys_and_values_have_one_cache(tmp_path: Path) -> None:
    model = TransformersModel(saved(case("gemma3n_text", tmp_path)), ON_CPU)
    assert len(model.kv_layouts) == 5  # of 10 layers


def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a token attends to the tokens after it") as refusal:
        open_model(saved(case("paligemma", tmp_path)), ON_CPU)
    assert "\n" not in str(refusal.value)


def masked(create: Any) -> Any:
    config: Any = LlamaConfig()
    config.sliding_window, config.attention_chunk_size = 5, 6
    config._attn_implementation = PAGED
    ones = torch.ones(1, 3, dtype=torch.int64)
    return create(config, torch.zeros(1, 3, 8), ones, past_key_values=None)


@pytest.mark.parametrize(
    ("create", "mask"),
    [
        (create_causal_mask, LayerMask()),
        (create_sliding_window_causal_mask, LayerMask(window=5)),
        (create_chunked_causal_mask, LayerMask(chunk=6)),
    ],
)
def test_the_masks_of_transformers_are_read_back(create: Any, mask: LayerMask) -> None:
    assert layer_mask(masked(create), 99) == mask


def test_without_a_mask_the_layers_own_window_counts() -> None:
    assert layer_mask(None, 7) == LayerMask(window=7)


def test_other_masks_are_refused() -> None:
    config = LlamaConfig()
    config._attn_implementation = PAGED
    both_ways = create_bidirectional_mask(config, torch.zeros(1, 3, 8), torch.ones(1, 3))
    with pytest.raises(ValueError, match="other than causal"):
        layer_mask(both_ways, None)
    with pytest.raises(ValueError, match="of its own"):
        layer_mask(torch.zeros(1, 1, 3, 3), None)

    def striped(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key % 3) == (query % 3)

    with pytest.raises(ValueError, match="other than causal"):
        layer_mask(masked_with(striped), None)


def masked_with(extra: Any) -> Any:
    config = LlamaConfig()
    config._attn_implementation = PAGED
    ones = torch.ones(1, 3, dtype=torch.int64)
    return create_causal_mask(
        config, torch.zeros(1, 3, 8), ones, past_key_values=None, and_mask_function=extra
    )
