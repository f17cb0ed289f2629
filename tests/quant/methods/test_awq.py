from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods import awq
from llmopt.quant.methods.awq import clip_groups, scale_candidates
from llmopt.quant.methods.base import InputStatistics, LayerProblem, LayerResult
from llmopt.quant.methods.folding import fold_into_norm
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.methods.registry import METHODS

from ...support.hand_kept_maps import map_of
from ...support.layer_problems import output_error, relative_error

FAMILY = map_of({"model_type": "llama"})
HIDDEN, FFN = 64, 96
SCHEME = IntScheme(4, 32, False)
QKV = FAMILY.shared_inputs[0]


def layer_problem(
    *, kv_features: int = HIDDEN, scheme: IntScheme = SCHEME, outliers: float = 20.0
) -> LayerProblem:
    """A random layer whose inputs have a few loud channels, which is what AWQ is for."""
    generator = torch.Generator().manual_seed(11)
    _, key, value = QKV
    shapes = dict.fromkeys(FAMILY.linears, (HIDDEN, HIDDEN))
    shapes |= {key: (kv_features, HIDDEN), value: (kv_features, HIDDEN)}
    shapes |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN)}
    shapes |= {"mlp.down_proj": (HIDDEN, FFN)}
    statistics: dict[str, InputStatistics] = {}
    for group in FAMILY.shared_inputs:
        width = shapes[group[0]][1]
        inputs = torch.randn(256, width, generator=generator)
        inputs[:, ::16] *= outliers
        record = InputStatistics(width)
        record.add(inputs)
        statistics |= dict.fromkeys(group, record)
    return LayerProblem(
        prefix="model.layers.0",
        family=FAMILY,
        schemes=dict.fromkeys(FAMILY.linears, scheme),
        scale_dtypes=dict.fromkeys(FAMILY.linears, torch.float16),
        weights={
            name: torch.randn(*shape, generator=generator) * 0.05 for name, shape in shapes.items()
        },
        statistics=statistics,
        norms={
            name: (torch.rand(HIDDEN, generator=generator) + 0.5).to(torch.bfloat16)
            for name in ("input_layernorm", "post_attention_layernorm")
        },
        with_bias=frozenset(),
    )


def same_codes(left: LayerResult, right: LayerResult) -> bool:
    return all(
        torch.equal(part, right.weights[name].parts()[key])
        for name, weight in left.weights.items()
        for key, part in weight.parts().items()
    )


def test_error_from_the_gram_matrix_is_the_error_of_the_outputs() -> None:
    inputs, weight, other = torch.randn(300, 16), torch.randn(8, 16), torch.randn(8, 16)
    record = InputStatistics(16)
    record.add(inputs[:100].view(4, 25, 16))
    record.add(inputs[100:])
    expected = ((inputs @ (weight - other).T) ** 2).sum(dim=0)
    assert torch.allclose(record.row_errors(weight - other).float(), expected, rtol=1e-4)
    assert record.num_tokens == 300
    assert torch.allclose(record.mean_abs, inputs.abs().mean(dim=0), rtol=1e-5)


def test_reported_errors_of_wide_linears_are_sampled_evenly() -> None:
    record = InputStatistics(16)
    record.add(torch.randn(300, 16))
    for out_features, tolerance in ((512, 1e-9), (5000, 0.15)):
        weight = torch.randn(out_features, 16)
        weight[: out_features // 2] *= 3
        other = weight + 0.1 * torch.randn(out_features, 16)
        exact = relative_error(record, weight, other)
        assert record.sampled_errors(weight, other, weight) == [
            pytest.approx(exact, rel=tolerance),
            0,
        ]


@pytest.mark.parametrize("kv_features", [HIDDEN, HIDDEN // 2])
@pytest.mark.parametrize(
    "scheme", [SCHEME, IntScheme(4, -1, True), IntScheme(8, 32, True)], ids=lambda s: s.label
)
def test_no_linear_is_worse_than_rounding(kv_features: int, scheme: IntScheme) -> None:
    problem = layer_problem(kv_features=kv_features, scheme=scheme)
    plain: dict[str, Any] = {
        report.module: report.rtn_error for report in METHODS["rtn"].quantize_layer(problem).reports
    }
    reports: Any = METHODS["awq"].quantize_layer(problem).reports
    assert {report.module: report.rtn_error for report in reports} == plain
    assert all(report.error <= report.rtn_error for report in reports)
    assert sum(report.error for report in reports) < 0.9 * sum(plain.values())


def test_reported_error_is_that_of_the_codes_and_norms_that_are_returned() -> None:
    """Recomputed from the outside: the norm feeds changed inputs into the dequantized codes."""
    problem = layer_problem()
    result: Any = METHODS["awq"].quantize_layer(problem)
    norm = problem.norms["post_attention_layernorm"].float()
    columns = norm / result.norms["post_attention_layernorm"].float()
    effective = result.weights["mlp.gate_proj"].dequantize() / columns
    report = next(r for r in result.reports if r.module.endswith("gate_proj"))
    assert output_error(problem, "mlp.gate_proj", effective) == pytest.approx(
        report.error, rel=1e-4
    )


def test_identity_scales_without_clipping_are_plain_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = replace(layer_problem(), options=MethodOptions(ranges="minmax"))
    monkeypatch.setattr(
        awq, "scale_candidates", lambda mean, *_: iter([(0.0, torch.ones_like(mean))])
    )
    monkeypatch.setattr(awq, "clip_groups", lambda w, *_: (w, torch.zeros(len(w))))
    result: Any = METHODS["awq"].quantize_layer(problem)
    assert same_codes(result, METHODS["rtn"].quantize_layer(problem))
    assert result.norms == {}


def test_losses_that_are_not_numbers_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layer_problem()
    monkeypatch.setattr(
        awq, "scale_candidates", lambda mean, *_: iter([(0.5, torch.full_like(mean, torch.nan))])
    )
    result: Any = METHODS["awq"].quantize_layer(problem)
    assert all(report.ratio is None for report in result.reports)
    assert all(bool(torch.isfinite(w.dequantize()).all()) for w in result.weights.values())


def test_grouped_value_heads_are_not_folded_into_the_output() -> None:
    reports: Any = METHODS["awq"].quantize_layer(layer_problem(kv_features=HIDDEN // 2)).reports
    assert next(r for r in reports if r.module.endswith("o_proj")).ratio is None
    reports: Any = METHODS["awq"].quantize_layer(layer_problem()).reports
    assert next(r for r in reports if r.module.endswith("o_proj")).ratio is not None


def test_query_and_key_are_never_clipped() -> None:
    reports: Any = METHODS["awq"].quantize_layer(layer_problem()).reports
    for report in reports:
        if report.module.endswith(("q_proj", "k_proj")):
            assert report.clipped == 0
    assert any(report.clipped > 0 for report in reports)


def test_scaling_keeps_the_float_layer() -> None:
    """What a row of `up` loses, the column of `down` wins; only the rounding of 8 bits is between."""
    problem = layer_problem(scheme=IntScheme(8, 32, False))
    result: Any = METHODS["awq"].quantize_layer(problem)
    assert result.norms, "no scale was folded: the test shows nothing"
    up_rows = result.weights["mlp.up_proj"].dequantize().norm(dim=1)
    down_columns = result.weights["mlp.down_proj"].dequantize().norm(dim=0)
    before = problem.weights["mlp.up_proj"].norm(dim=1) * problem.weights["mlp.down_proj"].norm(
        dim=0
    )
    columns = problem.norms["post_attention_layernorm"].float() / (
        result.norms["post_attention_layernorm"].float()
    )
    unscaled = (result.weights["mlp.up_proj"].dequantize() / columns).norm(dim=1)
    assert torch.allclose(unscaled * down_columns, before, rtol=0.03)
    assert not torch.allclose(up_rows, problem.weights["mlp.up_proj"].norm(dim=1), rtol=0.03)


def test_scales_compensate_the_rounding_of_the_norm() -> None:
    norm = torch.tensor([1.0, 0.3, 0.0, -0.7]).to(torch.bfloat16)
    stored, scales = fold_into_norm(norm, torch.tensor([1.37, 0.21, 3.0, 2.9]))
    assert stored.dtype == torch.bfloat16
    assert torch.allclose(stored.float() * scales, norm.float(), rtol=1e-6)
    assert float(stored[2]) == 0 and float(scales[2]) == 1
    assert bool(torch.isfinite(scales).all())


def test_dead_inputs_give_finite_scales() -> None:
    candidates = list(scale_candidates(torch.zeros(64), [torch.zeros(8, 64)], 32))
    assert len(candidates) == 20
    for _, scales in candidates:
        assert bool(torch.isfinite(scales).all()) and bool((scales > 0).all())


def test_clipping_never_hurts_a_row() -> None:
    down = "mlp.down_proj"
    scheme = IntScheme(3, 32, False)
    problem = layer_problem(scheme=scheme)
    problem.weights[down][:, 5] *= 6  # one loud weight per row on a quiet channel is worth clipping
    record = problem.statistics[down]
    clipped, shares = clip_groups(
        problem.weights[down], record.gram, torch.ones(FFN), scheme, torch.float16
    )

    def errors(candidate: torch.Tensor) -> torch.Tensor:
        rounded = round_to_nearest(candidate, scheme, torch.float16).dequantize()
        return record.row_errors(problem.weights[down] - rounded)

    assert float(errors(clipped).sum()) < float(errors(problem.weights[down]).sum())
    assert float(shares.mean()) > 0
    alone = replace(problem, weights={down: problem.weights[down]}, norms={})
    result: Any = METHODS["awq"].quantize_layer(alone)
    effective = result.weights[down].dequantize()
    assert bool(
        (
            record.row_errors(problem.weights[down] - effective) <= errors(problem.weights[down])
        ).all()
    )
    assert result.reports[0].error == pytest.approx(output_error(alone, down, effective), rel=1e-5)


def mixture_problem(tokens: tuple[int, ...], outliers: tuple[float, ...]) -> LayerProblem:
    """A layer of experts with the given token counts, and inputs with outlier channels of the given size."""
    generator = torch.Generator().manual_seed(5)
    leaves = [
        f"mlp.experts.{e}.{w}_proj" for e in range(len(tokens)) for w in ("gate", "up", "down")
    ]
    names = ["mlp.gate.weight", *(f"{leaf}.weight" for leaf in leaves)]
    family = map_of({"model_type": "qwen3_moe"}, names)
    shapes = {leaf: (HIDDEN, FFN) if "down" in leaf else (FFN, HIDDEN) for leaf in leaves}
    statistics: dict[str, InputStatistics] = {}
    router = InputStatistics(HIDDEN)
    for group in [group for group in family.shared_inputs if set(group) <= set(leaves)]:
        expert = int(group[0].split(".")[2])
        inputs = torch.randn(tokens[expert], shapes[group[0]][1], generator=generator)
        inputs[:, ::16] *= outliers[expert]
        record = InputStatistics(inputs.shape[1])
        record.add(inputs)
        statistics |= dict.fromkeys(group, record)
        if inputs.shape[1] == HIDDEN:
            router.add(inputs)
    gate = torch.randn(len(tokens), HIDDEN, generator=generator)
    norm = torch.rand(HIDDEN, generator=generator) + 0.5
    return LayerProblem(
        prefix="model.layers.0",
        family=family,
        schemes=dict.fromkeys(leaves, SCHEME),
        scale_dtypes=dict.fromkeys(leaves, torch.float16),
        weights={n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()},
        statistics=statistics | {"mlp.gate": router},
        norms={"post_attention_layernorm": norm},
        with_bias=frozenset(),
        routers={"mlp.gate": gate},
    )


def test_a_router_is_scaled_along_with_the_experts_behind_its_norm() -> None:
    """Router logits must not change, or tokens would be routed to other experts."""
    problem = mixture_problem((100, 100, 100), (20.0, 20.0, 20.0))
    result: Any = METHODS["awq"].quantize_layer(problem)
    norm = "post_attention_layernorm"
    columns = problem.norms[norm] / result.norms[norm]
    assert not torch.equal(columns, torch.ones(HIDDEN))
    gate = problem.routers["mlp.gate"]
    assert torch.allclose(result.routers["mlp.gate"] / columns, gate, rtol=1e-6)
    assert list(result.weights) == list(problem.weights)
    assert all(report.error <= report.rtn_error for report in result.reports)
    assert all(report.ratio is not None for report in result.reports if "down" not in report.module)


def test_one_expert_that_loses_does_not_keep_the_others_from_gaining() -> None:
    """Channels that are loud for all others are silent for the last, which saw few tokens."""
    problem = mixture_problem((200, 200, 200, 20), (20.0, 20.0, 20.0, 0.01))
    result: Any = METHODS["awq"].quantize_layer(problem)
    assert "post_attention_layernorm" in result.norms
    reports = [one for one in result.reports if "down" not in one.module]
    assert any(report.error > report.rtn_error for report in reports)
    energies = [problem.energy(one.module.removeprefix("model.layers.0.")) for one in reports]

    def squared(errors: list[float]) -> float:
        return sum(error * energy for error, energy in zip(errors, energies, strict=True))

    plain = squared([report.rtn_error for report in reports])
    assert squared([report.error for report in reports]) < 0.7 * plain


def test_experts_that_lose_together_keep_their_norm() -> None:
    """Most tokens go to the expert that the scales would harm."""
    result: Any = METHODS["awq"].quantize_layer(mixture_problem((10, 2000), (20.0, 0.01)))
    assert result.norms == {} and result.routers == {}
    assert all(report.error <= report.rtn_error for report in result.reports)


def test_a_judge_of_the_layer_chooses_among_the_best_candidates() -> None:
    """The scales with the least error are taken, and none where RTN has it."""
    seen: list[dict[str, torch.Tensor]] = []

    def later_is_better(weights: Mapping[str, torch.Tensor]) -> float:
        seen.append(dict(weights))
        return 1 / len(seen)

    problem = layer_problem()
    problem = replace(problem, options=MethodOptions(solver="nearest"))
    chosen = METHODS["awq"].quantize_layer(replace(problem, layer_error=later_is_better))
    assert chosen.norms and not same_codes(chosen, METHODS["awq"].quantize_layer(problem))
    linears = {name for weights in seen for name in weights}
    assert linears == set(problem.weights)
    plain = METHODS["awq"].quantize_layer(replace(problem, layer_error=lambda _: 1.0))
    assert not plain.norms and all(report.ratio is None for report in plain.reports)
