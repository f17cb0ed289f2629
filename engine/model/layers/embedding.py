"""Embeddings: tokens by a table or a packed weight, tokens of images, and rotary cos/sin of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ....quant.families.spec_parts import RopeSpec
from ...kernels.elementwise.native_rows import cos_sin_rows, embedding_rows
from ...kernels.elementwise.reference import expand_cos_sin
from ...kernels.linear.native_linear import LooksUpRows
from ...scheduling.block_pool import Window
from .projection import Projection
from .rope import rope_axes, rope_frequencies, rope_table


class TokenEmbedding(Protocol):
    """Maps token ids to vectors.

    Attributes:
        width: elements of a vector.
        nbytes: bytes that it holds, but for a packed weight that is the LM head's too.
    """

    width: int
    nbytes: int
    device: torch.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Vectors [tokens, width] of token ids, int64 [tokens]."""
        ...

    def head(self, part: slice) -> Projection:
        """The tied LM head of a part of the vocabulary, which of a packed weight is all of it."""
        ...


class EmbeddingTable:
    """An embedding of floats [vocab, width]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.width, self.nbytes, self.device = table.shape[1], table.nbytes, table.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return embedding_rows(self._table, token_ids)

    def head(self, part: slice) -> Projection:
        return Projection([self._table[part]], None, self._table.dtype)


class PackedEmbedding:
    """The rows of a packed weight on a CPU; its vectors are in `dtype`."""

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


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedRows:
    """Embeddings of a vision tower for some tokens of a step.

    Attributes:
        rows: int64 [rows], indices of the step's tokens.
        embeddings: [rows, hidden], which replace theirs.
        deepstack: [rows, hidden] each, added to the hidden states after the layer of that index (Qwen3-VL).
    """

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

    With `stream` (StreamingLLM) positions are those within the cache, as if the sink tokens moved along with
    the window. A rotated score depends on relative distance only, so cached keys are never re-rotated: within
    the window distances are the true ones, and for the sink tokens queries are rotated to the last cache
    position (sink queries).

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
        self._tables = [
            rope_table(rope, rope.width or width, num_positions, device) for rope in ropes
        ]
        self._axes = [
            rope_axes(rope, rope.width or width).to(device) if rope.sections else None
            for rope in ropes
        ]
        self._frequencies = [
            (frequencies.to(device, torch.float64), factor)
            for frequencies, factor in (
                rope_frequencies(rope, rope.width or width, num_positions) for rope in ropes
            )
            if stream is not None  # only then are they read, and an Apple GPU has no float64
        ]

    def of(self, positions: torch.Tensor) -> CosSin:
        """cos and sin of int64 [tokens] positions, or [3, tokens] of M-RoPE, for each RoPE."""
        if positions.dim() == 2:
            return self._look_up_axes(positions)
        if self._stream is None:
            return self._look_up(positions)
        # At large positions float32 cannot resolve the angles of neighbouring positions.
        cos_sin = [
            (positions[:, None] * frequency, factor) for frequency, factor in self._frequencies
        ]
        return [self._factors(x.cos() * factor, x.sin() * factor) for x, factor in cos_sin]

    def cache_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Cache positions (StreamingLLM), int64 [tokens]; without `stream` the positions themselves."""
        return (
            positions if self._stream is None else positions.clamp(max=self._stream.num_visible - 1)
        )

    def of_sink_queries(self, cache_positions: torch.Tensor) -> CosSin:
        """cos and sin of sink queries at `cache_positions`; empty without sink tokens."""
        return (
            self._look_up(cache_positions)
            if self._stream is not None and self._stream.sinks
            else []
        )

    def _look_up(self, positions: torch.Tensor) -> CosSin:
        return [cos_sin_rows(cos, sin, positions, self._dtype) for cos, sin in self._tables]

    def _look_up_axes(self, positions: torch.Tensor) -> CosSin:
        """cos and sin of temporal, height and width positions: each pair's of its own axis."""
        cos_sin: CosSin = []
        for (cos, sin), axes in zip(self._tables, self._axes, strict=True):
            assert axes is not None, "a RoPE of one position"
            rows = positions.index_select(0, axes).T
            cos_sin.append(self._factors(cos.gather(0, rows), sin.gather(0, rows)))
        return cos_sin

    def _factors(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return expand_cos_sin(cos.to(self._dtype).unsqueeze(1), sin.to(self._dtype).unsqueeze(1))
