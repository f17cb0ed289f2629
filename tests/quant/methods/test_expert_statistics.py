"""Experts that few tokens reach: shrunk statistics, plain rounding, and never worse on held-out tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods.base import InputStatistics, LayerProblem
from llmopt.quant.methods.error_feedback import asymmetric_shift, feedback
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.methods.rounding import gram_of, own_gram, squares_of, too_few

from ...support.hand_kept_maps import map_of
from ...support.layer_problems import correlated_inputs, heavy_weight, statistics_of

HIDDEN, INNER, EXPERTS = 64, 96, 8
TOKENS = (1500, 700, 300, 120, 60, 30, 12, 5)


def moe_layer(bits: int = 4) -> LayerProblem:
    """The experts of a Qwen3-MoE layer behind a skewed router, which sends expert `e` `TOKENS[e]` tokens."""
    leaves = ("gate_proj", "up_proj", "down_proj")
    names = [f"mlp.experts.{e}.{leaf}" for e in range(EXPERTS) for leaf in leaves]
    family = map_of({"model_type": "qwen3_moe"}, [f"{name}.weight" for name in names])
    weights, statistics, held_out = {}, {}, {}
    everything, unseen = (correlated_inputs(sum(TOKENS), HIDDEN, seed=seed) for seed in (1, 2))
    for number, count in enumerate(TOKENS):
        first, block = sum(TOKENS[:number]), f"mlp.experts.{number}"
        gate, up = (heavy_weight(INNER, HIDDEN, seed=10 * number + k) for k in range(2))
        weights |= {f"{block}.gate_proj": gate, f"{block}.up_proj": up}
        weights[f"{block}.down_proj"] = heavy_weight(HIDDEN, INNER, seed=10 * number + 2)
        for split, inputs in ((statistics, everything), (held_out, unseen)):
            # An expert is sent a kind of tokens: some channels of its input are louder.
            louder = torch.arange(HIDDEN).remainder(EXPERTS).eq(number)
            routed = inputs[first : first + count] * (1 + louder)
            inner = torch.relu(routed @ gate.T) * (routed @ up.T)
            shared = f"{block}.gate_proj", f"{block}.up_proj"
            split |= dict.fromkeys(shared, statistics_of(routed))
            split[f"{block}.down_proj"] = statistics_of(inner)
    statistics["mlp.gate"] = statistics_of(everything)
    return LayerProblem(
        prefix="model.layers.0",
        family=replace(family, routers=("mlp.gate",)),
        schemes=dict.fromkeys(weights, IntScheme(bits, 32, True)),
        scale_dtypes=dict.fromkeys(weights, torch.float32),
        weights=weights,
        statistics=statistics,
        norms={},
        with_bias=frozenset(),
        held_out=held_out,
        options=MethodOptions(),
    )


@pytest.mark.parametrize("bits", [3, 4])
def test_no_expert_is_worse_than_rounding_on_held_out_tokens(bits: int) -> None:
    reports: Any = METHODS["gptq"].quantize_layer(moe_layer(bits)).reports
    assert len(reports) == 3 * EXPERTS
    assert all(report.held_out_error <= report.rtn_held_out_error for report in reports)
    # Most are better, also those with fewer tokens than inputs.
    rare = [r for r in reports if 12 <= r.num_tokens < HIDDEN]
    assert sum(report.fallback is None for report in rare) >= len(rare) // 2
    totals = [sum(r.held_out_error for r in reports), sum(r.rtn_held_out_error for r in reports)]
    assert totals[0] < 0.8 * totals[1]


def test_statistics_of_few_tokens_are_nearer_to_the_routers() -> None:
    problem = moe_layer()
    router = problem.statistics["mlp.gate"]
    prior = router.gram / router.num_tokens
    distances, up = [], "mlp.experts.0.up_proj"
    for number, tokens in enumerate(TOKENS):
        up, down = (f"mlp.experts.{number}.{leaf}" for leaf in ("up_proj", "down_proj"))
        alone = problem.statistics[up].gram / tokens
        shrunk = gram_of(problem, up) / tokens
        distances.append(float((shrunk - prior).norm() / (alone - prior).norm()))
        for name in (up, down):
            diagonal = gram_of(problem, name).diagonal() / tokens
            assert torch.allclose(diagonal, squares_of(problem, name), rtol=1e-3)
    assert distances == sorted(distances, reverse=True)
    dense = replace(problem, family=replace(problem.family, routers=()))
    assert gram_of(dense, up) is problem.statistics[up].gram


def test_an_expert_below_a_share_of_the_tokens_is_rounded_plainly() -> None:
    problem = moe_layer()
    few = [too_few(problem, f"mlp.experts.{expert}.up_proj") for expert in range(EXPERTS)]
    assert few == [tokens < 0.005 * sum(TOKENS) for tokens in TOKENS]
    assert few[-2:] == [True, True] and not any(few[:-2])
    problem.statistics["mlp.experts.3.down_proj"] = InputStatistics(INNER)
    reports: Any = METHODS["gptq"].quantize_layer(problem).reports
    reasons = {report.module: report.fallback for report in reports}
    assert "5 calibration tokens were routed" in reasons["model.layers.0.mlp.experts.7.up_proj"]
    assert "no calibration token" in reasons["model.layers.0.mlp.experts.3.down_proj"]


@pytest.mark.parametrize("seen", [6, 1500])
def test_the_cross_term_of_few_tokens_brings_their_outputs_nearer(seen: int) -> None:
    """Beside a shrunk Gram matrix the plain shift of few tokens overshoots, and makes them worse."""
    width, name = 512, "mlp.experts.0.gate_proj"
    wanted = correlated_inputs(2000, width, seed=3)
    noise = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
    inputs = wanted + 0.05 * noise * wanted.std(0)
    record, router = InputStatistics(width), InputStatistics(width)
    record.add(inputs[:seen])
    record.add_cross(inputs[:seen], wanted[:seen])
    router.add(inputs)
    problem = replace(moe_layer(), statistics={name: record, "mlp.gate": router})
    weight = heavy_weight(64, width, seed=5)
    factor = feedback(gram_of(problem, name), torch.arange(width), 0.01)
    assert factor is not None and record.cross is not None and own_gram(problem, "mlp.gate") is None

    def lost(shift: torch.Tensor) -> float:
        return float((wanted[:seen] @ weight.T - inputs[:seen] @ (weight + shift).T).square().sum())

    plain, held = (
        asymmetric_shift(weight, record.cross, factor, gram)
        for gram in (None, own_gram(problem, name))
    )
    none = torch.zeros_like(weight)
    if seen < 10:
        assert lost(held) < 0.5 * lost(none) < lost(none) < lost(plain)
    else:
        assert torch.equal(held, plain) and lost(held) < lost(none)
