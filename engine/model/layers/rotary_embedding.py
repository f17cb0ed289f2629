"""The angles by which a step's queries and keys turn, of every distinct rotation of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.elementwise.rotary import expand_cos_sin
from ...scheduling.window import Window
from ..spec.rope import RopeSpec, rope_frequencies, rope_table

CosSin = list[tuple[torch.Tensor, torch.Tensor]]
"""cos and sin as `apply_rotary_emb` takes them, of each rotation."""


class RotaryEmbedding:
    """Angles of positions: from tables, or where sequences have no end from the positions themselves.

    In an endless sequence (`stream`) positions count within what is in sight, as if the first tokens had
    moved along with the window. A rotated score depends on the distance alone, so keys stay as they were
    cached: inside the window distances are the true ones, and the first tokens are met by queries that
    stand at the last place in sight.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453),
    section 3.2.
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
        self._dtype = dtype
        self._stream = stream
        self._tables = [rope_table(rope, width, num_positions, device) for rope in ropes]
        self._frequencies = [
            (frequencies.to(device, torch.float64), factor)
            for frequencies, factor in (
                rope_frequencies(rope, width, num_positions) for rope in ropes
            )
        ]

    def of(self, positions: torch.Tensor) -> CosSin:
        """For int64 [tokens] positions."""
        if self._stream is None:
            return self._look_up(positions)
        # Far out, float32 no longer tells one position's angle from the next one's.
        cos_sin = [
            (positions[:, None] * frequency, factor) for frequency, factor in self._frequencies
        ]
        return [self._factors(x.cos() * factor, x.sin() * factor) for x, factor in cos_sin]

    def cache_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens stand among those in sight, int64 [tokens]; their positions where sequences end."""
        return (
            positions if self._stream is None else positions.clamp(max=self._stream.num_visible - 1)
        )

    def of_sink_queries(self, cache_positions: torch.Tensor) -> CosSin:
        """At which queries at `cache_positions` meet the first tokens; none where no first tokens are kept."""
        return (
            self._look_up(cache_positions)
            if self._stream is not None and self._stream.sinks
            else []
        )

    def _look_up(self, positions: torch.Tensor) -> CosSin:
        return [
            self._factors(cos.index_select(0, positions), sin.index_select(0, positions))
            for cos, sin in self._tables
        ]

    def _factors(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return expand_cos_sin(cos.to(self._dtype).unsqueeze(1), sin.to(self._dtype).unsqueeze(1))
