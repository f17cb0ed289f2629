"""What steps move and compute, checked by hand on models small enough to count."""

from __future__ import annotations

import pytest
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.speed import (
    attainable_flops,
    decode_step_bytes,
    decode_step_flops,
    prefill_flops,
    ridge,
    streamed_weight_bytes,
)
from llmopt.quant.families.shapes import Experts, ModelShape

TINY = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=16,
    vocab_size=10,
    tied=False,
    max_context=64,
    windows=(None, 4),
)
LINEARS = 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 16 * 8)  # q, k and v, o, three of the MLP
HEAD = 10 * 8


def test_roofline_is_the_lower_of_two_lines() -> None:
    assert attainable_flops(2, peak_flops=100, bandwidth=10) == 20
    assert attainable_flops(50, peak_flops=100, bandwidth=10) == 100
    assert ridge(100, 10) == 10


def test_decode_reads_weights_once_and_every_cache() -> None:
    held = 2 * TINY.num_parameters
    keys = 6 + 4  # all of the context in one layer, the window in the other
    cache = 3 * keys * (2 * 2 * 2) * 2
    assert decode_step_bytes(TINY, 3, 6, held, 2) == held - 2 * HEAD + cache


def test_a_tied_embedding_is_read_as_the_head() -> None:
    tied = find_model("stories3M").shape
    held = 2 * tied.num_parameters
    assert streamed_weight_bytes(tied, held, 1) == held


def test_decode_flops() -> None:
    attention = 2 * 2 * (4 * 2) * (6 + 4)
    assert decode_step_flops(TINY, 3, 6) == 3 * (2 * (LINEARS + HEAD) + attention)


def test_prefill_flops_count_causal_pairs_within_windows() -> None:
    pairs = (1 + 2 + 3 + 4 + 5 + 6) + (1 + 2 + 3 + 4 + 4 + 4)
    assert prefill_flops(TINY, 6) == 2 * LINEARS * 6 + 4 * 4 * 2 * pairs + 2 * HEAD


def test_chunks_of_a_prompt_add_up_to_the_prompt() -> None:
    whole = prefill_flops(TINY, 6)
    chunked = prefill_flops(TINY, 2) + prefill_flops(TINY, 4, num_cached=2)
    assert chunked - 2 * HEAD == whole


def test_decode_is_prefill_of_one_token() -> None:
    assert prefill_flops(TINY, 1, num_cached=5) == decode_step_flops(TINY, 1, 6)


@pytest.mark.parametrize(
    ("count", "per_token", "tokens", "distinct"),
    [
        (8, 2, 1, 2.0),
        (8, 2, 4, 5.47),
        (8, 2, 8, 7.20),
        (8, 2, 16, 7.92),
        (128, 8, 8, 51.6),
        (128, 8, 64, 125.9),
        (256, 8, 32, 163.3),
    ],
)
def test_distinct_experts(count: int, per_token: int, tokens: int, distinct: float) -> None:
    experts = Experts(count, per_token, width=1)
    assert experts.expected_distinct(tokens) == pytest.approx(distinct, rel=2e-3)


def test_a_mixture_reads_more_experts_as_the_batch_grows() -> None:
    shape = find_model("mixtral-8x7b").shape
    held = 2 * shape.num_parameters
    embedding = 2 * 32000 * 4096
    alone = streamed_weight_bytes(shape, held, 1)
    assert alone == pytest.approx(2 * shape.num_active_parameters - embedding)
    assert alone < streamed_weight_bytes(shape, held, 8) < held - embedding
    assert streamed_weight_bytes(shape, held, 10_000) == pytest.approx(held - embedding)


def test_grouped_attention_has_the_intensity_of_its_group() -> None:
    """Llama-70B: 8 queries share a KV head, so 8 FLOP a byte in bf16 and 16 in fp8."""
    shape = find_model("llama-3.1-70b").shape
    flops = decode_step_flops(shape, 1, 1000) - decode_step_flops(shape, 1, 0)
    for element, intensity in ((2, 8), (1, 16)):
        moved = decode_step_bytes(shape, 1, 1000, 0, element) - decode_step_bytes(
            shape, 1, 0, 0, element
        )
        assert flops / moved == pytest.approx(intensity)


def test_latent_attention_is_near_the_ridge() -> None:
    shape = find_model("deepseek-v3").shape
    flops = decode_step_flops(shape, 1, 1000) - decode_step_flops(shape, 1, 0)
    moved = decode_step_bytes(shape, 1, 1000, 0, 2) - decode_step_bytes(shape, 1, 0, 0, 2)
    assert flops / moved == pytest.approx(242, abs=0.5)
