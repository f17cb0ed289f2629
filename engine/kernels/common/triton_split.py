"""How the inputs of a GEMM are split over programs (split-K)."""

from __future__ import annotations

FEW_TOKENS = 64
"""Decode-sized batches: tokens per call up to which a GEMM is split-K."""
FEW_ROWS = 16
"""Rows of the least tile. Of 8, Hopper would take another instruction, whose sums differ in the last bits."""
DECODE_SLOTS = 4
"""Most programs on a multiprocessor that a decode-sized batch is split for; a prefill-sized one has one."""
RESERVED = 1024
"""Shared memory that the GPU keeps of each program."""
SPLIT_RUNS = 2
"""What a program takes beside its runs, in runs: the first loads, and its part of the reduction."""


def split_runs(num_tiles: int, num_runs: int, slots: int) -> int:
    """Runs of a split: those with which the rounds of programs on the GPU's slots end first."""

    def cost(each: int) -> int:
        programs = num_tiles * -(-num_runs // each)
        return -(-programs // slots) * (each + SPLIT_RUNS)

    return min(range(min(2, num_runs), num_runs + 1), key=lambda each: (cost(each), -each))
