from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.families.layer_map import LayerMap
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.kind import IntTensor, range_grid, round_to_nearest, search_ranges
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods import gptq
from llmopt.quant.methods.base import (
    InputStatistics,
    LayerProblem,
    LayerResult,
    MethodOptions,
)
from llmopt.quant.methods.error_feedback import asymmetric_shift, feedback
from llmopt.quant.methods.options import SchemeOptions
from llmopt.quant.methods.registry import METHODS

from ...support.hand_kept_maps import map_of
from ...support.layer_problems import output_error, relative_error

LLAMA = map_of({"model_type": "llama"})
DTYPE = torch.float16


def correlated(in_features: int, seed: int, tokens: int = 400) -> InputStatistics:
    """Statistics of inputs that share a few factors, some channels louder than others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(6, in_features, generator=generator)
    inputs = torch.randn(tokens, 6, generator=generator) @ mixing
    inputs += 0.5 * torch.randn(tokens, in_features, generator=generator)
    record = InputStatistics(in_features)
    record.add(inputs * torch.rand(in_features, generator=generator).mul(3).exp())
    return record


def problem_of(
    weights: dict[str, torch.Tensor],
    statistics: InputStatistics | dict[str, InputStatistics],
    scheme: Scheme,
    *,
    family: LayerMap | None = None,
    options: MethodOptions | None = None,
) -> LayerProblem:
    if isinstance(statistics, InputStatistics):
        statistics = dict.fromkeys(weights, statistics)
    return LayerProblem(
        prefix="model.layers.0",
        family=family or LayerMap((tuple(weights),), (), frozenset()),
        schemes=dict.fromkeys(weights, scheme),
        scale_dtypes=dict.fromkeys(weights, DTYPE),
        weights=weights,
        statistics=statistics,
        norms={},
        with_bias=frozenset(),
        options=options or MethodOptions(),
    )


def one(
    weight: torch.Tensor, record: InputStatistics, scheme: Scheme, **options: object
) -> tuple[IntTensor, LayerResult]:
    """A single linear quantized, as in the paper where nothing else is asked for."""
    asked: dict[str, Any] = {"ranges": "minmax", "act_order": "static"} | options
    settings = MethodOptions(**asked)
    result: Any = METHODS["gptq"].quantize_layer(
        problem_of({"proj": weight}, record, scheme, options=settings)
    )
    codes = result.weights["proj"]
    assert isinstance(codes, IntTensor)
    return codes, result


def same(left: IntTensor, right: IntTensor) -> bool:
    return all(torch.equal(part, right.parts()[name]) for name, part in left.parts().items())


def group_ranges(
    grouped: torch.Tensor, scheme: IntScheme, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return range_grid(*grouped.aminmax(dim=-1), scheme, dtype)


def textbook(
    weight: torch.Tensor, gram: torch.Tensor, scheme: IntScheme, act_order: str, *, mse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the weight they stand for, by the loop of the paper: one column at a time, in float64."""
    ranges = search_ranges if mse else group_ranges
    count, size = weight.shape[1], weight.shape[1] // scheme.num_groups(weight.shape[1])
    hessian = gram.double()
    order = torch.arange(count)
    if act_order != "none":
        order = hessian.diagonal().argsort(descending=True, stable=True)
    hessian = hessian[order][:, order]
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(count)
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    grids = [ranges(part, scheme, DTYPE) for part in weight.split(size, dim=1)]
    work = weight.double()[:, order]
    codes, effective = torch.zeros(weight.shape), torch.zeros(weight.shape)
    for column in range(count):
        group = column // size
        if act_order == "static":
            group = int(order[column]) // size
        elif column % size == 0:
            grids[group] = ranges(work[:, column : column + size].float(), scheme, DTYPE)
        scale, zero = (part.double() for part in grids[group])
        code = (torch.round(work[:, column] / scale) + zero).clamp(0, scheme.max_code)
        value = (code - zero) * scale
        error = (work[:, column] - value) / inverse[column, column]
        work[:, column:] -= error[:, None] * inverse[column, column:]
        codes[:, order[column]], effective[:, order[column]] = code.float(), value.float()
    return codes, effective


@pytest.mark.parametrize("act_order", ["static", "dynamic", "none"])
@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (IntScheme(4, 16, True), (24, 48)),
        (IntScheme(4, 8, False), (16, 360)),
        (IntScheme(2, 96, False), (12, 288)),
        (IntScheme(3, 300, True), (8, 600)),
        (IntScheme(8, 40, False), (8, 280)),
        (IntScheme(5, -1, False), (8, 270)),
        (IntScheme(6, 1, False), (4, 20)),
    ],
    ids=lambda value: value.label if isinstance(value, IntScheme) else "",
)
def test_codes_are_those_of_the_textbook(
    scheme: IntScheme, shape: tuple[int, int], act_order: str
) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(5)) * 0.1
    record = correlated(shape[1], 7, tokens=2 * shape[1])
    if act_order == "dynamic":
        scheme = replace(scheme, permuted=True)
    expected, effective = textbook(weight, record.gram, scheme, act_order, mse=False)
    codes, result = one(weight, record, scheme, act_order=act_order)
    assert torch.equal(codes.codes.float(), expected)
    # A scale that float32 puts on the other side of a tie moves by the last place of its 16 bits.
    assert torch.allclose(codes.dequantize(), effective, rtol=1e-3, atol=1e-6)
    error = relative_error(record, weight, effective)
    assert result.reports[0].error == pytest.approx(error, rel=1e-2)
    assert (codes.group_index is not None) == (act_order == "dynamic")


def test_codes_are_those_of_the_textbook_with_searched_ranges() -> None:
    weight = torch.randn(12, 96, generator=torch.Generator().manual_seed(5)) * 0.1
    record, scheme = correlated(96, 7), IntScheme(3, 32, False)
    for act_order in ("static", "none"):
        expected, _ = textbook(weight, record.gram, scheme, act_order, mse=True)
        codes, _ = one(weight, record, scheme, act_order=act_order, ranges="mse")
        assert torch.equal(codes.codes.float(), expected)


def test_dynamic_order_spreads_the_groups_over_the_channels() -> None:
    weight, record = torch.randn(16, 64), correlated(64, 2)
    codes, _ = one(weight, record, IntScheme(4, 16, True, permuted=True), act_order="dynamic")
    index = codes.group_index
    assert index is not None and index.dtype == torch.int32
    assert index.bincount().tolist() == [16] * 4
    assert not torch.equal(index, index.sort().values)
    loudest = record.gram.diagonal().argsort(descending=True)[:16]
    assert index[loudest].tolist() == [0] * 16
    by_hand = torch.stack(
        [
            (codes.codes[:, channel].float() - codes.zeros[:, group].float())
            * codes.scales[:, group].float()
            for channel, group in enumerate(index.tolist())
        ],
        dim=1,
    )
    assert torch.equal(codes.dequantize(), by_hand)


@pytest.mark.parametrize("act_order", ["static", "dynamic", "none"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_uncorrelated_inputs_give_plain_rounding(
    bits: int, symmetric: bool, act_order: str
) -> None:
    weight = torch.randn(40, 320, generator=torch.Generator().manual_seed(bits))
    record = InputStatistics(320)
    record.gram, record.num_tokens = torch.eye(320), 1
    scheme = IntScheme(bits, 64, symmetric, permuted=act_order == "dynamic")
    codes, _ = one(weight, record, scheme, act_order=act_order)
    assert same(codes, round_to_nearest(weight, scheme, DTYPE))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_shape_any_dead_channels_any_zero_groups(data: st.DataObject) -> None:
    size, groups = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    count, rows = size * groups, data.draw(st.integers(1, 9))
    order = data.draw(st.sampled_from(["group-aware", "static", "dynamic", "none"]))
    scheme = IntScheme(
        data.draw(st.sampled_from([2, 3, 4, 5, 6, 8])),
        data.draw(st.sampled_from([size, -1])),
        data.draw(st.booleans()),
    )
    permuted = order == "dynamic" and scheme.group_size != -1
    scheme = replace(scheme, permuted=permuted)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weight = torch.randn(rows, count, generator=generator)
    weight[:, : size * data.draw(st.integers(0, groups))] = 0
    inputs = torch.randn(data.draw(st.integers(1, 2 * count)), count, generator=generator)
    dead = torch.rand(count, generator=generator) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    inputs[:, dead] = 0
    record = InputStatistics(count)
    record.add(inputs)
    codes, result = one(
        weight,
        record,
        scheme,
        act_order=order,
        ranges=data.draw(st.sampled_from(["minmax", "mse", "weighted"])),
    )
    report: Any = result.reports[0]
    assert bool(torch.isfinite(codes.dequantize()).all())
    assert int(codes.codes.max()) <= scheme.max_code
    assert bool((codes.scales > 0).all())
    assert (report.fallback is None) == bool((~dead).any())
    if not weight.any():
        assert not codes.dequantize().any()
    if bool((~dead).all()) and len(inputs) > 4 * count:
        assert report.error <= 1.05 * report.rtn_error


def test_a_dead_channel_is_quantized_and_compensates_nothing() -> None:
    """No token of a short calibration used it; that does not make its weights zero."""
    weight = torch.randn(8, 48, generator=torch.Generator().manual_seed(1))
    record = correlated(48, 3)
    record.gram[5], record.gram[:, 5] = 0, 0
    codes, result = one(weight, record, IntScheme(4, 16, True))
    plain = round_to_nearest(weight, IntScheme(4, 16, True), DTYPE)
    assert torch.equal(codes.codes[:, 5], plain.codes[:, 5])
    changed = weight.clone()
    changed[:, 5] *= 0.9
    again, _ = one(changed, record, IntScheme(4, 16, True))
    assert torch.equal(codes.codes[:, 16:], again.codes[:, 16:])
    report: Any = result.reports[0]
    assert report.error < report.rtn_error


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_weight_is_named(value: float) -> None:
    weight = torch.randn(8, 32)
    weight[3, 4] = value
    with pytest.raises(BadInput, match=r"model\.layers\.0\.proj holds NaN"):
        one(weight, correlated(32, 0), IntScheme(4, 16, True))


def test_asymmetric_targets_are_nearer_to_the_float_models_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(500, 24, generator=generator)
    inputs = wanted + 0.3 * torch.randn(500, 24, generator=generator)
    weight = torch.randn(5, 24, generator=generator)
    record = InputStatistics(24)
    record.add(inputs)
    record.add_cross(inputs, wanted)
    assert record.cross is not None
    factor = feedback(record.gram, torch.randperm(24, generator=generator), 0.0)
    assert factor is not None
    shift = asymmetric_shift(weight, record.cross, factor)
    exact = weight @ ((wanted - inputs).T @ inputs) @ torch.linalg.inv(inputs.T @ inputs)
    assert torch.allclose(shift, exact / 4, atol=1e-6)

    def lost(used: torch.Tensor) -> float:
        return float((wanted @ weight.T - inputs @ used.T).square().sum())

    assert lost(weight + exact) < lost(weight + shift) < lost(weight)


def test_damping_rises_until_the_hessian_is_definite() -> None:
    """Three tokens span three dimensions of 64."""
    record = InputStatistics(64)
    record.add(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 100)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    _, result = one(weight, record, IntScheme(4, 16, True), damp=0.0)
    report: Any = result.reports[0]
    assert report.fallback is None
    assert report.damp is not None and 0 < report.damp <= 1
    assert report.error < report.rtn_error


@pytest.mark.parametrize("damp", [-0.1, 1.5, float("nan")])
def test_a_damping_that_means_nothing_is_refused(damp: float) -> None:
    with pytest.raises(BadInput, match="--damp"):
        MethodOptions(damp=damp)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("indefinite", "not positive definite"),
        ("nan", "NaN or infinite inputs"),
        ("unused", "no calibration token"),
    ],
)
def test_a_singular_hessian_falls_back_to_rtn_and_is_reported(damage: str, reason: str) -> None:
    weight, record = torch.randn(16, 64), correlated(64, 1)
    if damage == "indefinite":
        record.gram[3, 9] = record.gram[9, 3] = 100 * record.gram.diagonal().max()
    elif damage == "nan":
        record.gram[2, 2] = torch.nan
    else:
        record = InputStatistics(64)
    scheme = IntScheme(4, 16, False)
    codes, result = one(weight, record, scheme)
    assert same(codes, round_to_nearest(weight, scheme, DTYPE))
    report: Any = result.reports[0]
    assert reason in (report.fallback or "")
    assert report.damp is None


def test_corrections_beyond_every_number_end_in_plain_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = gptq.feedback

    def huge(*arguments: object) -> object:
        factor = honest(*arguments)  # pyright: ignore[reportArgumentType]
        factor.matrix.triu_(1).mul_(1e38).fill_diagonal_(1)
        return factor

    monkeypatch.setattr(gptq, "feedback", huge)
    weight, scheme = torch.randn(16, 64) * 1e3, IntScheme(4, 16, True)
    codes, result = one(weight, correlated(64, 1), scheme, act_order="none")
    assert "beyond what its scales can hold" in (result.reports[0].fallback or "")
    assert same(codes, round_to_nearest(weight, scheme, DTYPE))


def test_linears_of_one_input_may_have_different_grids() -> None:
    problem = problem_of(
        {"a": torch.randn(16, 64), "b": torch.randn(16, 64)},
        correlated(64, 1),
        IntScheme(4, 16, True),
    )
    problem.schemes["b"] = FloatScheme("tensor")
    problem.scale_dtypes["b"] = torch.float32
    result: Any = METHODS["gptq"].quantize_layer(problem)
    for report in result.reports:
        assert report.fallback is None and report.error < report.rtn_error
    assert result.weights["b"].scheme == FloatScheme("tensor")


def test_linears_of_one_input_are_factored_once_and_come_out_as_if_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, generator = correlated(64, 4), torch.Generator().manual_seed(2)
    weights = {name: torch.randn(24, 64, generator=generator) for name in "qkv"}
    options = MethodOptions(ranges="minmax", act_order="static")
    problem = problem_of(weights, record, IntScheme(4, 16, True), options=options)
    problem.schemes["v"] = IntScheme(8, 32, False)
    calls = []
    honest = gptq.feedback
    monkeypatch.setattr(gptq, "feedback", lambda *a: calls.append(1) or honest(*a))
    together = METHODS["gptq"].quantize_layer(problem)
    assert len(calls) == 1
    assert list(together.weights) == ["q", "k", "v"]
    for name, weight in weights.items():
        alone, _ = one(weight, record, problem.schemes[name])  # pyright: ignore[reportArgumentType]
        assert same(together.weights[name], alone)  # pyright: ignore[reportArgumentType]


def layer_problem(**options: object) -> LayerProblem:
    """A random Llama layer."""
    generator = torch.Generator().manual_seed(9)
    weights, statistics = {}, {}
    for number, group in enumerate(LLAMA.shared_inputs):
        statistics |= dict.fromkeys(group, correlated(64, number))
        weights |= {name: torch.randn(32, 64, generator=generator) for name in group}
    asked: dict[str, Any] = {"ranges": "minmax", "act_order": "static"} | options
    settings = MethodOptions(**asked)
    return problem_of(weights, statistics, IntScheme(4, 16, True), family=LLAMA, options=settings)


def test_codes_are_the_same_where_no_errors_are_measured() -> None:
    problem = replace(layer_problem(), remeasure=None)
    with_errors, without = (
        METHODS["gptq"].quantize_layer(replace(problem, measures_errors=each))
        for each in (True, False)
    )
    for name, codes in without.weights.items():
        assert same(codes, with_errors.weights[name])  # pyright: ignore[reportArgumentType]
    assert all(report.error is not None for report in with_errors.reports)
    assert all(report.error is None for report in without.reports)
    assert [one.damp for one in without.reports] == [one.damp for one in with_errors.reports]


def test_later_linears_see_what_the_earlier_ones_became() -> None:
    problem = replace(layer_problem(), statistics={})
    calls: list[tuple[dict[str, torch.Tensor], set[str]]] = []

    def remeasure(
        replaced: Mapping[str, torch.Tensor], linears: Collection[str]
    ) -> dict[str, InputStatistics]:
        calls.append((dict(replaced), set(linears)))
        return dict.fromkeys(linears, correlated(64, len(calls)))

    result: Any = METHODS["gptq"].quantize_layer(replace(problem, remeasure=remeasure))
    groups = LLAMA.shared_inputs
    assert [linears for _, linears in calls] == [set(group) for group in groups]
    for number, (replaced, _) in enumerate(calls):
        assert list(replaced) == [name for group in groups[:number] for name in group]
        assert all(torch.equal(w, result.weights[n].dequantize()) for n, w in replaced.items())
    for number, group in enumerate(groups):
        for name in group:
            seen = correlated(64, number + 1)
            alone, _ = one(problem.weights[name], seen, problem.schemes[name])
            assert same(result.weights[name], alone)  # pyright: ignore[reportArgumentType]
    for report in result.reports:  # on the inputs that the codes were chosen on
        name = report.module.removeprefix("model.layers.0.")
        effective = result.weights[name].dequantize()
        assert report.error == output_error(problem, name, effective)


def test_statistics_stay_as_they_are_where_that_was_asked_for() -> None:
    def remeasure(*_: object) -> dict[str, InputStatistics]:
        raise AssertionError

    problem = layer_problem(true_sequential=False)
    asked = METHODS["gptq"].quantize_layer(replace(problem, remeasure=remeasure))
    stored = METHODS["gptq"].quantize_layer(layer_problem())
    assert all(same(asked.weights[n], stored.weights[n]) for n in stored.weights)  # pyright: ignore[reportArgumentType]


def test_experts_are_measured_together_not_one_by_one() -> None:
    leaves = [f"block_sparse_moe.experts.{e}.{w}" for e in range(12) for w in ("w1", "w2", "w3")]
    family = map_of({"model_type": "mixtral"}, [f"{leaf}.weight" for leaf in leaves])
    weights = {name: torch.randn(8, 16) for name in family.linears}
    problem = problem_of(weights, correlated(16, 0), IntScheme(4, 16, True), family=family)
    calls: list[Collection[str]] = []

    def remeasure(
        replaced: Mapping[str, torch.Tensor], linears: Collection[str]
    ) -> dict[str, InputStatistics]:
        calls.append(linears)
        return problem.statistics

    result: Any = METHODS["gptq"].quantize_layer(replace(problem, remeasure=remeasure))
    assert list(result.weights) == list(weights)
    assert [len(linears) for linears in calls] == [3, 1, 25, 13]  # with the router


def test_linears_that_no_group_names_are_quantized_too() -> None:
    problem = problem_of(
        {"odd": torch.randn(16, 64), "strange": torch.randn(16, 64)},
        correlated(64, 1),
        IntScheme(4, 16, True),
        family=LLAMA,
    )
    reports: Any = METHODS["gptq"].quantize_layer(problem).reports
    assert all(r.error < r.rtn_error for r in reports)


def test_searched_ranges_never_lose_more_in_their_own_norm() -> None:
    grouped = torch.randn(64, 3, 32, generator=torch.Generator().manual_seed(0)) ** 3
    grouped[0, 0] = 0
    for scheme in (IntScheme(2, 32, True), IntScheme(4, 32, False)):
        lost = []
        for ranges in (group_ranges, search_ranges):
            scales, zeros = (part.float()[..., None] for part in ranges(grouped, scheme, DTYPE))
            codes = (torch.round(grouped / scales) + zeros).clamp(0, scheme.max_code)
            lost.append((((codes - zeros) * scales - grouped).abs() ** 2.4).sum(dim=-1))
        assert bool((lost[1] <= lost[0] * (1 + 1e-5)).all())
        assert float(lost[1].sum()) < 0.97 * float(lost[0].sum())


def test_what_is_asked_of_the_grid() -> None:
    method = METHODS["gptq"]
    assert method.scheme(SchemeOptions()) == IntScheme(4, 128, True)
    assert method.scheme(SchemeOptions(bits=3, group_size=64, act_order="dynamic")) == IntScheme(
        3, 64, True, permuted=True
    )
    per_channel = SchemeOptions(group_size=-1, symmetric=False, act_order="dynamic")
    assert method.scheme(per_channel) == IntScheme(4, -1, False)


def test_rounding_to_a_permuted_grid_leaves_the_groups_where_they_lie() -> None:
    weight = torch.randn(8, 64)
    plain = problem_of({"proj": weight}, correlated(64, 0), IntScheme(4, 16, True))
    permuted = replace(plain, schemes={"proj": IntScheme(4, 16, True, permuted=True)})
    left, right = (
        METHODS["rtn"].quantize_layer(problem).weights["proj"] for problem in (plain, permuted)
    )
    assert torch.equal(left.dequantize(), right.dequantize())
