"""Runs of the bench whose reports take made-up ceilings, and lay their charts out roughly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from llmopt.bench.machine import roofline
from llmopt.bench.machine.roofline import Ceilings
from llmopt.bench.page import plot_style


def made_up_ceilings(device: torch.device, dtype: torch.dtype, model_bytes: int) -> Ceilings:
    """Ceilings of no machine: measuring takes half a second, and differs from run to run."""
    return Ceilings(1e10, 1e10, model_bytes, {"float32": 1e13})


@pytest.fixture(scope="module", autouse=True)
def quick_reports() -> Iterator[None]:
    """Leave out the layout of charts, which takes longer than drawing them; `report` looks at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "measure_ceilings", made_up_ceilings)
        patch.setitem(plot_style.STYLE, "figure.constrained_layout.use", False)
        yield
