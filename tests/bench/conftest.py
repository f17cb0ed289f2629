"""Runs of the bench with what their reports take measured and laid out once, or roughly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from llmopt.bench.machine import roofline
from llmopt.bench.page import plot_style

CEILINGS = cache(roofline.measure_ceilings)
"""Half a second, alike in every run of a process."""


@pytest.fixture(scope="module", autouse=True)
def quick_reports() -> Iterator[None]:
    """Leave out the layout of charts, which takes longer than drawing them; `report` looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "measure_ceilings", CEILINGS)
        patch.setitem(plot_style.STYLE, "figure.constrained_layout.use", False)
        yield
