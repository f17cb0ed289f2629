"""Rotary position embedding: the table of angles.

Su et al., "RoFormer" (2021). Stretching to longer contexts: linear interpolation (Chen et al., 2023),
Llama 3.1's frequency-dependent interpolation, YaRN (Peng et al., 2023).
"""

from __future__ import annotations

import math

import torch

from .spec import RopeSpec


def rope_frequencies(rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each rotated pair, float32 [head_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies, 1.0


def rope_table(
    rope: RopeSpec, head_dim: int, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position's angles, float32 [num_positions, head_dim / 2] each."""
    frequencies, factor = rope_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    original = rope.parameters["original_max_position_embeddings"]
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.parameters["factor"])


def _yarn(frequencies: torch.Tensor, rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    p = rope.parameters
    factor, original = p["factor"], p["original_max_position_embeddings"]

    def pair_at(turns: float) -> float:
        """Index of the pair that makes `turns` full turns within the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_at(p.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_at(p.get("beta_slow", 1.0))), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    attention_factor = p.get(
        "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    )
    return frequencies * (1.0 - stretched + stretched / factor), attention_factor
