"""Ranking of the methods by error, on a layer with correlated inputs and outlier channels."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from llmopt.quant.families.layer_map import Fold, LayerMap
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods.base import (
    InputStatistics,
    LayerProblem,
    MethodOptions,
)
from llmopt.quant.methods.registry import METHODS

OUT, IN, TOKENS = 192, 256, 2048
FAMILY = LayerMap((("proj",),), (Fold("norm", ("proj",)),), frozenset())
CELLS = list(itertools.product((2, 3, 4, 8), (32, 128), (True, False)))


class Lost(NamedTuple):
    """Relative output errors of a method and of RTN, on calibration and on unseen tokens."""

    seen: float
    unseen: float
    rtn_seen: float
    rtn_unseen: float


@cache
def layer() -> tuple[torch.Tensor, InputStatistics, InputStatistics]:
    """A weight, and statistics of calibration tokens and of tokens that no method sees."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(32, IN, generator=generator)
    loudness = torch.ones(IN)
    loudness[torch.randperm(IN, generator=generator)[:8]] = 12.0
    records = []
    for _ in range(2):
        factors = torch.randn(TOKENS, 32, generator=generator)
        noise = torch.randn(TOKENS, IN, generator=generator)
        record = InputStatistics(IN)
        record.add((factors @ mixing / 32**0.5 + 0.3 * noise) * loudness)
        records.append(record)
    return torch.randn(OUT, IN, generator=generator) * 0.05, records[0], records[1]


def quantized(method: str, scheme: IntScheme, **options: object) -> Lost:
    weight, seen, unseen = layer()
    problem = LayerProblem(
        prefix="model.layers.0",
        family=FAMILY,
        schemes={"proj": scheme},
        scale_dtypes={"proj": torch.float16},
        weights={"proj": weight},
        statistics={"proj": seen},
        norms={"norm": torch.ones(IN)},
        with_bias=frozenset(),
        held_out={"proj": unseen},
        options=MethodOptions(**{"ranges": "minmax", "act_order": "static"} | options),  # pyright: ignore[reportArgumentType]
    )
    report: Any = METHODS[method].quantize_layer(problem).reports[0]
    assert report.held_out_error is not None and report.rtn_held_out_error is not None
    return Lost(report.error, report.held_out_error, report.rtn_error, report.rtn_held_out_error)


@pytest.mark.parametrize(("bits", "group_size", "symmetric"), CELLS)
def test_gptq_by_importance_beats_gptq_beats_rounding_and_awq_is_no_worse(
    bits: int, group_size: int, symmetric: bool
) -> None:
    scheme = IntScheme(bits, group_size, symmetric)
    rtn = quantized("rtn", scheme)
    plain_order = quantized("gptq", scheme, act_order="none")
    by_importance = quantized("gptq", scheme)
    awq = quantized("awq", scheme)
    assert by_importance.unseen < plain_order.unseen < rtn.unseen
    assert by_importance.seen < plain_order.seen < rtn.seen
    assert awq.seen <= rtn.seen
    assert awq.unseen <= rtn.unseen
    for report in (plain_order, by_importance, awq):
        assert report.rtn_seen == rtn.seen
        assert report.rtn_unseen == rtn.unseen


@pytest.mark.parametrize("bits", [2, 4])
def test_permuted_groups_are_as_good_as_static_ones(bits: int) -> None:
    permuted = quantized("gptq", IntScheme(bits, 32, False, permuted=True), act_order="dynamic")
    static = quantized("gptq", IntScheme(bits, 32, False))
    assert permuted.unseen < 1.2 * static.unseen


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_more_bits_and_smaller_groups_lose_less(method: str) -> None:
    errors = [quantized(method, IntScheme(bits, 64, False)).unseen for bits in (2, 3, 4, 5, 6, 8)]
    assert errors == sorted(errors, reverse=True)
    errors = [quantized(method, IntScheme(4, size, False)).unseen for size in (-1, 128, 32)]
    assert errors == sorted(errors, reverse=True)


def test_a_searched_range_helps_two_bits() -> None:
    scheme = IntScheme(2, 128, False)
    searched = quantized("gptq", scheme, ranges="mse")
    assert searched.unseen < quantized("gptq", scheme).unseen
