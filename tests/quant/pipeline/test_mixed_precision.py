"""Mixed precision: what a choice costs is predicted as it is measured, and the program finds the least of it."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.quant.base.errors import BadInput
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.pipeline.candidates import Choice
from llmopt.quant.pipeline.mixed_precision import allocate, c_prints_on_stderr, front
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest

from ...support.mixtures import Measured, rank_correlation
from ...support.quant_support import STORIES, TINY


@pytest.mark.whole
def test_expected_divergence_ranks_mixtures_as_the_measured_does(tmp_path: Path) -> None:
    measured = Measured.of(STORIES, tmp_path, 3.5, num_samples=64, seq_len=128, held_out=12)
    assert rank_correlation(measured, 20, tilt=1.5) >= 0.95
    # Mixtures of about one size differ less, and by sums of many small differences.
    assert rank_correlation(measured, 40) >= 0.9


def hypervolume(points: Sequence[tuple[int, float]], corner: tuple[int, float]) -> float:
    """Area between a corner and the points that are better in both, bytes and divergence."""
    area, worst = 0.0, corner[1]
    for size, loss in sorted(points):
        if loss < worst and size < corner[0]:
            area += (corner[0] - size) * (worst - loss)
            worst = loss
    return area


def test_the_front_is_that_of_all_mixtures(tmp_path: Path) -> None:
    """Compare the fronts of five groups of linears with three candidates each, in measured divergence."""
    left = r"layers\.([1-3]\.|4\.(self_attn|mlp\.down))"
    measured = Measured.of(
        STORIES, tmp_path, 3.5, kept=3, num_samples=16, seq_len=64, held_out=4, ignore=(left,)
    )
    assert len(measured.choices) == 5
    every = list(itertools.product(range(3), repeat=5))
    known = dict(zip(every, measured.divergences(every), strict=True))
    corner = max(map(measured.bytes_of, every)) + 1, max(known.values())
    ours = [each.chosen for each in front(measured.choices, 32)]
    areas = [
        hypervolume([(measured.bytes_of(one), known[one]) for one in mixtures], corner)
        for mixtures in (ours, every)
    ]
    assert areas[0] >= 0.98 * areas[1]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1000)), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 120),
)
@settings(deadline=None)  # the first call loads the solver
def test_an_allocation_is_the_best_of_all_within_the_bound(
    raw: list[list[tuple[int, int]]], extra: int
) -> None:
    choices = [
        Choice((str(number),), tuple(s for s, _ in pairs), tuple(float(c) for _, c in pairs))
        for number, pairs in enumerate(raw)
    ]
    least = sum(min(choice.bytes) for choice in choices)
    found = allocate(choices, least + extra)

    def total(picked: tuple[int, ...], part: str) -> float:
        return sum(getattr(c, part)[at] for c, at in zip(choices, picked, strict=True))

    every = itertools.product(range(3), repeat=len(choices))
    best = min(total(one, "costs") for one in every if total(one, "bytes") <= least + extra)
    assert found.bytes == total(found.chosen, "bytes") <= least + extra
    assert found.cost == total(found.chosen, "costs") <= best * (1 + 1e-4)
    with pytest.raises(BadInput, match="too small"):
        allocate(choices, least - 1)
    same = allocate(choices, sum(max(choice.bytes) for choice in choices), exclusive=True)
    assert len(set(same.chosen)) == 1


def test_stdout_is_free_of_what_the_solver_prints(capfd: pytest.CaptureFixture[str]) -> None:
    with c_prints_on_stderr():
        ctypes.CDLL(None).puts(b"from C")
    print("the result")
    assert capfd.readouterr() == ("the result\n", "from C\n")


@pytest.mark.parametrize(
    ("model", "weight_format", "mixed"), [(TINY, "gguf", True), (STORIES, "awq", False)]
)
def test_a_format_holds_what_is_chosen(
    tmp_path: Path, model: Path, weight_format: str, mixed: bool
) -> None:
    """ggml's types tensor by tensor; one scheme for the whole file of awq."""
    request = QuantizeRequest(
        model, tmp_path / "out", method="auto", target_bpw=5.4, format=weight_format,
        num_samples=4, seq_len=64, held_out=2, model_name="m",
    )  # fmt: skip
    result = quantize(request)
    schemes = {json.dumps(module["scheme"]) for module in result.manifest["modules"]}
    assert (len(schemes) > 1) == mixed
    assert result.manifest["summary"]["bits_per_weight"] <= 5.4
    assert result.manifest["search"]["gap"] <= 1e-3
    assert verify(result.output).status == PROVEN
