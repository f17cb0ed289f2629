"""The bound of OpenMP's spins stays with this engine."""

from __future__ import annotations

from llmopt.base.processor import OPENMP_SPINS, without_openmp_spins


def test_another_engine_spins_as_its_user_says() -> None:
    assert without_openmp_spins({"A": "1", "GOMP_SPINCOUNT": OPENMP_SPINS}) == {"A": "1"}
    chosen = {"GOMP_SPINCOUNT": "300000", "OMP_WAIT_POLICY": "active"}
    assert without_openmp_spins(chosen) == chosen
