"""Dispatch of paged attention: the first kernel that supports a query, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch

from ..common.dispatch import Candidate, Operation
from ..common.runtime import refuses_rows
from ..common.verdicts import Trial
from .flash_attention import attend_flash, refuses_flash_attention
from .flashinfer import attend_flashinfer, refuses_flashinfer
from .native_attention import HEAD_CHANNELS, attend_native, native_attention
from .paged_attention import AttentionBatch, AttentionKernel, AttentionRule, attend_sdpa
from .paged_tensor import LARGEST_CODE, PagedTensor
from .trial import attention_trial

Mask = Literal["causal", "tree", "image"]
MASKS: tuple[Mask, ...] = get_args(Mask)


@dataclass(frozen=True, slots=True)
class AttentionKernelQuery:
    """Kernel query of paged attention: device, dtype, head sizes, masks.

    Attributes:
        dtype: of the queries.
        key_dim, value_dim: elements of a head.
        mask: "causal"; "tree": draft tokens form token trees; "image": images see all of themselves, and the
            batch may have trees too.
        stored: of keys and values in the cache; None: as the queries.
    """

    device: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    mask: Mask = "causal"
    stored: torch.dtype | None = None

    def __str__(self) -> str:
        same = self.key_dim == self.value_dim
        heads = f"{self.key_dim}" if same else f"{self.key_dim} and {self.value_dim}"
        mask = {"causal": "", "tree": ", token trees", "image": ", images"}[self.mask]
        stored = "" if self.stored in (None, self.dtype) else f", cached in {self.stored}"
        return f"heads of {heads} in {self.dtype} on {self.device}{stored}{mask}"


_ONLY_CAUSAL = "it does not support tree attention, nor bidirectional attention within an image"


def _refuses_native(kernel_query: AttentionKernelQuery) -> str | None:
    if kernel_query.device != "cpu":
        return "it is a CPU kernel"
    if (reason := native_attention().reason) is not None:
        return reason
    if kernel_query.dtype not in (torch.bfloat16, torch.float32):
        return f"it takes bfloat16 and float32, not {kernel_query.dtype}"
    if kernel_query.key_dim % HEAD_CHANNELS or kernel_query.value_dim % HEAD_CHANNELS:
        return f"it is for heads of multiples of {HEAD_CHANNELS}"
    if kernel_query.mask == "image":
        return "it does not support bidirectional attention within an image"
    return None


def _refuses_triton(kernel_query: AttentionKernelQuery) -> str | None:
    if kernel_query.mask != "causal":
        return _ONLY_CAUSAL
    return refuses_rows(kernel_query.device, kernel_query.dtype)


def _attend_triton(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
    sink_queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_triton`; Triton is imported by the first call."""
    from .triton_attention import attend_triton

    return attend_triton(queries, keys, values, batch, rule, sink_queries)


def _trial(kernel_query: AttentionKernelQuery) -> Trial[AttentionKernel] | None:
    if kernel_query.mask != "causal":
        return None
    query, device = kernel_query, torch.device(kernel_query.device)
    return attention_trial(device, query.dtype, query.key_dim, query.value_dim, query.stored)


Refusal = Callable[[str, torch.dtype, int, int], str | None]
"""From device, dtype, and elements of keys and values."""


def _refuses_library(refuses: Refusal, kernel_query: AttentionKernelQuery) -> str | None:
    """Why a kernel of another library does not serve a query; what `refuses` says is its own."""
    if kernel_query.mask != "causal":
        return _ONLY_CAUSAL
    if (reason := refuses_rows(kernel_query.device, kernel_query.dtype)) is not None:
        return reason  # our kernel serves what it does not
    if kernel_query.stored in LARGEST_CODE:
        return "it does not support 8-bit caches with a scale for each token and head"
    query = kernel_query
    return refuses(query.device, query.dtype, query.key_dim, query.value_dim)


_attend_flash = attend_flash(_attend_triton)
_attend_flashinfer = attend_flashinfer(_attend_triton)

PAGED_ATTENTION: Operation[AttentionKernelQuery, AttentionKernel] = Operation(
    "paged attention",
    [
        Candidate(
            "flash-attention-3", partial(_refuses_library, refuses_flash_attention), _attend_flash
        ),
        Candidate("flashinfer", partial(_refuses_library, refuses_flashinfer), _attend_flashinfer),
        Candidate("triton-paged", _refuses_triton, _attend_triton),
        Candidate("native-paged", _refuses_native, attend_native),
        Candidate("torch-sdpa", lambda kernel_query: None, attend_sdpa),
    ],
    _trial,
)


class AttentionKernels(NamedTuple):
    """The kernels for a decoder's heads: of causal attention, of token trees, and of images."""

    causal: AttentionKernel
    trees: AttentionKernel
    images: AttentionKernel

    def of(self, batch: AttentionBatch) -> AttentionKernel:
        """The kernel of a step."""
        if batch.has_images:
            return self._attend_images
        return self.trees if batch.has_trees else self.causal

    def _attend_images(
        self,
        queries: torch.Tensor,
        keys: PagedTensor,
        values: PagedTensor,
        batch: AttentionBatch,
        rule: AttentionRule,
        sink_queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bidirectional attention of the sequences with images; the others' results do not depend on an
        image in the batch."""
        plain = self.trees if batch.has_trees else self.causal
        if not rule.bidirectional:
            return plain(queries, keys, values, batch, rule, sink_queries)
        images, others = batch.parts
        masked = self.images(queries, keys, values, images, rule, sink_queries)
        if not others.spans and others.decode is None:
            return masked
        out = plain(queries, keys, values, others, rule, sink_queries)
        for span in images.spans:
            out[span.begin : span.end] = masked[span.begin : span.end]
        return out


def attention_kernels(
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    stored: torch.dtype | None = None,
) -> AttentionKernels:
    """The kernels for a decoder's heads; keys and values are `stored` in that dtype, or in the queries'."""

    def choose(mask: Mask) -> AttentionKernel:
        shape = key_dim, value_dim
        kernel_query = AttentionKernelQuery(device.type, dtype, *shape, mask, stored)
        return PAGED_ATTENTION.select(kernel_query).run

    return AttentionKernels(*map(choose, MASKS))


def takes_static_metadata(kernel: AttentionKernel) -> bool:
    """Whether a kernel reads all of a step from tensors: a captured launch serves others of its size."""
    return kernel in (_attend_triton, _attend_flash, _attend_flashinfer)


def reads_in_place(kernel: AttentionKernel) -> bool:
    """Whether a kernel reads KV blocks in place, whatever the block table's width (no gather)."""
    return kernel in (attend_native, _attend_triton, _attend_flash, _attend_flashinfer)
