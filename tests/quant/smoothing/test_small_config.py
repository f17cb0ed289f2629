from __future__ import annotations

import pytest
from llmopt.quant.smoothing.small_model import small_config, text_layers

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "max_position_embeddings": 8192,
    "layer_types": ["sliding_attention", "full_attention"] * 16,
    "quantization_config": {},
}


def test_widths_shrink_by_one_factor_and_counts_of_heads_stay() -> None:
    small = small_config(LLAMA, 4)
    assert (small["hidden_size"], small["head_dim"], small["intermediate_size"]) == (256, 8, 896)
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (32, 8)
    assert (small["num_hidden_layers"], len(small["layer_types"])) == (4, 4)
    assert small["bos_token_id"] < small["vocab_size"] <= 512
    assert small["max_position_embeddings"] == 8192
    assert "quantization_config" not in small
    assert text_layers(small_config(LLAMA, None)) == 32


def test_experts_are_fewer_but_fill_every_group() -> None:
    experts = {"n_routed_experts": 256, "n_group": 8, "num_experts_per_tok": 8}
    small = small_config(LLAMA | experts, None)
    assert small["n_routed_experts"] == 16 and small["n_group"] == 8
    assert small["num_experts_per_tok"] == 4


def test_a_vision_model_keeps_what_is_around_its_text() -> None:
    vision = {"hidden_size": 1280, "num_heads": 16, "depth": 32, "patch_size": 14}
    small = small_config({"text_config": LLAMA, "vision_config": vision}, 4)
    assert small["text_config"]["num_hidden_layers"] == 4
    assert small["vision_config"] == {**vision, "hidden_size": 80}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"mrope_section": [16, 24, 24]}, {"mrope_section": [2, 1, 1]}),
        ({"short_factor": [1.0] * 64}, {"short_factor": [1.0] * 4}),
        ({"full_attention": {"factor": 8.0}}, {"full_attention": {"factor": 8.0}}),
    ],
)
def test_rope_fits_the_narrower_heads(rope: dict[str, object], expected: object) -> None:
    assert small_config(LLAMA | {"rope_parameters": rope}, None)["rope_parameters"] == expected
