"""Bytes of weights against checkpoints whose size is known to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.plan import make_plan
from llmopt.engine.planner.setup import PlannedWorkload, Setup
from llmopt.engine.planner.stored_recipe import stored_recipe
from llmopt.engine.planner.weights import (
    BF16,
    GROUP_SIZES,
    RECIPES,
    check_groups,
    recipe_for,
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


@pytest.mark.parametrize(
    ("name", "gpu", "gib"),
    [
        ("gpt-oss-120b", "h100", 64.38),  # vllm#33155, v0.14.1, "Using Triton backend"
        ("gpt-oss-20b", "h100", 13.47),  # llm-d's memory document
        ("gpt-oss-120b", "rtx-pro-6000", 65.97),  # vllm#23278: the same Marlin kernel on an H100
        ("gpt-oss-20b", "a100", 13.72),  # myoceane.fr, "vLLM A100 Gemma 4" (2026-04-18), v0.19.0
    ],
)
def test_vllm_pads_the_experts_of_gpt_oss(name: str, gpu: str, gib: float) -> None:
    """Loads as vLLM logs them, "Model loading took ... GiB memory"."""
    model = find_model(name)
    run = Setup(engine="vllm").run_recipe(model.as_stored(), model.shape, find_device(gpu))
    buffers = 0.06  # GiB that the log counts with the weights
    loaded = weight_bytes_per_rank(model.shape, run, 1) / 2**30 + buffers
    assert loaded == pytest.approx(gib, abs=0.025)
    # The checkpoint is what it was.
    assert weight_bytes(model.shape, run) == weight_bytes(model.shape, model.as_stored())


def test_the_padding_is_that_of_a_rank() -> None:
    """TRT-LLM's kernel on two B200: 2,880 / 2 = 1,440 columns of a rank are padded to 1,536."""
    model, device = find_model("gpt-oss-120b"), find_device("b200")
    plain = model.as_stored()
    run = Setup(engine="vllm").run_recipe(plain, model.shape, device)
    experts = 114_661_785_600 * 17 / 32
    added = experts / 2 * (3072 * 1536 / (2880 * 1440) - 1)
    sizes = [weight_bytes_per_rank(model.shape, recipe, 2) for recipe in (plain, run)]
    assert sizes[1] - sizes[0] == pytest.approx(added, abs=2)
    # With whole experts on each rank it is the whole width that is padded.
    by_expert = weight_bytes_per_rank(model.shape, run, 2, None, 2, 2)
    assert by_expert - sizes[0] == pytest.approx(experts / 2 * (3072**2 / 2880**2 - 1), abs=2)


def test_the_kv_budget_of_gpt_oss_is_what_vllm_has_left() -> None:
    """llm-d's memory document, an H100 at 0.95: 79.18 GiB x 0.95 - 64.38 - 7.38 - 0.13 = 3.33 GiB."""
    model = find_model("gpt-oss-120b")
    workload = PlannedWorkload(8192)
    setup = Setup(tp=1, engine="vllm", utilization=0.95)
    plan = make_plan(model, model.as_stored(), workload, [find_device("h100")], setup=setup)
    assert plan.devices[0].kv_budget_bytes / 2**30 == pytest.approx(3.33, abs=0.07)


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


BNB_4BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def quark(dtype: str, scheme: str, group: int | None = None, **fields: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "group_size": group, **fields}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


def tensors_of(weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **fields}


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
        # Unsloth's and transformers' 4-bit files, LLM.int8(), Intel's, AMD's, HQQ's, Meta's and PyTorch's.
        (BNB_4BIT, "nf4 b64", 4.5),
        ({**BNB_4BIT, "bnb_4bit_use_double_quant": True}, "nf4 b64 double", 4 + (8 + 1 / 8) / 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "llm.int8 t6", 8 + 32 / 4096),
        (
            {"quant_method": "auto-round", "bits": 2, "group_size": 64, "sym": True},
            "int2 g64 asymmetric",
            2 + 18 / 64,
        ),
        (quark("fp4", "per_group", 32), "mxfp4 g32", 4.25),
        (quark("fp8_e4m3", "per_tensor"), "fp8 per channel", None),
        (quark("uint4", "per_group", 128, symmetric=False), "int4 g128 asymmetric", 4 + 20 / 128),
        (
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}},
            },
            "int4 g64 asymmetric",
            4.5,
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8 per channel", None),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}
                },
            },
            "int4 g32 asymmetric",
            5.0,
        ),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "nvfp4 g16", 4.5),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "mxfp8 g32", 8.25),
        (tensors_of({"num_bits": 8, "type": "float", "group_size": 32}), "mxfp8 g32", 8.25),
        (
            tensors_of({"num_bits": 8, "type": "float", "block_structure": [128, 128]}),
            "fp8 g128",
            8 + 16 / 128**2,
        ),
        (
            tensors_of({"num_bits": 8, "type": "float", "block_structure": "128x128"}),
            "fp8 g128",
            8 + 16 / 128**2,
        ),
        ({"quant_method": "gptq", "bits": 4, "data_type": None}, "int4 g128 asymmetric", None),
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
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}
    by_layer = {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 8}}}
    unsloths = {**BNB_4BIT, "llm_int8_skip_modules": ["lm_head", "model.layers.1.self_attn"]}
    several = {**quark("fp4", "per_group", 32), "layer_quant_config": {"*q_proj": {}}}
    refused = (
        (mixed, "quant_algo MIXED_PRECISION is not known"),
        (by_layer, "gives some modules other bits"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp'"),
        (unsloths, "leaves modules of some layers plain"),
        (several, "'quark' is not known"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "'torchao' is not known"),
        (
            {"quant_method": "torchao", "quant_type": {"default": "int4wo"}},
            "quantization_config of torchao is not read here",
        ),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"group_size": 64}}},
            "quantization_config of hqq is not read here",
        ),
    )
    for stored, reason in refused:
        with pytest.raises(BadInput, match=f"{reason}.*give --weights"):
            stored_recipe({"quantization_config": stored})


def test_ranks_split_linears_and_repeat_the_rest() -> None:
    model = shape("llama-3.1-70b")
    assert weight_bytes_per_rank(model, BF16, 1) == weight_bytes(model, BF16)
    norms = 2 * 161 * 8192
    assert weight_bytes_per_rank(model, BF16, 8) == (weight_bytes(model, BF16) - norms) / 8 + norms
    keys = 2 * 80 * 2 * 1024 * 8192  # past 8 ranks the KV projections are replicated
    assert weight_bytes_per_rank(model, BF16, 16) == (
        (weight_bytes(model, BF16) - norms - keys) / 16 + norms + keys / 8
    )


def test_vllm_does_not_split_a_group_of_input_channels() -> None:
    """29,568 inputs of Qwen2.5-72B are 231 groups of 128: its publisher widened the layers of its AWQ and
    GPTQ checkpoints to 29,696, which 8 ranks divide."""
    shape, recipe = find_model("qwen2.5-72b").shape, RECIPES["int4"]
    with pytest.raises(
        BadInput, match=r"groups of 128 .* down_proj has 29,568, a rank of --tp 2 14,784"
    ):
        check_groups(shape, recipe, 2, "vllm")
    for ranks, changed, weights in (
        (1, shape, recipe),
        (8, replace(shape, intermediate_size=29_696), recipe),
        (2, shape, replace(recipe, group_size=32)),
        (2, shape, replace(recipe, group_size=-1)),
        (2, shape, RECIPES["fp8"]),
    ):
        check_groups(changed, weights, ranks, "vllm")


def test_an_attention_that_is_left_out_is_not_counted_as_quantized() -> None:
    """Lists as in ai-dynamo/aiconfigurator@095f58a, model_configs of nvidia/MiniMax-M2.5-NVFP4 (of which the
    table has the shape), Qwen3-235B-A22B-NVFP4 and Gemma-4-31B-IT-NVFP4."""
    attention = [f"model.layers.{n}.self_attn*" for n in range(62)]
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", *attention]}
    mixture = replace(find_model("minimax-m2.5"), config={"quantization_config": nvfp4})
    assert mixture.as_stored().roles == ("expert",)
    linears = sum(t.num_elements * t.count for t in mixture.shape.tensors() if t.role == "linear")
    whole = weight_bytes(mixture.shape, RECIPES["nvfp4"])
    added = weight_bytes(mixture.shape, mixture.as_stored()) - whole
    assert added > 1.4 * linears
    left_out: dict[str, dict[str, Any]] = {
        # Qwen's own GPTQ of Qwen3.5, llm-compressor's usual list for it, and AutoAWQ's names in part.
        "gptq": {"dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*visual.*": {}}},
        "awq": {"modules_to_not_convert": ["self_attn", "mlp.gate"]},
        "fp8": {
            "modules_to_not_convert": [
                "model.layers.10.linear_attn.in_proj_qkv",
                "model.layers.11.self_attn.o_proj",
            ]
        },
    }
    small = ["model.layers.10.linear_attn.in_proj_a", "model.layers.11.linear_attn.in_proj_a"]
    small += ["audio_tower.layers.10.self_attn.q_proj", "audio_tower.layers.11.self_attn.q_proj"]
    small += ["re:.*self_attn.kv_b_proj", "model.layers.10.self_attn.q_proj"]
    for method, fields in left_out.items():
        stored = {"quant_method": method, "bits": 4, "group_size": 128}
        assert stored_recipe({"quantization_config": stored | fields}).roles == ("expert",)
        others = stored | {"modules_to_not_convert": small, "dynamic": {"-:.*mtp.*attn.*": {}}}
        assert stored_recipe({"quantization_config": others}).roles == ("linear", "expert")
    for stored in (tensors_of({"num_bits": 4, "type": "float", "group_size": 16}), BNB_4BIT):
        lists = {"ignore": attention, "llm_int8_skip_modules": ["self_attn"]}
        assert stored_recipe({"quantization_config": stored | lists}).roles == ("expert",)
    mixed = {"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\.down_proj": {"bits": 8}}}
    with pytest.raises(BadInput, match="other bits: give --weights"):
        stored_recipe({"quantization_config": mixed})
    routers = {**nvfp4, "ignore": ["model.layers.10.mlp.gate", "vision.layers.10.self_attn"]}
    assert stored_recipe({"quantization_config": routers}).roles == ("linear", "expert")
    dense = replace(find_model("gemma-4-31b"), config={"quantization_config": nvfp4})
    with pytest.raises(BadInput, match="the attention is not quantized: give --weights"):
        dense.as_stored()
    assert replace(dense, stored_bytes=1 << 30).as_stored().stored_bytes == 1 << 30
