"""Bytes of weights against checkpoints whose size is known to the byte."""

from __future__ import annotations

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.weights import (
    BF16,
    GROUP_SIZES,
    RECIPES,
    recipe_for,
    stored_recipe,
    weight_bytes,
    weight_bytes_per_rank,
)
from llmopt.quant.families.shapes import ModelShape


def shape(name: str) -> ModelShape:
    return find_model(name).shape


def test_bf16_is_two_bytes_a_parameter() -> None:
    assert weight_bytes(shape("llama-3.1-8b"), BF16) == 2 * 8_030_261_248


def test_awq_4_bit_keeps_head_and_norms() -> None:
    """6,979,321,856 quantized weights at 4.15625 bits, 1,050,939,392 others in 16."""
    model = shape("llama-3.1-8b")
    assert weight_bytes(model, recipe_for("int4", model)) == 5_727_854_592


def test_fp8_with_channel_scales() -> None:
    """Llama-3.3-70B FP8-dynamic: fp8 linears, 16-bit rest and one 16-bit scale per output channel."""
    expected = 68_451_041_280 + 2 * 2_109_382_656
    assert weight_bytes(shape("llama-3.1-70b"), RECIPES["fp8"]) == expected


def test_gpt_oss_is_what_its_checkpoint_holds() -> None:
    model = find_model("gpt-oss-120b")
    recipe = stored_recipe(model.config)
    assert recipe.label == "mxfp4 g32"
    assert weight_bytes(model.shape, recipe) == 65_248_815_744


def test_fp8_in_square_blocks() -> None:
    recipe = stored_recipe(find_model("deepseek-v3").config)
    assert (recipe.group_size, recipe.rows_per_scale, recipe.scale_bits) == (128, 128, 32)
    model = shape("deepseek-v3")
    linears = sum(
        t.num_elements * t.count for t in model.tensors() if t.role in ("linear", "expert")
    )
    others = model.num_parameters - linears
    assert weight_bytes(model, recipe) == pytest.approx(
        linears * 8.001953125 / 8 + 2 * others, rel=1e-6
    )


def test_group_sizes_are_those_of_quantize() -> None:
    from llmopt.quant.plan.selection import DEFAULT_GROUP_SIZES

    assert GROUP_SIZES == DEFAULT_GROUP_SIZES


def test_group_size_falls_to_the_largest_that_divides() -> None:
    assert recipe_for("int4", shape("llama-3.1-8b")).group_size == 128
    assert recipe_for("int4", shape("gpt-oss-20b")).group_size == 64  # of 2880 and 4096
    with pytest.raises(BadInput, match="does not divide"):
        recipe_for("int4", shape("gpt-oss-20b"), 128)
    with pytest.raises(BadInput, match="none of the group sizes"):
        recipe_for("int4", shape("stories260K"))  # a width of 172
    with pytest.raises(BadInput, match="no meaning for fp8"):
        recipe_for("fp8", shape("llama-3.1-8b"), 128)
    with pytest.raises(BadInput, match="choose bf16"):
        recipe_for("int3", shape("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("stored", "label", "bits_a_weight"),
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
            "int4 g64 asymmetric",
            4.3125,
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True},
            "int8 per channel asymmetric",
            None,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}
                },
            },
            "int4 g128",
            4.125,
        ),
        (
            {"quant_method": "QUiP", "codebook": "E8P12RVQ3B"},
            "e8p3 per channel",
            3 + 16 / 1024 + 16 / 4096,
        ),
        (
            {"quant_method": "exl3", "bits": 2.625},
            "trellis2.625 per channel",
            2.625 + 16 / 1024 + 16 / 4096,
        ),
    ],
)
def test_a_checkpoint_says_how_it_is_stored(
    stored: dict[str, object], label: str, bits_a_weight: float | None
) -> None:
    recipe = stored_recipe({"quantization_config": stored})
    assert recipe.label == label
    if bits_a_weight is not None:
        (tensor,) = [t for t in shape("llama-3.1-8b").tensors() if t.out_features == 1024]
        packed = recipe.tensor_bytes(tensor) - recipe.bytes_per_tensor
        assert packed * 8 / tensor.num_elements == bits_a_weight


def test_exl3_has_a_head_of_its_own_width() -> None:
    """exllamav3 writes `head_bits` beside the mean width of the layers; 16 is a plain head."""
    (head,) = [t for t in shape("llama-3.1-8b").tensors() if t.role == "head"]
    stored = {"quant_method": "exl3", "bits": 4.0, "head_bits": 6}
    recipe = stored_recipe({"quantization_config": stored})
    assert recipe.tensor_bytes(head) == head.num_elements * 6 // 8 + 2 * (128256 + 4096)
    plain = stored_recipe({"quantization_config": {**stored, "head_bits": 16}})
    assert plain.tensor_bytes(head) == 2 * head.num_elements


def test_unknown_quantization_is_refused() -> None:
    assert stored_recipe({}) == BF16
    with pytest.raises(BadInput, match="'hqq' is not known"):
        stored_recipe({"quantization_config": {"quant_method": "hqq"}})


def test_ranks_split_linears_and_repeat_the_rest() -> None:
    model = shape("llama-3.1-70b")
    assert weight_bytes_per_rank(model, BF16, 1) == weight_bytes(model, BF16)
    norms = 2 * 161 * 8192
    assert weight_bytes_per_rank(model, BF16, 8) == (weight_bytes(model, BF16) - norms) / 8 + norms
    keys = 2 * 80 * 2 * 1024 * 8192  # past 8 ranks the KV projections are replicated
    assert weight_bytes_per_rank(model, BF16, 16) == (
        (weight_bytes(model, BF16) - norms - keys) / 16 + norms + keys / 8
    )
