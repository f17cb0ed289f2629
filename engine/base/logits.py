"""Logits processors and token masks (guided decoding): pure functions of the tokens so far.

So every schedule is correct: recomputed sequences get the same, and rejected drafts leave nothing to undo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ...base.errors import BadInput
from .device import to_device

LogitsProcessor = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""(tokens so far, prompt first; float32 logits [vocab], to change in place or not) → logits; pure."""


class TokenMask(Protocol):
    """Allowed next tokens: the interface of guided decoding."""

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor | None:
        """The tokens allowed after `prompt` and `output`; None: all. It must be pure, and is called again.

        A boolean mask [vocab], or a packed one, int32 [ceil(vocab / 32)] (the layout of xgrammar and
        llguidance). Tokens beyond a shorter mask are not allowed. If it allows none, the sequence can only
        end."""


def dense_mask(mask: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor:
    """A token mask, packed or boolean, as booleans [vocab]. BadInput: it is neither, or too long."""
    _check_mask(mask, vocab_size)
    if mask.dtype is torch.int32:
        # Several times faster than shifting words in torch.
        octets = mask.cpu().numpy().astype("<i4", copy=False).view(np.uint8)
        bits = np.unpackbits(octets, count=min(vocab_size, 8 * len(octets)), bitorder="little")
        mask = torch.from_numpy(bits.view(np.bool_))
    if mask.device.type == "cpu":
        mask = to_device(mask.numpy(), device)
    missing = vocab_size - len(mask)
    return torch.nn.functional.pad(mask, (0, missing)) if missing else mask


def packed_mask(mask: torch.Tensor, vocab_size: int) -> np.ndarray:
    """A token mask, packed or boolean, as int32 [ceil(vocab / 32)] on the host; raises as `dense_mask`."""
    _check_mask(mask, vocab_size)
    packed = np.zeros(-(-vocab_size // 32), dtype="<i4")
    values = mask.cpu().numpy()
    if mask.dtype is torch.int32:
        packed[: len(values)] = values
    else:
        octets = np.packbits(values, bitorder="little")
        packed.view(np.uint8)[: len(octets)] = octets
    return packed


def _check_mask(mask: torch.Tensor, vocab_size: int) -> None:
    if mask.dim() != 1 or mask.dtype not in (torch.bool, torch.int32):
        raise BadInput(
            f"a token mask is {mask.dtype} with shape {list(mask.shape)}: need booleans [vocab] or int32 "
            "[vocab / 32]"
        )
    num_words = -(-vocab_size // 32)
    if mask.dtype is torch.int32 and len(mask) > num_words:
        raise BadInput(f"a packed token mask has {len(mask)} words: the vocabulary has {num_words}")
    if mask.dtype is torch.bool and len(mask) > vocab_size:
        raise BadInput(f"a token mask has {len(mask)} tokens: the vocabulary has {vocab_size}")
