"""Rotary position embedding (RoPE): context extension and cos/sin tables.

Su et al., "RoFormer" (2021). Context extension: linear interpolation (Chen et al., 2023),
Llama 3.1's frequency-dependent interpolation, YaRN (Peng et al., 2023), LongRoPE (Ding et al., 2024).
Multimodal RoPE (M-RoPE, Qwen2-VL, arXiv:2409.12191): each pair rotates by one of three positions.
"""

from __future__ import annotations

import math

import torch

from ....quant.base.errors import BadInput
from ....quant.families.spec_parts import RopeSpec, yarn_scale


def rope_frequencies(
    rope: RopeSpec, width: int, num_positions: int = 0
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies of the rotated pairs, float32 [width / 2], and the factor on cos and sin.

    LongRoPE's list is chosen once, by the maximum sequence length (`num_positions`), as vLLM does: a choice
    by the current length would make cached keys depend on later tokens.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, width)
    if rope.kind == "longrope":
        return _longrope(frequencies, rope, num_positions)
    if rope.kind == "proportional":
        num_rotated = int(rope.parameters.get("partial_rotary_factor", 1.0) * width // 2)
        frequencies[num_rotated:] = 0.0
        return frequencies / rope.parameters.get("factor", 1.0), 1.0
    return frequencies, 1.0


def rope_axes(rope: RopeSpec, width: int) -> torch.Tensor:
    """The axis of each rotated pair's position, int64 [width / 2]: 0 temporal, 1 height, 2 width (M-RoPE).

    Raises:
        BadInput: there are more or fewer pairs than the sections have.
    """
    if rope.sections_interleave:
        axes = torch.zeros(width // 2, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * rope.sections[axis] : 3] = axis
        return axes
    if sum(rope.sections) != width // 2:
        raise BadInput(
            f"config.json: mrope_section {list(rope.sections)} does not add up to the {width // 2} rotated "
            "pairs of a head"
        )
    return torch.tensor([i % 3 for i, size in enumerate(rope.sections) for _ in range(size)])


def rope_table(
    rope: RopeSpec, width: int, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cos/sin cache: cos and sin, float32 [num_positions, width / 2] each."""
    frequencies, factor = rope_frequencies(rope, width, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths are scaled by `factor`, short ones kept, those between interpolated."""
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    original = rope.parameters["original_max_position_embeddings"]
    num_rotations = original * frequencies / (2 * math.pi)  # rotations within the original context
    unstretched = ((num_rotations - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (unstretched + (1.0 - unstretched) / rope.parameters["factor"])


def _yarn(frequencies: torch.Tensor, rope: RopeSpec, width: int) -> tuple[torch.Tensor, float]:
    p = rope.parameters
    factor, original = p["factor"], p["original_max_position_embeddings"]

    def pair_at(num_rotations: float) -> float:
        """Index of the pair that completes `num_rotations` rotations within the original context."""
        return (
            width * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = pair_at(p.get("beta_fast", 32.0)), pair_at(p.get("beta_slow", 1.0))
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    usual = yarn_scale(factor)
    if p.get("mscale") and p.get("mscale_all_dim"):
        usual = yarn_scale(factor, p["mscale"]) / yarn_scale(factor, p["mscale_all_dim"])
    return frequencies * (1.0 - stretched + stretched / factor), p.get("attention_factor", usual)


def _longrope(
    frequencies: torch.Tensor, rope: RopeSpec, num_positions: int
) -> tuple[torch.Tensor, float]:
    p = rope.parameters
    original = p["original_max_position_embeddings"]
    factors = rope.long_factors if num_positions > original else rope.short_factors
    if len(factors) != frequencies.numel():
        raise BadInput(
            f"config.json: longrope gives {len(factors)} factors for {frequencies.numel()} frequencies"
        )
    stretch = p["factor"]
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return frequencies / torch.tensor(factors), p.get("attention_factor", usual)
