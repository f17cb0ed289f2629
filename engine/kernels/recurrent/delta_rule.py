"""Gated delta rule: linear attention that corrects what its state already predicts of a value.

For each head, with the state S [key_dim, value_dim], a decay g and a rate b of each token:

    S = exp(g) * S;    S = S + k outer (b * (v - k @ S));    out = q @ S

A step does that for one token of many sequences. A run of tokens of one sequence is computed in chunks: in a
chunk the corrections solve a triangular system, so that only the chunks follow one another. All is float32.

Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), section 3; the chunks are those of
"Parallelizing Linear Transformers with the Delta Rule" (arXiv:2406.06484).
"""

from __future__ import annotations

import torch

from .chunks import decay_between, in_chunks, of_chunks


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens of one sequence, chunk by chunk.

    Args:
        query, key: [tokens, heads, key_dim].
        value: [tokens, heads, value_dim].
        log_decay, rate: [tokens, heads]; g, at most 0, and b.
        state: [heads, key_dim, value_dim].

    Returns:
        [tokens, heads, value_dim], and the state after the tokens.
    """
    num_tokens = len(query)
    rows = [in_chunks(x) for x in (query, key, value, log_decay[..., None], rate[..., None])]
    query, key, value, log_decay, rate = rows  # [chunks, heads, size, …]
    decay = log_decay.squeeze(-1).cumsum(dim=-1)
    between = decay_between(decay)
    corrected = key * rate
    system = corrected @ key.transpose(-1, -2) * between
    sides = torch.cat([value * rate, corrected * decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    inside = query @ key.transpose(-1, -2) * between
    read = query * decay.exp()[..., None]
    written = (key * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2)
    kept = decay[..., -1:, None].exp()
    outputs = []
    for chunk in range(len(query)):
        new = values[chunk] - keys[chunk] @ state
        outputs.append(read[chunk] @ state + inside[chunk] @ new)
        state = state * kept[chunk] + written[chunk] @ new
    return of_chunks(outputs, num_tokens), state


def delta_rule_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each sequence: as `delta_rule`, with sequences in place of tokens, and a state of
    each, [sequences, heads, key_dim, value_dim]."""
    states = states * log_decay.exp()[..., None, None]
    predicted = (key[..., None] * states).sum(dim=-2)
    correction = (value - predicted) * rate[..., None]
    states = states + key[..., None] * correction[..., None, :]
    return (query[..., None] * states).sum(dim=-2), states
