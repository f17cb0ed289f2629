"""Inputs of linears with the token of each row, so that two streams are compared token by token.

Behind quantized layers a router may send a token to other experts than in the float model: rows of an expert
agree neither in number nor in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class InputRows(NamedTuple):
    """Inputs of a linear from one batch.

    Attributes:
        rows: `[..., in]`.
        tokens: int64, the number in the batch of each row's token, -1: of none; None: all tokens in order.
    """

    rows: torch.Tensor
    tokens: torch.Tensor | None = None


def paired(
    inputs: InputRows, wanted: InputRows, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows of both `[pairs, in]` that are of one token; None where it is not known of which they are.

    Args:
        num_tokens: of the batch.
    """
    ours, theirs = (part.rows.reshape(-1, part.rows.shape[-1]) for part in (inputs, wanted))
    if inputs.tokens is None or wanted.tokens is None:
        # Any other number of rows is a choice of tokens that nobody tells, which may differ.
        in_order = inputs.tokens is wanted.tokens and len(ours) == len(theirs)
        return (ours, theirs) if in_order and len(ours) % num_tokens == 0 else None
    most = max(
        (int(part.max()) for part in (inputs.tokens, wanted.tokens) if len(part)), default=-1
    )
    places = torch.full((most + 2,), -1, device=theirs.device)  # the last, at -1, is of no token
    sent = wanted.tokens >= 0
    places[wanted.tokens[sent]] = sent.nonzero()[:, 0]
    found = places[inputs.tokens]
    both = found >= 0
    return ours[both], theirs[found[both]]
