"""State space scan of Mamba 2: a state that decays and adds each token's outer product.

For each head, with the state S [head_dim, state_size] and a step length d of each token:

    S = exp(d * rate) * S + (d * x) outer B;    out = S @ C

B and C are shared by the heads of a group. A step does that for one token of many sequences. A run of tokens
of one sequence is computed in chunks: within a chunk it is masked attention of C to B (state space duality),
and only the chunks follow one another. All is float32.

Source: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 6.
"""

from __future__ import annotations

import torch

from .chunks import decay_between, in_chunks, of_chunks


def ssd_scan(
    x: torch.Tensor,
    length: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    state: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens of one sequence, chunk by chunk.

    Args:
        x: [tokens, heads, head_dim].
        length: [tokens, heads], the step lengths d.
        into, out_of: [tokens, groups, state_size], B and C.
        state: [heads, head_dim, state_size].
        rate: [heads], below 0.

    Returns:
        [tokens, heads, head_dim], and the state after the tokens.
    """
    num_tokens, shared = len(x), x.shape[1] // into.shape[1]
    x = in_chunks(x * length[..., None])  # [chunks, heads, size, …], as are all below
    decay = in_chunks((length * rate)[..., None]).squeeze(-1).cumsum(dim=-1)
    into, out_of = in_chunks(into), in_chunks(out_of)
    scores = (out_of @ into.transpose(-1, -2)).repeat_interleave(shared, dim=1)
    inside = scores * decay_between(decay) @ x
    into = into.repeat_interleave(shared, dim=1) * (decay[..., -1:] - decay).exp()[..., None]
    added = x.transpose(-1, -2) @ into
    out_of = out_of.repeat_interleave(shared, dim=1) * decay.exp()[..., None]
    kept = decay[..., -1:, None].exp()
    outputs = []
    for chunk in range(len(x)):
        outputs.append(inside[chunk] + out_of[chunk] @ state.transpose(-1, -2))
        state = state * kept[chunk] + added[chunk]
    return of_chunks(outputs, num_tokens), state


def ssd_step(
    x: torch.Tensor,
    length: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    states: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each sequence: as `ssd_scan`, with sequences in place of tokens, and a state of
    each, [sequences, heads, head_dim, state_size]."""
    shared = x.shape[1] // into.shape[1]
    into, out_of = (part.repeat_interleave(shared, dim=1) for part in (into, out_of))
    kept = (length * rate).exp()[..., None, None]
    states = states * kept + (x * length[..., None])[..., None] * into[..., None, :]
    return (states * out_of[..., None, :]).sum(dim=-1), states
