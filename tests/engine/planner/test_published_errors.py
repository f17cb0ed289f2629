"""Errors of published articles and calculators, each with the number that they print and ours."""

from __future__ import annotations

import pytest
from llmopt.engine.base.units import format_gib, parse_bytes
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.engine_rules import RULES, CacheKnobs
from llmopt.engine.planner.memory import Deployment, Reserve
from llmopt.engine.planner.plan import make_plan
from llmopt.engine.planner.setup import PlannedWorkload, Setup
from llmopt.engine.planner.speed import Efficiency, decode_time, prefill_time, streamed_weight_bytes
from llmopt.engine.planner.weights import BF16, recipe_for, weight_bytes
from llmopt.quant.families.shapes import ModelShape

GIB = 2**30
EFFICIENCY = Efficiency(0.74, 0.6, 63e-6, 25e-6, "by hand")


def shape(name: str) -> ModelShape:
    return find_model(name).shape


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("llama-3.1-8b", 524_288, 131_072),
        ("llama-3.1-70b", 2_621_440, 327_680),
        ("qwen2.5-7b", 401_408, 57_344),
    ],
)
def test_head_dim_is_not_hidden_over_kv_heads(name: str, wrong: int, right: int) -> None:
    """With head_dim = hidden / KV heads the formula turns into that of multi-head attention."""
    model = shape(name)
    by_kv_heads = model.hidden_size // model.num_kv_heads
    assert 2 * model.num_layers * model.num_kv_heads * by_kv_heads * 2 == wrong
    assert model.kv_bytes_per_token(2) == right


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("qwen3-32b", 128), ("qwen3-0.6b", 128), ("gemma-2-9b", 256), ("gpt-oss-20b", 64)],
)
def test_head_dim_is_not_hidden_over_heads_where_the_config_says_otherwise(
    name: str, head_dim: int
) -> None:
    model = shape(name)
    assert model.head_dim == head_dim != model.hidden_size // model.num_heads


@pytest.mark.parametrize(
    ("name", "published", "right"),
    [
        ("llama-2-7b", 800 * 1024, 524_288),  # 800 KiB is Llama-2-13B
        ("mixtral-8x7b", 640 * 1024, 131_072),  # experts add no KV
        ("llama-3.1-405b", 1_600_000, 516_096),
    ],
)
def test_kv_bytes_per_token_of_articles(name: str, published: int, right: int) -> None:
    assert shape(name).kv_bytes_per_token(2) == right != published


def test_what_800_kib_really_is() -> None:
    assert shape("llama-2-13b").kv_bytes_per_token(2) == 800 * 1024


def test_llama_70b_at_4096_is_not_10_gb() -> None:
    model = shape("llama-3.1-70b")
    assert model.kv_bytes(4096, 2) == 1_342_177_280 == 10_737_418_240 // 8


def test_int4_is_more_than_half_a_byte_a_parameter() -> None:
    model = shape("llama-3.1-8b")
    predicted = weight_bytes(model, recipe_for("int4", model))
    assert predicted == 5_727_854_592 > 1.4 * model.num_parameters / 2


def test_gb_and_gib_are_not_mixed() -> None:
    assert parse_bytes("80GB") != parse_bytes("80GiB")
    assert format_gib(80 * 10**9) == "74.51 GiB"


def test_a_card_of_80_gb_does_not_show_80_gib() -> None:
    labels = {"h100": 80, "a100 80gb sxm": 80, "a100 40gb sxm": 40, "t4": 16, "l4": 24, "b200": 180}
    assert all(find_device(name).memory_bytes < size * GIB for name, size in labels.items())


def test_a_mixture_needs_the_memory_of_all_its_experts() -> None:
    model = shape("mixtral-8x7b")
    assert weight_bytes(model, BF16) == 2 * model.num_parameters > 7 * model.num_active_parameters


def test_a_mixture_reads_more_of_itself_as_the_batch_grows() -> None:
    model = shape("qwen3-30b-a3b")
    held = weight_bytes(model, BF16)
    read = [streamed_weight_bytes(model, held, batch) for batch in (1, 8, 64)]
    assert read == sorted(read)
    assert read[2] > 5 * read[0]
    experts = model.experts
    assert experts is not None
    distinct = [round(experts.expected_distinct(batch), 1) for batch in (1, 8, 16, 64)]
    assert distinct == [8.0, 51.6, 82.4, 125.9]


def test_a_latent_is_not_counted_twice_nor_per_head() -> None:
    assert shape("deepseek-v3").kv_bytes_per_token(2) == 61 * (512 + 64) * 2


def test_activations_grow_with_the_chunk_and_not_with_the_context() -> None:
    deployment = Deployment(shape("llama-3.1-8b"), BF16)
    small, large = (
        deployment.activation_terms(Reserve(chunk_tokens=tokens))[0] for tokens in (2048, 8192)
    )
    assert large == 4 * small
    model, h100 = find_model("llama-3.1-8b"), find_device("h100")
    plans = [
        make_plan(model, BF16, PlannedWorkload(context), [h100], Setup(tp=1))
        for context in (4096, 131072)
    ]
    assert len({plan.devices[0].activation_bytes for plan in plans}) == 1


def test_windows_are_credited_only_to_engines_that_free_them() -> None:
    model = shape("gemma-3-27b")
    kept = {name: rule.kv_bytes(model, 131072, 2, CacheKnobs()) for name, rule in RULES.items()}
    assert kept["llmopt"] == 62 * GIB
    assert max(kept["vllm"], kept["llama.cpp"], kept["transformers"]) < 15 * GIB


def test_capacity_of_a_hybrid_is_solved_and_not_divided() -> None:
    """Bytes over bytes per token would promise a fraction of the tokens that a hybrid holds."""
    model = shape("gpt-oss-20b")
    plan = Deployment(model, BF16, engine=RULES["vllm"])
    memory, reserve = 80 * GIB, Reserve()
    divided = plan.kv_budget(memory, reserve) // model.kv_bytes_per_token(2)
    solved = plan.sequences_that_fit(memory, reserve, 131072) * 131072
    assert solved > 1.6 * divided


def test_four_bit_weights_do_not_quarter_prefill() -> None:
    model, h100, reserve = shape("llama-3.1-8b"), find_device("h100"), Reserve()
    times = [
        prefill_time(Deployment(model, recipe), h100, 4096, reserve, EFFICIENCY).seconds
        for recipe in (BF16, recipe_for("int4", model))
    ]
    assert times[0] == times[1]


def test_tensor_parallelism_does_not_divide_latency_by_itself() -> None:
    model, h100 = shape("llama-3.1-8b"), find_device("h100")
    one, eight = (
        decode_time(Deployment(model, BF16, tp=tp), h100, 1, 4096, EFFICIENCY).seconds
        for tp in (1, 8)
    )
    assert eight > 2 * one / 8


def test_peaks_are_dense() -> None:
    assert (find_device("h100").peaks or {})["bf16"] == 989e12  # 1979 is the sparse one
