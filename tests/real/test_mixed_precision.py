"""Mixed precision of SmolLM2-135M-Instruct: expected KL divergences rank mixtures as the measured ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mixtures import Measured, rank_correlation


@pytest.mark.timeout(3600)
def test_expected_divergence_ranks_mixtures_of_all_sizes(real_model: Path, tmp_path: Path) -> None:
    """Those of about one size are told apart less well, and their number is printed beside it."""
    measured = Measured.of(real_model, tmp_path, 3.5, num_samples=32, seq_len=256, held_out=32)
    alike = rank_correlation(measured, 20)
    every = rank_correlation(measured, 20, tilt=1.5)
    print(f"rank correlation: mixtures of all sizes {every:.3f}, of about one size {alike:.3f}")
    assert every >= 0.95 and alike >= 0.6
