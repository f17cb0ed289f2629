"""Autotuned crossover between the fused mixed-input GEMM and dequantize + cuBLAS, in tokens per call.

Measured once per device and shape, and kept in the user's cache folder: one file per device and version of
the measured kernels.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ....quant.base.atomic_io import write_atomically
from ....quant.base.errors import BadInput
from ..common.build import cache_folder

TOKENS = (16, 32, 64, 128, 256)
"""Batch sizes that are measured, in order, until cuBLAS is faster."""
DEFAULT_CROSSOVER = 64
"""The crossover where nothing is measured: in the interpreter, and where memory does not suffice."""
SOURCES = ("triton_gemm.py", "triton_dequantize.py", "triton_packed_weight.py")

Gemm = Callable[[torch.Tensor], torch.Tensor]


def crossover_tokens(name: str, inputs: torch.Tensor, fused: Gemm, dequantized: Gemm) -> int:
    """The largest of `TOKENS` up to which `fused` is no slower than `dequantized`; 1 if it never is.

    Args:
        name: cache key: the weight's shape and kind.
        inputs: activations of at least `max(TOKENS)` tokens.
    """
    if inputs.device.type != "cuda":
        return DEFAULT_CROSSOVER

    def is_faster(tokens: int) -> bool:
        from triton.runtime.errors import OutOfResources

        try:
            return _seconds(fused, inputs[:tokens]) <= _seconds(dequantized, inputs[:tokens])
        except OutOfResources:
            return False  # a small GPU lacks the shared memory for this batch size

    path = _file(torch.cuda.get_device_name(inputs.device))
    try:
        return cached_crossover(path, name, lambda: last_faster_size(is_faster))
    except torch.OutOfMemoryError:
        return DEFAULT_CROSSOVER


def cached_crossover(path: Path, name: str, measure: Callable[[], int]) -> int:
    """The crossover that the file `path` holds under `name`; if absent, it is measured and stored."""
    known = _known(path)
    if name not in known:
        known[name] = measure()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(known, indent=1, sort_keys=True).encode())
        except (OSError, BadInput):
            pass  # the next process measures again
    return known[name]


def last_faster_size(is_faster: Callable[[int], bool]) -> int:
    """The last of `TOKENS` before the first that is not faster; 1 if the first is not."""
    last = 1
    for tokens in TOKENS:
        if not is_faster(tokens):
            break
        last = tokens
    return last


@cache
def _known(path: Path) -> dict[str, int]:
    """The stored crossovers of a file; empty where it is missing or damaged."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    is_sound = isinstance(stored, dict) and all(isinstance(n, int) for n in stored.values())
    return stored if is_sound else {}


@cache
def _file(device_name: str) -> Path:
    """The crossover file of a device, for these kernel sources, this torch and this Triton."""
    import triton

    digest = hashlib.sha256(f"{torch.__version__} {triton.__version__}".encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    device = re.sub(r"\W+", "-", device_name)
    return cache_folder().parent / "borders" / f"{device}-{digest.hexdigest()[:16]}.json"


def _seconds(gemm: Gemm, x: torch.Tensor) -> float:
    """The median time of a call with a cold L2 cache."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(lambda: gemm(x), warmup=5, rep=20, return_mode="median")
    return milliseconds / 1000
