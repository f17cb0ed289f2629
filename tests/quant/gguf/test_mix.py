"""The mixes are llama.cpp's: which weights of which layers get another type than most."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llmopt.base.errors import BadInput
from llmopt.quant.gguf.assemble import mix_tables
from llmopt.quant.gguf.mix import (
    GGUF_TYPES,
    MixShape,
    embedding_type,
    mix,
    mix_name,
    mix_notes,
    mix_of,
    output_type,
    shape_of,
)
from llmopt.quant.kinds.ggml.scheme import GgufScheme

LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
SHAPE = MixShape(layers=32, heads=32, kv_heads=32)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {}])
def test_a_tied_embedding_has_the_type_of_the_head(config: dict[str, bool]) -> None:
    """Also where the config is Gemma 2's of transformers 4, which leaves the default of its class out."""
    columns = {"model.embed_tokens": 256}
    assert mix_tables(config, columns, "Q4_K_M") == {"model.embed_tokens": "Q6_K"}
    untied = mix_tables({}, columns | {"lm_head": 256}, "Q4_K_M")
    assert untied == {"model.embed_tokens": "Q4_K", "lm_head": "Q6_K"}


def types(type_name: str, shape: MixShape = SHAPE) -> dict[str, list[str]]:
    """Of each linear of a layer, its type in every layer."""
    modules = {
        f"model.layers.{layer}.{linear}": (256, 256)
        for layer in range(shape.layers)
        for linear in LINEARS
    }
    schemes = mix(type_name, modules, shape)
    return {
        linear.split(".")[1][0]: [
            schemes[f"model.layers.{layer}.{linear}"].type for layer in range(shape.layers)
        ]
        for linear in LINEARS
    }


def test_medium_mixes_give_every_third_layer_more_bits():
    found = types("Q4_K_M")
    better = [layer for layer, block in enumerate(found["d"]) if block == "Q6_K"]
    # As in llama.cpp's files of 32 layers.
    assert better == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert found["v"] == found["d"] and set(found["q"]) == {"Q4_K"}
    assert set(types("Q5_K_M")["v"]) == {"Q5_K", "Q6_K"}
    assert {block for row in types("Q5_K_S").values() for block in row} == {"Q5_K"}
    assert mix_notes("Q4_K_M", {"model.layers.0.mlp.down_proj": (1, 256)}, SHAPE) == []


def test_the_small_mix_has_its_layers_of_more_bits():
    found = types("Q4_K_S")
    assert found["v"] == ["Q5_K"] * 4 + ["Q4_K"] * 28
    assert found["d"] == ["Q5_K"] * 4 + ["Q4_K"] * 28
    assert types("Q4_K_S", replace(SHAPE, layers=16))["d"] == ["Q5_K"] * 2 + ["Q4_K"] * 14


def test_a_name_without_a_size_is_the_medium_mix():
    assert mix_name("Q4_K") == "Q4_K_M" and mix_name("Q5_K") == "Q5_K_M"
    assert types("Q4_K") == types("Q4_K_M")
    assert GGUF_TYPES["Q4_K_S"] == ("Q4_K", 14) and "Q4_K" not in GGUF_TYPES
    assert mix_of("Q4_K") == "Q4_K_M" and mix_of("Q6_K") == "Q6_K"


def test_values_that_eight_heads_share_get_more_bits():
    large = MixShape(layers=80, heads=64, kv_heads=8)
    assert large.is_70b and not replace(large, kv_heads=64).is_70b
    assert set(types("Q4_K_S", large)["v"]) == {"Q5_K"}
    assert set(types("Q4_K_M", large)["v"]) == {"Q5_K", "Q6_K"}
    qwen = replace(large, architecture="qwen2")
    assert set(types("Q4_K_M", qwen)["v"]) == {"Q5_K", "Q6_K"}
    assert not replace(large, architecture="qwen3").is_70b
    assert set(types("Q4_K_M", large)["q"]) == {"Q4_K"}


def test_eight_experts_have_values_and_keys_in_eight_bits():
    sparse = replace(SHAPE, experts=8)
    found = types("Q4_K_M", sparse)
    assert set(found["v"]) == set(found["k"]) == {"Q8_0"}
    assert set(found["o"]) == {"Q5_K"}
    assert set(types("Q4_K_M", replace(SHAPE, experts=64))["k"]) == {"Q4_K"}


def test_importance_guards_the_first_down_projections():
    assert set(types("Q4_0")["d"]) == {"Q4_0"}
    guarded = types("Q4_0", replace(SHAPE, has_importance=True))
    assert guarded["d"] == ["Q4_1"] * 4 + ["Q4_0"] * 28


def test_heads_and_embeddings():
    assert output_type("Q4_0", 256) == "Q6_K" and output_type("Q8_0", 256) == "Q8_0"
    assert output_type("Q4_K_M", 288) == "Q8_0" and output_type("Q4_K_M", 40) is None
    assert embedding_type("Q4_K_M", 256) == "Q4_K"


def test_widths_that_a_type_does_not_fit():
    modules = {"model.layers.0.mlp.down_proj": (64, 96), "model.layers.0.mlp.up_proj": (64, 40)}
    shape = MixShape(layers=1)
    assert mix("Q5_K_S", modules, shape) == {"model.layers.0.mlp.down_proj": GgufScheme("Q5_1")}
    assert mix("Q4_K_M", modules, shape)["model.layers.0.mlp.down_proj"] == GgufScheme("Q8_0")
    first, second = mix_notes("Q5_K_S", modules, shape)
    assert "96 inputs" in first and "Q5_1" in first
    assert "40 inputs" in second and "stay unquantized" in second
    with pytest.raises(BadInput, match="no GGUF type 'Q9_K'"):
        mix("Q9_K", modules, shape)


def test_the_shape_of_a_config():
    config = {
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
    }
    shape = shape_of(config, "llama", has_importance=True)
    assert shape == MixShape(80, 64, 8, 8, "llama", True)
    assert shape.shares_values and shape.is_70b
