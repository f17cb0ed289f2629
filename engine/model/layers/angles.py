"""The angles by which a step's queries and keys turn, of every distinct rotation of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.elementwise.rotary import expand_angles
from ...scheduling.window import Window
from ..spec.rope import RopeSpec, rope_frequencies, rope_table

Angles = list[tuple[torch.Tensor, torch.Tensor]]
"""cos and sin as `apply_rotary` takes them, of each rotation."""


class StepAngles:
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

    def of(self, positions: torch.Tensor) -> Angles:
        """For int64 [tokens] positions."""
        if self._stream is None:
            return self._looked_up(positions)
        # Far out, float32 no longer tells one position's angle from the next one's.
        angles = [(positions[:, None] * turn, factor) for turn, factor in self._frequencies]
        return [self._factors(x.cos() * factor, x.sin() * factor) for x, factor in angles]

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens stand among those in sight, int64 [tokens]; their positions where sequences end."""
        return positions if self._stream is None else positions.clamp(max=self._stream.num_seen - 1)

    def of_anchors(self, places: torch.Tensor) -> Angles:
        """At which queries at `places` meet the first tokens; none where no first tokens are kept."""
        return self._looked_up(places) if self._stream is not None and self._stream.sinks else []

    def _looked_up(self, positions: torch.Tensor) -> Angles:
        return [
            self._factors(cos.index_select(0, positions), sin.index_select(0, positions))
            for cos, sin in self._tables
        ]

    def _factors(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return expand_angles(cos.to(self._dtype).unsqueeze(1), sin.to(self._dtype).unsqueeze(1))
