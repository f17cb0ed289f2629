"""A checkpoint seen through rotations: its tensors are turned as they are read, and its logits stay.

R1 turns the residual stream: what writes into it is multiplied from the left by the transpose, what reads it
from the right, after the weight of the norm between is folded into the readers; the output projection is no
longer the embedding. R2 turns the values of each head, and what reads them (Ashkboos et al., "QuaRot",
arXiv:2404.00456; Liu et al., "SpinQuant", arXiv:2405.16406). Outliers of single channels are spread over all.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ..model.checkpoint import Checkpoint
from .rotation_map import Head, RotationMap

if TYPE_CHECKING:
    import torch

    from .hadamard import BlockRotation


class RotatedCheckpoint(Checkpoint):
    """The rotated tensors in the dtypes of the original.

    Args:
        seed: of the rotations.
    """

    def __init__(self, plain: Checkpoint, targets: RotationMap, seed: int):
        self._plain = plain
        self.folder, self.path = plain.folder, plain.path
        self.trust_remote_code = plain.trust_remote_code
        self.config, self.shard_of = plain.config, plain.shard_of
        self.source_type, self.source_tokenizer = plain.source_type, plain.source_tokenizer
        self.notes = plain.notes
        self._targets, self._seed = targets, seed
        self._embedding: torch.Tensor | None = None
        self._head_turns: dict[tuple[int, int], torch.Tensor] = {}
        self._untied = bool(targets.hidden) and targets.tied
        if self._untied:
            self.shard_of = {**self.shard_of, targets.head: self.shard_of[targets.embedding]}
            size = self.weight_bytes - plain.weight_bytes
            self.notes += (
                f"note: R1 parts the output projection from the embedding: {size / 2**20:.0f} MiB more",
            )
        if targets.hidden:
            self.config = {**self.config, "tie_word_embeddings": False}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._plain.shape(self._origin(name))

    def dtype_name(self, name: str) -> str:
        return self._plain.dtype_name(self._origin(name))

    def companions(self) -> dict[str, bytes]:
        return self._plain.companions()

    def release(self) -> None:
        self._plain.release()
        self._embedding = None

    @property
    def weight_bytes(self) -> int:
        if not self._untied:
            return self._plain.weight_bytes
        rows, width = self.shape(self._targets.head)
        return (
            self._plain.weight_bytes
            + rows * width * self._plain.tensor(self._targets.embedding).itemsize
        )

    def tensor(self, name: str) -> torch.Tensor:
        targets = self._targets
        if name == targets.embedding and targets.hidden:  # looked up in many times
            if self._embedding is None:
                self._embedding = self._turned(name)
            return self._embedding
        return self._turned(name)

    @property
    def resident_bytes(self) -> int:
        """The turned embedding, which is in memory and not mapped."""
        if not self._targets.hidden:
            return 0
        rows, width = self.shape(self._targets.embedding)
        return rows * width * self._plain.tensor(self._targets.embedding).itemsize

    def _origin(self, name: str) -> str:
        return self._targets.embedding if self._untied and name == self._targets.head else name

    def _turned(self, name: str) -> torch.Tensor:
        import torch

        targets, stored = self._targets, self._plain.tensor(self._origin(name))
        if name in targets.norms:
            return torch.full_like(stored, 1 - targets.norms[name])
        if targets.hidden and name in (
            targets.embedding,
            targets.head,
        ):  # float copies of few rows at a time
            result = torch.empty_like(stored)
            for into, part in zip(result.split(_ROWS), stored.split(_ROWS), strict=True):
                into.copy_(self._turned_matrix(name, part))
            return result
        return self._turned_matrix(name, stored)

    def _turned_matrix(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """A tensor that is no norm on the stream, or rows of one that only reads it."""
        import torch

        targets = self._targets
        written = name in targets.writers or _weight_of(name) in targets.writers
        heads = targets.values.get(_weight_of(name)), targets.outputs.get(name)
        reads = name in targets.readers or (name == targets.embedding and targets.hidden > 0)
        if not (written or reads or any(heads)):
            return stored
        result = stored.to(torch.float64 if stored.dtype == torch.float64 else torch.float32)
        if name in targets.readers:
            norm = targets.readers[name]
            result = result * (self._plain.tensor(norm).to(result.dtype) + targets.norms[norm])
        if reads:
            result = self._stream_turn.columns(result)
        if written:
            result = self._stream_turn.rows(result)
        value, output = heads
        if value is not None:
            rows = result[value.start : value.stop].unflatten(0, (-1, value.width))
            turn = self._head_turn(value).to(result.dtype)
            turned = torch.einsum("hd...,de->he...", rows, turn).flatten(0, 1)
            result = torch.cat([result[: value.start], turned, result[value.stop :]])
        if output is not None:
            turn = self._head_turn(output).to(result.dtype)
            result = (result.unflatten(1, (-1, output.width)) @ turn).flatten(1)
        return result.to(stored.dtype).contiguous()

    @cached_property
    def _stream_turn(self) -> BlockRotation:
        """The rotation of the stream."""
        import torch

        from .hadamard import block_rotation

        loudness = torch.zeros(self._targets.hidden, dtype=torch.float64)
        for norm, offset in self._targets.norms.items():
            scales = (self._plain.tensor(norm).to(torch.float64) + offset).abs()
            loudness += (scales + _LEAST_SCALE * scales.mean()).log()
        return block_rotation(loudness, 2 * self._seed * _LAYERS)

    def _head_turn(self, head: Head) -> torch.Tensor:
        """The rotation of a layer's heads, float64; the last one is kept."""
        from .hadamard import random_rotation

        key = head.layer, head.width
        if key not in self._head_turns:
            seed = 2 * self._seed * _LAYERS + 2 * head.layer + 1
            self._head_turns = {key: random_rotation(head.width, seed)}
        return self._head_turns[key]


_LAYERS = 2**16  # more than any model has: seeds of layers do not meet
_ROWS = 4096  # of the vocabulary at a time
_LEAST_SCALE = 1e-2  # of a norm's mean: channels that it scales by less are alike


def _weight_of(name: str) -> str:
    """The weight that a bias belongs to; a weight's own name."""
    return name.removesuffix("bias") + "weight" if name.endswith(".bias") else name
