"""Costs of a GPU that its data sheet does not say: constants of `kv-plan` and of `tools/gpu_cost.py`."""

from __future__ import annotations

STREAMED = 0.74
"""Of the data sheet's bandwidth: what the traffic of a step reaches (fits gpt-fast's published A100 runs)."""
COPIED = 0.92
"""Of the data sheet's bandwidth: what a large copy reaches, the roof of decode. Assumed."""
MULTIPLIED = 0.6
"""Of the data sheet's peak: what a prefill reaches. Assumed."""
LARGE_GEMM = 0.75
"""Of the data sheet's peak: what a large GEMM reaches, the roof of prefill. Assumed."""
LAYER_SECONDS = 63e-6
"""Of a layer beside its traffic, at batch 1 (fits gpt-fast's published A100 runs)."""
ALL_REDUCE_SECONDS = 25e-6
"""Latency of an all-reduce: the mean of the same fit's residuals."""
LAUNCH_SECONDS = 1.5e-6
"""From one kernel of a CUDA graph to the next: the last programs' end, and the first loads. Assumed."""
MEMORY_SECONDS = 0.7e-6
"""Latency of a load from a busy device memory. Assumed."""
CACHE_SECONDS = 0.3e-6
"""Latency of a load from the L2 cache. Assumed."""
BARRIER_SECONDS = 0.04e-6
"""Of a barrier among a program's warps, with the shared memory's latency. Assumed."""
