"""What the engine computes in on this machine's processor, told from its flags."""

from __future__ import annotations

from pathlib import Path

# What oneDNN asks of a processor before it multiplies in bfloat16.
_BF16_FLAGS = {"avx512bw", "avx512vl", "avx512dq"}
_BF16_FLAG_ALONE = {"bf16", "avx_ne_convert"}  # of ARM, and of processors without AVX-512


def host_dtype() -> str:
    """What the engine computes in here, where nothing was asked: bf16, or float32 without its products."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "float32"
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            return "bf16" if flags >= _BF16_FLAGS or flags & _BF16_FLAG_ALONE else "float32"
    return "float32"
