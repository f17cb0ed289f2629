"""How the inputs of a GEMM are split over programs (split-K)."""

from __future__ import annotations

SPLIT_RUNS = 2
"""What a program takes beside its runs, in runs: the first loads, and its part of the reduction."""


def split_runs(num_tiles: int, num_runs: int, slots: int) -> int:
    """Runs of a split: those with which the rounds of programs on the GPU's slots end first."""

    def cost(each: int) -> int:
        programs = num_tiles * -(-num_runs // each)
        return -(-programs // slots) * (each + SPLIT_RUNS)

    return min(range(min(2, num_runs), num_runs + 1), key=lambda each: (cost(each), -each))
