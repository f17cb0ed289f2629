"""Dispatch of the fused kernels of multi-head latent attention; without one, attention composes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..attention.paged_tensor import PagedTensor
from ..common.dispatch import Candidate, Operation
from ..common.runtime import refuses_rows
from .dispatch import RowKernelQuery


class LatentKernel(Protocol):
    """Fused norms, RoPE and cache write of latents, and assembly of their queries."""

    def write(
        self,
        latent: torch.Tensor,
        latent_norm: tuple[torch.Tensor, float],
        queries: torch.Tensor | None,
        query_norm: tuple[torch.Tensor, float] | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        interleaved: bool,
        keys: PagedTensor,
        slots: torch.Tensor,
    ) -> torch.Tensor | None:
        """Norm and rotate `latent` [tokens, rank + rope] and write it to its slots; returns the normed
        `queries` [tokens, query_rank], if any. A norm is its weight and epsilon."""
        ...

    def queries(
        self,
        absorbed: torch.Tensor,
        rope_queries: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        interleaved: bool,
    ) -> torch.Tensor:
        """`absorbed` [heads, tokens, rank] beside the rotated `rope_queries` [tokens, heads, rope], as
        [tokens, heads, rank + rope]."""
        ...


def _refuses_triton(kernel_query: RowKernelQuery) -> str | None:
    return refuses_rows(kernel_query.device, kernel_query.dtype)


def _triton() -> LatentKernel:
    from .triton_latent import TritonLatent

    return TritonLatent()


LATENT: Operation[RowKernelQuery, Callable[[], LatentKernel | None]] = Operation(
    "latent attention's rotation and cache write",
    [
        Candidate("triton", _refuses_triton, _triton),
        Candidate("composed", lambda kernel_query: None, lambda: None),
    ],
)
