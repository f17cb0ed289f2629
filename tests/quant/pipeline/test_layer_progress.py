"""Progress within a layer: steps count as they did in the layer before, and a run tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmopt.base.progress import ProgressUpdate, Silent, as_progress
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.pipeline.stages import LayerProgress
from llmopt.quant.plan.request import QuantizeRequest

from ...support.quant_support import STORIES


class Shown(Silent):
    def __init__(self) -> None:
        self.counts: list[float] = []
        self.texts: list[str] = []

    def advance(self, count: float = 1) -> None:
        self.counts.append(count)

    def status(self, text: str) -> None:
        self.texts.append(text)


def test_a_step_counts_as_its_time_in_the_layer_before() -> None:
    shown, now = Shown(), [0.0]
    within = LayerProgress(shown, lambda: now[0])
    for seconds in (6.0, 9.0):  # a step after six seconds, one after nine, of ten
        now[0] = seconds
        within.step()
    now[0] = 10.0
    within.end()
    assert shown.counts == [1.0] and shown.texts[-1] == "step 2 of the first layer"
    within.begin()
    for _ in range(3):  # one more than in the layer before
        now[0] += 5.0
        within.step()
    assert shown.counts[1:] == pytest.approx([0.6, 0.3])
    now[0] += 5.0
    within.end()
    assert shown.counts[1:] == pytest.approx([0.6, 0.3, 0.1])
    within.begin()
    within.step()
    within.end()
    assert shown.counts[4:] == pytest.approx([0.25, 0.75])


def test_a_function_is_told_whole_units_as_integers() -> None:
    updates: list[ProgressUpdate] = []
    progress = as_progress(updates.append)
    progress.start("quantizing", 3, "layers")
    thirds = 1 / 3, 1 / 3, 1 - 2 / 3
    for count in (1, *thirds, *thirds):
        progress.advance(count)
    counts = ["0", "1", "1.333333", "1.666667", "2", "2.333333", "2.666667", "3"]
    assert [str(update.done) for update in updates] == counts


@pytest.mark.parametrize(
    ("method", "options", "least"),
    [
        ("awq", MethodOptions(asymmetric=None), 10),
        ("rtn", MethodOptions(), 9),
        ("autoround", MethodOptions(iters=5), 5),
    ],
)
def test_a_run_tells_its_steps_within_a_layer(
    tmp_path: Path, method: str, options: MethodOptions, least: int
) -> None:
    shown = Shown()
    sizes: Any = {"num_samples": 4, "seq_len": 32}
    quantize(
        QuantizeRequest(STORIES, tmp_path / "out", method=method, options=options, **sizes), shown
    )
    assert sum(shown.counts) == pytest.approx(5)
    assert len(shown.counts) > 4 * least
    assert f"step {least} of the first layer" in shown.texts
