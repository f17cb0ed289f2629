"""The step table of the simulation's error: recovered times, and passes that a neighbour stretched."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from llmopt.engine.planner.step_model import StepWork

from tools.simulation_error import BLOCK, StepTable, positive_fit, simulated


def steps(seconds_per_step: float) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    decode, blocks = draw.integers(1, 9, 200), draw.integers(10, 60, 200)
    prefill = np.where(draw.random(200) < 0.3, draw.integers(20, 300, 200), 0)
    decode = np.where(prefill > 0, 0, decode)
    rows = np.maximum(1, decode)
    attended = np.where(prefill > 0, prefill**2 / 2, blocks * BLOCK)
    return pd.DataFrame(
        {
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "num_rows": rows,
            "kv_blocks_used": blocks,
            "kv_slots_unfilled": 0,
            "seconds": seconds_per_step + 1e-4 * (prefill + decode) + 1e-6 * attended,
        }
    )


def test_the_table_recovers_linear_times() -> None:
    table = StepTable(steps(2e-3))
    assert table.seconds(StepWork(4, 400)) == pytest.approx(2e-3 + 4e-4 + 4e-4, rel=0.01)
    assert table.seconds(StepWork(0, 0, 100, 5000, 1)) == pytest.approx(1.7e-2, rel=0.01)
    assert table.drift(steps(2e-3)) == pytest.approx(1)
    assert table.drift(steps(4e-3)) > 1.1


def test_no_coefficient_is_negative() -> None:
    columns = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert positive_fit(columns, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])


def test_a_pass_is_simulated_in_milliseconds() -> None:
    requests = pd.DataFrame({"prompt_len": [10] * 4, "output_len": [3] * 4})
    virtual = simulated(requests, StepTable(steps(2e-3)), 1, overlapped=False)
    assert virtual["tpot"] == pytest.approx(2.1, rel=0.05)
    assert virtual["ttft"] == pytest.approx(3, rel=0.2)
