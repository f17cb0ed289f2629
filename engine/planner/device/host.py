"""Default compute dtype of the CPU engine on this machine, from the processor's flags."""

from __future__ import annotations

from pathlib import Path

# Flags that oneDNN requires for bfloat16 GEMMs.
_BF16_FLAGS = {"avx512bw", "avx512vl", "avx512dq"}
_BF16_FLAG_ALONE = {"bf16", "avx_ne_convert"}  # on ARM, and on x86 without AVX-512


def host_dtype() -> str:
    """Default dtype: bf16 if the CPU supports bf16 GEMMs in oneDNN, else float32."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "float32"
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            return "bf16" if flags >= _BF16_FLAGS or flags & _BF16_FLAG_ALONE else "float32"
    return "float32"
