"""Embeddings: tokens by a table or a packed weight, tokens of images, and rotary position embedding (RoPE).

RoPE: Su et al., "RoFormer" (2021). Context extension: linear interpolation (Chen et al., 2023),
Llama 3.1's frequency-dependent interpolation, YaRN (Peng et al., 2023), LongRoPE (Ding et al., 2024).
Multimodal RoPE (M-RoPE, Qwen2-VL, arXiv:2409.12191): each pair rotates by one of three positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....base.errors import BadInput
from ....quant.families.spec_parts import RopeSpec, yarn_scale
from ...kernels.elementwise.native_rows import cos_sin_rows, embedding_rows
from ...kernels.elementwise.reference import expand_cos_sin
from ...kernels.linear.native_linear import LooksUpRows
from ...scheduling.block_pool import Window
from .projection import Projection


def rope_frequencies(
    rope: RopeSpec, width: int, num_positions: int = 0
) -> tuple[torch.Tensor, float]:
    """Inverse frequencies of the rotated pairs, float32 [width / 2], and the factor on cos and sin. As in
    vLLM `num_positions` chooses LongRoPE's list: by current length, keys would depend on later tokens."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        # Long wavelengths are scaled by `factor`, short ones kept, those between interpolated.
        low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
        original = rope.parameters["original_max_position_embeddings"]
        num_rotations = original * frequencies / (2 * math.pi)  # within the original context
        kept = ((num_rotations - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rope.parameters["factor"]), 1.0
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
    """Axis of each pair's position, int64 [width / 2]: time, height, width; BadInput: not all pairs."""
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


def _yarn(frequencies: torch.Tensor, rope: RopeSpec, width: int) -> tuple[torch.Tensor, float]:
    p = rope.parameters
    factor, original = p["factor"], p["original_max_position_embeddings"]

    def pair_at(num_rotations: float) -> float:
        """Index of the pair that completes `num_rotations` rotations within the original context."""
        wavelengths = math.log(original / (num_rotations * 2 * math.pi))
        return width * wavelengths / (2 * math.log(rope.theta))

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


class EmbeddingTable:
    """An embedding of floats [vocab, width], whose vectors are in `dtype`; `nbytes` are what it holds."""

    def __init__(self, table: torch.Tensor, dtype: torch.dtype) -> None:
        self._table, self._dtype = table, dtype
        self.width, self.nbytes, self.device = table.shape[1], table.nbytes, table.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return embedding_rows(self._table, token_ids).to(self._dtype)

    def head(self, part: slice) -> Projection:
        return Projection([self._table[part]], None, self._dtype)


class PackedEmbedding:
    """The rows of a packed weight on a CPU, which may be the LM head's too; its vectors are in `dtype`."""

    def __init__(
        self, packed: Projection, rows: LooksUpRows, width: int, dtype: torch.dtype
    ) -> None:
        self._packed, self._rows, self._dtype = packed, rows, dtype
        self.width, self.nbytes, self.device = width, packed.weight_bytes, torch.device("cpu")

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows.lookup(token_ids, self._dtype)

    def head(self, part: slice) -> Projection:
        self.nbytes = 0
        return self._packed


TokenEmbedding = EmbeddingTable | PackedEmbedding


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedRows:
    """Embeddings of a vision tower, [rows, hidden], in place of the step's tokens `rows`, int64 [rows].
    `deepstack`: [rows, hidden] each, added to the output of the layer of that index (Qwen3-VL)."""

    rows: torch.Tensor
    embeddings: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()

    def replace(self, hidden: torch.Tensor) -> torch.Tensor:
        """Token embeddings [tokens, hidden] with those of the images in their places."""
        return hidden.index_copy(0, self.rows, self.embeddings.to(hidden.dtype))

    def add_deepstack(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output [tokens, hidden] of a layer with its level of the deepstack added."""
        return hidden.index_add(0, self.rows, self.deepstack[layer].to(hidden.dtype))


CosSin = list[tuple[torch.Tensor, torch.Tensor]]
"""(cos, sin) of each RoPE, in the layout of `apply_rotary_emb`."""


class RotaryEmbedding:
    """cos and sin of positions: from a cos/sin cache, or with `stream` computed from the positions.

    With `stream` (StreamingLLM, arXiv:2309.17453, section 3.2) positions are those within the cache. Scores
    depend on relative distance, so cached keys are never re-rotated; for sink tokens queries are rotated to
    the last cache position (sink queries).
    """

    def __init__(
        self,
        ropes: Sequence[RopeSpec],
        width: int,
        num_positions: int,
        device: torch.device,
        dtype: torch.dtype,
        stream: Window | None,
    ) -> None:
        self._dtype, self._stream = dtype, stream
        widths = [(rope, rope.width or width) for rope in ropes]
        self._tables = [rope_table(*pair, num_positions, device) for pair in widths]
        self._axes = [rope_axes(*p).to(device) if p[0].sections else None for p in widths]
        self._frequencies = [
            (frequencies.to(device, torch.float64), factor)
            for frequencies, factor in (rope_frequencies(*p, num_positions) for p in widths)
            if stream is not None  # only then are they read, and an Apple GPU has no float64
        ]

    def of(self, positions: torch.Tensor) -> CosSin:
        """cos and sin of int64 [tokens] positions, or [3, tokens] of M-RoPE, for each RoPE."""
        if positions.dim() == 2:
            cos_sin: CosSin = []
            for (cos, sin), axes in zip(self._tables, self._axes, strict=True):
                assert axes is not None, "a RoPE of one position"
                rows = positions.index_select(0, axes).T  # each pair's position on its own axis
                cos_sin.append(self._factors(cos.gather(0, rows), sin.gather(0, rows)))
            return cos_sin
        if self._stream is None:
            return self._look_up(positions)
        # At large positions float32 cannot resolve the angles of neighbouring positions.
        angles = ((positions[:, None] * frequency, f) for frequency, f in self._frequencies)
        return [self._factors(x.cos() * factor, x.sin() * factor) for x, factor in angles]

    def cache_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Cache positions (StreamingLLM), int64 [tokens]; without `stream` the positions themselves."""
        if self._stream is None:
            return positions
        return positions.clamp(max=self._stream.num_visible - 1)

    def of_sink_queries(self, cache_positions: torch.Tensor) -> CosSin:
        has_sinks = self._stream is not None and self._stream.sinks
        return self._look_up(cache_positions) if has_sinks else []

    def _look_up(self, positions: torch.Tensor) -> CosSin:
        return [cos_sin_rows(cos, sin, positions, self._dtype) for cos, sin in self._tables]

    def _factors(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return expand_cos_sin(cos.to(self._dtype).unsqueeze(1), sin.to(self._dtype).unsqueeze(1))
