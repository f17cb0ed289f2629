"""Counter-based noise (Philox) on the CPU: a function of seed, position and stream."""

from __future__ import annotations

import numpy as np
import torch


def exponential_noise(seed: int, position: int, size: int, stream: int = 0) -> torch.Tensor:
    """Exp(1) noise, float32 [size], from a counter-based generator keyed by (seed, position).

    Streams of one key are independent.
    """
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    noise = generator.standard_exponential(size, dtype=np.float32)
    # Float32 can round to zero, and dividing by zero would always select the token.
    return torch.from_numpy(np.maximum(noise, np.finfo(np.float32).tiny))
