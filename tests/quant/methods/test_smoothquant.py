from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.kernels.elementwise.reference import fake_quantize_activations
from llmopt.quant.base.scheme import Activations
from llmopt.quant.families.layer_map import Fold, LayerMap
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods.base import (
    InputStatistics,
    LayerProblem,
    LayerResult,
    MethodOptions,
)
from llmopt.quant.methods.options import SchemeOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.methods.rounding import quantize_layer
from llmopt.quant.methods.smoothquant import input_noise
from torch import nn

from ...support.family_models import make_model, token_ids
from ...support.layer_problems import LLAMA, NORMS, correlated_inputs, llama_layer, statistics_of

SCHEME = METHODS["smoothquant"].scheme(SchemeOptions())
INT8 = Activations("int8")


def loud_model() -> Any:
    """A tiny Llama of which both norms make a few channels loud, as trained models do."""
    model = make_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] = 40.0
            layer.input_layernorm.weight[20] = -25.0
            layer.post_attention_layernorm.weight[11] = 30.0
    return model


def each_linear(layer: nn.Module, see: Callable[[str, nn.Linear, torch.Tensor], Any]) -> list[Any]:
    """Hooks that call `see` with name, linear and input; what it returns replaces the input."""
    handles = []
    for name in LLAMA.linears:
        linear = layer.get_submodule(name)

        def hook(module: Any, args: Any, name: str = name) -> Any:
            changed = see(name, module, args[0])
            return None if changed is None else (changed,)

        handles.append(linear.register_forward_pre_hook(hook))
    return handles


def measured(model: Any, index: int, ids: torch.Tensor) -> LayerProblem:
    """The quantization of one layer as the pipeline states it."""
    layer = model.model.layers[index]
    weights = {name: layer.get_submodule(name).weight.detach() for name in LLAMA.linears}
    statistics = {name: InputStatistics(weight.shape[1]) for name, weight in weights.items()}
    handles = each_linear(layer, lambda name, _, x: statistics[name].add(x))
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return LayerProblem(
        prefix=f"model.layers.{index}",
        family=LLAMA,
        schemes=dict.fromkeys(weights, SCHEME),
        scale_dtypes=dict.fromkeys(weights, torch.float32),
        weights={name: weight.clone() for name, weight in weights.items()},
        statistics=statistics,
        norms={name: layer.get_submodule(name).weight.detach().clone() for name in NORMS},
        with_bias=frozenset(),
    )


def with_layer(index: int, change: Callable[[Any], list[Any] | None], ids: torch.Tensor) -> Any:
    """Logits of the loud model after `change` of one layer."""
    model = loud_model()
    with torch.no_grad():
        change(model.model.layers[index])
        return model(ids).logits


def columns_of(problem: LayerProblem, result: LayerResult) -> dict[str, torch.Tensor]:
    """The input scales of every smoothed linear, from what the norms lost."""
    return {
        target: problem.norms[fold.source] / result.norms[fold.source]
        for fold in LLAMA.folds
        if fold.source in result.norms
        for target in fold.targets
    }


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.85])
def test_folds_leave_the_float_logits_unchanged(alpha: float) -> None:
    ids = token_ids()
    problem = replace(measured(loud_model(), 0, ids), options=MethodOptions(alpha=alpha))
    result: Any = METHODS["smoothquant"].quantize_layer(problem)
    assert set(result.norms) == set(NORMS)

    def fold(layer: Any) -> None:
        for name, norm in result.norms.items():
            layer.get_submodule(name).weight.copy_(norm)
        for name, columns in columns_of(problem, result).items():
            layer.get_submodule(name).weight.mul_(columns)

    before, after = with_layer(0, lambda _: None, ids), with_layer(0, fold, ids)
    assert float((after - before).abs().max() / before.abs().max()) < 1e-5


def test_int8_layers_lose_less_when_smoothed() -> None:
    """The layer as an engine runs it, with per-token quantized activations, on held-out tokens."""
    problem = measured(loud_model(), 0, token_ids(8))
    smoothed, plain = METHODS["smoothquant"].quantize_layer(problem), quantize_layer(problem)

    def run(result: LayerResult) -> Callable[[Any], list[Any]]:
        def change(layer: Any) -> list[Any]:
            for name, norm in result.norms.items():
                layer.get_submodule(name).weight.copy_(norm)
            for name, codes in result.weights.items():
                layer.get_submodule(name).weight.copy_(codes.dequantize())
            return each_linear(layer, lambda _, __, x: fake_quantize_activations(x, INT8))

        return change

    ids = token_ids(4, seed=77)
    exact = with_layer(0, lambda _: None, ids)
    lost = [(with_layer(0, run(one), ids) - exact).square().sum() for one in (smoothed, plain)]
    assert float(lost[0]) < 0.5 * float(lost[1])


def test_reports_hold_inputs_and_weights() -> None:
    problem = llama_layer(SCHEME, loud=50.0)
    reports: dict[str, Any] = {
        report.module: report for report in METHODS["smoothquant"].quantize_layer(problem).reports
    }
    weights_alone: dict[str, Any] = {
        report.module: report for report in quantize_layer(problem).reports
    }
    for module, report in reports.items():
        assert report.rtn_error > weights_alone[module].error
        assert report.held_out_error is not None and report.rtn_held_out_error is not None
        smoothed = any(part in module for part in ("q_proj", "k_proj", "v_proj", "gate", "up_"))
        assert report.ratio == (0.5 if smoothed else None)
        if smoothed:
            assert report.error < report.rtn_error
            assert report.held_out_error < report.rtn_held_out_error
        else:
            assert report.error == report.rtn_error


def test_reported_bound_holds_for_measured_inputs() -> None:
    """Quantizing activations costs no more than the report says, and not much less."""
    inputs = correlated_inputs(2000, 64)
    record, columns = statistics_of(inputs), torch.rand(64) + 0.5
    scaled = inputs / columns
    noise = float((fake_quantize_activations(scaled, INT8) - scaled).square().sum(dim=0).mean())
    assert noise < input_noise(record, columns) < 12 * noise
    one_loud_token = torch.cat([inputs, inputs[:1] * 1000])
    bound = input_noise(statistics_of(one_loud_token), torch.ones(64))
    assert bound < 0.1 * 2001 * float(one_loud_token.abs().max() / 127.5) ** 2 / 12


def test_smoothing_that_does_not_help_is_left_out() -> None:
    """A channel loud in inputs and weights alike: with an exponent of 1 the weights get it all."""
    problem = llama_layer(SCHEME, options=MethodOptions(alpha=1.0))
    inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(2)).sign()
    inputs[:, 5] *= 30
    for name in (*LLAMA.shared_inputs[0], *LLAMA.shared_inputs[2]):
        problem.statistics[name] = statistics_of(inputs)
        problem.weights[name][:, 5] *= 30
    result, plain = METHODS["smoothquant"].quantize_layer(problem), quantize_layer(problem)
    assert result.norms == {}
    for name, codes in result.weights.items():
        assert torch.equal(codes.dequantize(), plain.weights[name].dequantize())
    assert all(report.ratio is None for report in result.reports)
    assert all(report.error == report.rtn_error for report in result.reports)


def test_routers_follow_their_norm() -> None:
    experts = tuple(f"mlp.experts.{index}.gate_proj" for index in range(3))
    family = LayerMap(
        (experts,), (Fold("norm", ("mlp.gate", *experts)),), frozenset(), ("mlp.gate",)
    )
    inputs = correlated_inputs(300, 32, loud=60.0)
    problem = LayerProblem(
        prefix="model.layers.0",
        family=family,
        schemes=dict.fromkeys(experts, SCHEME),
        scale_dtypes=dict.fromkeys(experts, torch.float32),
        weights={name: torch.randn(16, 32) for name in experts},
        # The last expert saw no token at all.
        statistics={
            name: statistics_of(inputs[begin : begin + 150])
            for name, begin in zip(experts, (0, 150, 300), strict=True)
        },
        norms={"norm": torch.rand(32) + 0.5},
        with_bias=frozenset(),
        routers={"mlp.gate": torch.randn(3, 32)},
    )
    result: Any = METHODS["smoothquant"].quantize_layer(problem)
    columns = problem.norms["norm"] / result.norms["norm"]
    before = (inputs * problem.norms["norm"]) @ problem.routers["mlp.gate"].T
    after = (inputs * result.norms["norm"]) @ result.routers["mlp.gate"].T
    assert torch.allclose(after, before, rtol=1e-5, atol=1e-4)
    assert float(columns.max() / columns.min()) > 3
    kept = replace(problem, routers={})  # a router that cannot be scaled along forbids the fold
    assert METHODS["smoothquant"].quantize_layer(kept).norms == {}


def test_norms_with_an_offset_stay_exact() -> None:
    """Gemma multiplies by one more than the weight, which is stored in bfloat16 here."""
    problem = llama_layer(SCHEME, loud=50.0)
    folds = tuple(replace(fold, norm_offset=1.0) for fold in LLAMA.folds)
    problem = replace(problem, family=replace(LLAMA, folds=folds))
    result: Any = METHODS["smoothquant"].quantize_layer(problem)
    name = "input_layernorm"
    assert result.norms[name].dtype == torch.bfloat16
    columns = (problem.norms[name].float() + 1) / (result.norms[name].float() + 1)
    restored = result.weights["self_attn.q_proj"].dequantize() / columns
    weight = problem.weights["self_attn.q_proj"]
    assert float((restored - weight).norm() / weight.norm()) < 0.05


def test_dead_channels_are_left_alone() -> None:
    problem = llama_layer(SCHEME, loud=50.0)
    for name in LLAMA.shared_inputs[0]:
        inputs = correlated_inputs(512, 64, loud=50.0)
        inputs[:, 7] = 0
        problem.statistics[name] = statistics_of(inputs)
        problem.weights[name][:, 9] = 0
    result: Any = METHODS["smoothquant"].quantize_layer(problem)
    before, after = problem.norms["input_layernorm"], result.norms["input_layernorm"]
    assert torch.equal(after[[7, 9]], before[[7, 9]])
    assert bool(torch.isfinite(after).all()) and bool((after != 0).all())


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_exponents_outside_of_their_range_are_refused(alpha: float) -> None:
    with pytest.raises(BadInput, match="--alpha"):
        MethodOptions(alpha=alpha)


def test_damaged_weights_are_named() -> None:
    problem = llama_layer(SCHEME)
    problem.weights["mlp.up_proj"][3, 3] = torch.inf
    with pytest.raises(BadInput, match=r"layers\.0\.mlp\.up_proj holds NaN or infinite"):
        METHODS["smoothquant"].quantize_layer(problem)


def test_the_scheme_is_w8a8() -> None:
    assert IntScheme(8, -1, True, INT8) == SCHEME
