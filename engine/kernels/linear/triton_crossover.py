"""Up to how many tokens a product that reads codes beats torch's: measured once for a device and a shape.

The answer is kept in the user's cache folder, in a file for each device and version of what was measured.
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
"""What is tried, in order, until torch is faster."""
DEFAULT_CROSSOVER = 64
"""The answer where nothing is measured: in the interpreter, and where there is no room to try."""
SOURCES = ("triton_gemm.py", "triton_dequantize.py", "triton_packed_weight.py")

Gemm = Callable[[torch.Tensor], torch.Tensor]


def crossover_tokens(name: str, inputs: torch.Tensor, fused: Gemm, dequantized: Gemm) -> int:
    """The most of `TOKENS` up to which `fused` is no slower than `dequantized`; 1 if it never is.

    Args:
        name: of the weight's shape and kind, which the answer is kept under.
        inputs: of as many tokens as are tried at most.
    """
    if inputs.device.type != "cuda":
        return DEFAULT_CROSSOVER

    def is_faster(tokens: int) -> bool:
        from triton.runtime.errors import OutOfResources

        try:
            return _seconds(fused, inputs[:tokens]) <= _seconds(dequantized, inputs[:tokens])
        except OutOfResources:
            return False  # a small GPU has too little shared memory for so many

    path = _file(torch.cuda.get_device_name(inputs.device))
    try:
        return cached_crossover(path, name, lambda: last_faster_size(is_faster))
    except torch.OutOfMemoryError:
        return DEFAULT_CROSSOVER


def cached_crossover(path: Path, name: str, measure: Callable[[], int]) -> int:
    """The answer that the file of `path` has under `name`; if it has none, it is measured and kept there."""
    known = _known(path)
    if name not in known:
        known[name] = measure()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(known, indent=1, sort_keys=True).encode())
        except (OSError, BadInput):
            pass  # it is then measured again in the next process
    return known[name]


def last_faster_size(is_faster: Callable[[int], bool]) -> int:
    """The last of `TOKENS` before the first for which it is not; 1: before them all."""
    last = 1
    for tokens in TOKENS:
        if not is_faster(tokens):
            break
        last = tokens
    return last


@cache
def _known(path: Path) -> dict[str, int]:
    """What a file has, which need not exist and may be damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    is_sound = isinstance(found, dict) and all(isinstance(one, int) for one in found.values())
    return found if is_sound else {}


@cache
def _file(device_name: str) -> Path:
    """Where the answers for a device lie: for these sources of the kernels, this torch and this Triton."""
    import triton

    digest = hashlib.sha256(f"{torch.__version__} {triton.__version__}".encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    device = re.sub(r"\W+", "-", device_name)
    return cache_folder().parent / "borders" / f"{device}-{digest.hexdigest()[:16]}.json"


def _seconds(gemm: Gemm, x: torch.Tensor) -> float:
    """The median time of a call whose weight is not in the cache of the device."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(lambda: gemm(x), warmup=5, rep=20, return_mode="median")
    return milliseconds / 1000
