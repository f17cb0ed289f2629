"""`Qidxs` of QuIP-for-all: codes of 8 weights in int16 words, or with a residual in 3 or 4 bytes of words.

Bytes are little-endian: the residual first, 8 or 16 bits, then E8P's code. Those of 3 bits cross words, so
that a row's inputs are a multiple of 32.
"""

from __future__ import annotations

import torch

from .codebook import DIM

MULTIPLE = 32
"""Of a weight's inputs."""
_RESIDUAL_BYTES = {2: 0, 3: 1, 4: 2}


def pack_codes(codes: torch.Tensor, residual: torch.Tensor | None, bits: int) -> torch.Tensor:
    """`Qidxs`: int16 `[out, in / 8]` for 2 bits, else int32 `[out, in * bits / 32]`.

    Args:
        codes: int16 `[out, in / 8]`.
        residual: uint8 or int16 `[out, in / 8]`.
    """
    if residual is None:
        return codes
    both = [_bytes(residual.contiguous()), _bytes(codes.contiguous())]
    return torch.cat(both, dim=2).flatten(1).view(torch.int32)


def unpack_codes(words: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Inverse of `pack_codes`: codes, and their residual."""
    if bits == 2:
        return words, None
    stored = words.contiguous().view(torch.uint8).unflatten(1, (-1, bits))
    residual, codes = stored.split([_RESIDUAL_BYTES[bits], 2], dim=2)
    residual = residual.contiguous().flatten(1)
    if bits == 4:
        residual = residual.view(torch.int16)
    return codes.contiguous().flatten(1).view(torch.int16), residual


def words_of(in_features: int, bits: int) -> int:
    """The length of a row of `Qidxs`."""
    return in_features // DIM if bits == 2 else in_features * bits // 32


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """The bytes of codes `[out, n]`: uint8 `[out, n, bytes]`."""
    return codes.view(torch.uint8).unflatten(1, (codes.shape[1], -1))
