"""The time of a run from the time of a layer: the arithmetic, and where a layer is timed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmopt.base.progress import Silent
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline import estimate, pipeline
from llmopt.quant.pipeline.estimate import QUICK_TOKENS, LayerTime, Stopwatch, time_layer
from llmopt.quant.pipeline.pipeline import predict, quantize
from llmopt.quant.pipeline.preflight import preflight
from llmopt.quant.pipeline.prepare import outline, prepare
from llmopt.quant.plan.request import QuantizeRequest

from ...support.quant_support import STORIES

RECORDED = LayerTime(solving=4.0, passes=2.0, tokens=16_384 + 2_048, weights=3_538_944)
"""A layer of SmolLM2-135M, of which it has 30."""


def request(output: Path, **options: Any) -> QuantizeRequest:
    settings: dict[str, Any] = {"num_samples": 16, "seq_len": 32, "held_out": 2}
    return QuantizeRequest(STORIES, output, **(settings | options))


def test_passes_grow_with_the_text_and_solving_does_not() -> None:
    weights = 30 * RECORDED.weights
    assert RECORDED.seconds(weights, RECORDED.tokens) == pytest.approx(30 * 6)
    assert RECORDED.seconds(weights, 0) == pytest.approx(30 * 4)
    assert RECORDED.seconds(weights, 10 * RECORDED.tokens) == pytest.approx(30 * 24)
    assert QUICK_TOKENS == (64 + 8) * 512


def test_time_that_other_programs_took_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds passed, and this process ran for three of them; two threads ran for fifteen."""
    for used, seconds in ((3.0, 3.0), (15.0, 10.0)):
        clocks = {"perf_counter": iter([0.0, 10.0]), "process_time": iter([0.0, used])}
        fake = {name: partial(next, clock) for name, clock in clocks.items()}
        monkeypatch.setattr(estimate, "time", SimpleNamespace(**fake))
        with Stopwatch() as watch:
            pass
        assert watch.seconds == seconds
    monkeypatch.undo()


def test_a_long_run_is_told_beside_a_quick_one(tmp_path: Path) -> None:
    session = outline(request(tmp_path / "out", method="gptq"))
    timed = replace(RECORDED, passes=80.0, weights=1_000_000)
    answer = preflight(session, layer=timed)
    weights = sum(out * width for out, width in session.plan.modules.values())
    assert answer.seconds == timed.seconds(weights, session.calibration.num_tokens)
    assert answer.quick_seconds is None  # there is less text than that
    long = replace(answer, seconds=61_472.0, quick_seconds=1_500.0)
    assert long.time == "about 17 h; with --num-samples 64 --seq-len 512 about 25 min"
    assert long.time in long.line()
    assert replace(long, quick_seconds=40_000.0).time == "about 17 h"
    assert answer.bare_seconds is None  # the method is calibrated
    rounded = preflight(prepare(request(tmp_path / "out", method="rtn")), layer=timed)
    assert rounded.bare_seconds == timed.seconds(weights, 0)
    assert replace(rounded, seconds=540.0, bare_seconds=9.0, is_timed=True).time == (
        "about 9 min, to measure errors; with --no-errors about 9 s"
    )
    bare = request(tmp_path / "out", method="rtn", errors=False)
    assert preflight(prepare(bare)).bare_seconds is None
    assert replace(long, quick_seconds=None, is_timed=False).time == "about 17 h by its operations"


@pytest.mark.parametrize(
    "options",
    [
        {"method": "awq", "options": MethodOptions(asymmetric=None)},
        {"method": "gptq", "format": "gptq,compressed-tensors"},
        {"method": "autoround", "options": MethodOptions(iters=2)},
        {"method": "rtn", "errors": False},
        {"method": "Q4_0"},
    ],
    ids=str,
)
def test_a_timed_layer_leaves_the_run_as_it_is(tmp_path: Path, options: dict) -> None:
    session = prepare(request(tmp_path / "out", **options))
    timed = time_layer(session, Silent())
    assert timed is not None and timed.solving > 0 and timed.passes >= 0
    shapes = session.plan.modules.items()
    weights = sum(out * width for name, (out, width) in shapes if ".layers.0." in name)
    assert timed.weights == weights
    assert timed.tokens == (session.calibration.num_tokens if session.request.errors else 0)


def test_a_layer_is_timed_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path / "out", method="rtn")
    assert predict(asked, Silent(), timed=True).is_timed
    monkeypatch.setattr(pipeline, "time_layer", None)
    assert not predict(asked, Silent()).is_timed
    quantize(asked)
