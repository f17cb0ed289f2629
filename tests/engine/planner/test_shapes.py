"""Shapes from raw configs: parameter counts, caches, and the traps that real files hold."""

from __future__ import annotations

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model, model_names, table_configs
from llmopt.quant.families.config import has_table_rule, model_shape

GIB = 2**30

# name: (parameters, active parameters, KV bytes per token, the same past every window), bf16
FACTS = {
    "llama-2-7b": (6_738_415_616, None, 524_288, 524_288),
    "llama-2-13b": (13_015_864_320, None, 819_200, 819_200),
    "llama-2-70b": (68_976_648_192, None, 327_680, 327_680),
    "llama-3-8b": (8_030_261_248, None, 131_072, 131_072),
    "llama-3-70b": (70_553_706_496, None, 327_680, 327_680),
    "llama-3.1-8b": (8_030_261_248, None, 131_072, 131_072),
    "llama-3.1-70b": (70_553_706_496, None, 327_680, 327_680),
    "llama-3.1-405b": (405_853_388_800, None, 516_096, 516_096),
    "llama-3.2-1b": (1_235_814_400, None, 32_768, 32_768),
    "llama-3.2-3b": (3_212_749_824, None, 114_688, 114_688),
    "llama-4-scout": (107_769_861_120, 17_172_894_720, 196_608, 49_152),
    "mistral-7b-v0.1": (7_241_732_096, None, 131_072, 0),
    "mistral-7b-v0.3": (7_248_023_552, None, 131_072, 131_072),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248, 131_072, 131_072),
    "mixtral-8x22b": (140_620_634_112, 39_152_031_744, 229_376, 229_376),
    "qwen2.5-0.5b": (494_032_768, None, 12_288, 12_288),
    "qwen2.5-7b": (7_615_616_512, None, 57_344, 57_344),
    "qwen2.5-72b": (72_706_203_648, None, 327_680, 327_680),
    "qwen3-0.6b": (596_049_920, None, 114_688, 114_688),
    "qwen3-8b": (8_190_735_360, None, 147_456, 147_456),
    "qwen3-14b": (14_768_307_200, None, 163_840, 163_840),
    "qwen3-32b": (32_762_123_264, None, 262_144, 262_144),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704, 98_304, 98_304),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520, 192_512, 192_512),
    "deepseek-v2": (235_741_434_880, 21_375_800_320, 69_120, 69_120),
    "deepseek-v3": (671_026_404_352, 37_552_282_624, 70_272, 70_272),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704, 49_152, 24_576),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912, 73_728, 36_864),
    "gemma-2-9b": (9_241_705_984, None, 344_064, 172_032),
    "gemma-2-27b": (27_227_128_320, None, 376_832, 188_416),
    "gemma-3-4b": (4_300_079_472, None, 139_264, 20_480),
    "gemma-3-27b": (27_432_406_640, None, 507_904, 81_920),
    "phi-3-mini-4k": (3_821_079_552, None, 393_216, 0),
    "phi-4": (14_659_507_200, None, 204_800, 204_800),
    "falcon-7b": (6_921_720_704, None, 8_192, 8_192),
    "falcon-40b": (41_303_293_952, None, 122_880, 122_880),
    "gpt2": (124_439_808, None, 36_864, 36_864),
}

# GiB of one sequence at 4k, 32k and 128k, each layer holding min(context, window)
# Newer models of families whose arithmetic the facts hold already.
SAME_FAMILY = {"kimi-k2", "llama-4-maverick", "qwen3-1.7b", "qwen3-coder-480b-a35b"}
WINDOWED_GIB = {
    "llama-4-scout": (0.75, 2.625, 7.125),
    "mistral-7b-v0.1": (0.5, 0.5, 0.5),
    "gpt-oss-20b": (0.097, 0.753, 3.003),
    "gpt-oss-120b": (0.145, 1.129, 4.504),
    "gemma-2-9b": (1.312, 5.906, 21.656),
    "gemma-2-27b": (1.438, 6.469, 23.719),
    "gemma-3-4b": (0.191, 0.738, 2.613),
    "gemma-3-27b": (0.719, 2.906, 10.406),
    "deepseek-v3": (0.268, 2.145, 8.578),
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def test_the_facts_cover_what_the_table_has_a_rule_for() -> None:
    """The others are probed: `probe/test_probe.py` holds them."""
    without = {name for name in model_names() if name not in FACTS}
    configs = table_configs()
    probed = {name for name in without if not has_table_rule(configs[name])}
    assert without - probed == SAME_FAMILY


@pytest.mark.parametrize("name", FACTS)
def test_parameters_and_cache_are_exact(name: str) -> None:
    shape = find_model(name).shape
    parameters, active, per_token, per_extra = FACTS[name]
    assert shape.num_parameters == parameters
    assert shape.num_active_parameters == (active or parameters)
    assert shape.kv_bytes_per_token(2) == per_token
    assert shape.kv_bytes_per_extra_token(2) == per_extra


@pytest.mark.parametrize("name", WINDOWED_GIB)
def test_a_windowed_layer_holds_no_more_than_its_window(name: str) -> None:
    shape = find_model(name).shape
    got = [shape.kv_bytes(tokens * 1024, 2) / GIB for tokens in (4, 32, 128)]
    assert got == pytest.approx(WINDOWED_GIB[name], abs=6e-4)
    whole = shape.without_windows()
    assert whole.kv_bytes(131072, 2) == 131072 * shape.kv_bytes_per_token(2)


def test_blocks_round_every_layer_up() -> None:
    shape = find_model("gpt-oss-20b").shape  # 12 layers hold all, 12 hold 128
    per_layer = shape.cached_elements * 2
    assert shape.kv_bytes(200, 2, block_size=16) == 12 * (208 + 128) * per_layer
    assert shape.kv_bytes(100, 2, block_size=16) == 24 * 112 * per_layer
    assert shape.kv_bytes(100, 1) == shape.kv_bytes(100, 2) // 2


def test_absent_kv_heads_mean_one_for_each_head() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert model_shape(raw).num_kv_heads == 8
    assert model_shape({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 8


def test_absent_tie_is_the_class_default() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert not model_shape(raw).tied
    assert model_shape({**raw, "model_type": "gemma2"}).tied


def test_a_tied_embedding_counts_once() -> None:
    tied = model_shape(LLAMA).num_parameters
    untied = model_shape({**LLAMA, "tie_word_embeddings": False}).num_parameters
    assert untied - tied == 512 * 64


def test_head_dim_is_what_the_config_says() -> None:
    qwen = find_model("qwen3-30b-a3b").shape
    assert qwen.head_dim == 128 != qwen.hidden_size // qwen.num_heads
    assert model_shape(LLAMA).head_dim == 8


def test_sliding_window_without_its_flag_is_none() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 128, "max_window_layers": 3}
    assert set(model_shape(qwen).windows) == {None}
    on = model_shape({**qwen, "use_sliding_window": True})
    assert on.windows == (None, None, None, 128, 128)


def test_mistral_slides_without_a_flag() -> None:
    assert find_model("mistral-7b-v0.1").shape.windows == (4096,) * 32
    assert find_model("mistral-7b-v0.3").shape.windows == (None,) * 32


def test_gemma_3_fills_in_what_its_nested_config_omits() -> None:
    shape = find_model("gemma-3-4b").shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (8, 4, 256)
    assert shape.windows[:6] == (1024,) * 5 + (None,)
    assert shape.tied


def test_layer_types_win_over_the_pattern() -> None:
    kinds = ["full_attention"] * 4 + ["sliding_attention"]
    raw = {**LLAMA, "model_type": "gemma2", "layer_types": kinds, "sliding_window": 64}
    assert model_shape(raw).windows == (None, None, None, None, 64)


def test_old_names_are_read() -> None:
    gpt2 = find_model("gpt2")
    assert "num_hidden_layers" not in gpt2.config
    assert (gpt2.shape.num_layers, gpt2.shape.intermediate_size) == (12, 3072)


def test_falcon_7b_has_one_kv_head_whatever_it_says() -> None:
    raw = {**find_model("falcon-7b").config, "num_kv_heads": 71}
    assert model_shape(raw).num_kv_heads == 1


def test_bundled_checkpoint_is_counted_exactly() -> None:
    from llmopt.quant.model.checkpoint import Checkpoint
    from llmopt.recipes import MODELS

    checkpoint = Checkpoint(MODELS / "stories3M")
    elements = sum(tensor.numel() for _, tensor in checkpoint.tensors())
    assert model_shape(checkpoint.config).num_parameters == elements


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "rwkv"}, "'rwkv' is not known"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"layer_types": 3}, "layer_types is 3"),
        ({"layer_types": ["sliding_attention"] * 5}, "the config has no sliding_window"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"text_config": 4}, "text_config is 4"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts is 0"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "n_embd is 'wide'"),
        ({"num_key_value_heads": 3}, "do not divide into 3 KV heads"),
        ({"layer_types": ["full_attention"]}, "lists 1 layers"),
        ({"layer_types": ["linear_attention"] * 5}, "linear_attention"),
    ],
)
def test_nonsense_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        model_shape({**LLAMA, **change})


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_kv_heads_split_and_then_replicate(ranks: int, kv_heads: int) -> None:
    assert find_model("llama-3.1-70b").shape.cache_on_rank(ranks).num_kv_heads == kv_heads


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BadInput, match="10 KV heads do not divide over 4 ranks"):
        find_model("phi-4").shape.kv_heads_per_rank(4)


def test_a_latent_is_whole_on_every_rank() -> None:
    shape = find_model("deepseek-v3").shape
    assert shape.cache_on_rank(8).kv_bytes(4096, 2) == shape.kv_bytes(4096, 2)
