"""Noise on the CPU that depends on a seed, a position and a stream, and on nothing else."""

from __future__ import annotations

import numpy as np
import torch


def exponential_noise(seed: int, position: int, size: int, stream: int = 0) -> torch.Tensor:
    """Exp(1) noise, float32 [size], from a counter-based generator keyed by (seed, position).

    Streams of one key have nothing to do with each other.
    """
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    noise = generator.standard_exponential(size, dtype=np.float32)
    # Float32 can round to zero, and dividing by it would make the token certain.
    return torch.from_numpy(np.maximum(noise, np.finfo(np.float32).tiny))
