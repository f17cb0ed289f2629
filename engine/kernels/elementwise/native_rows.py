"""Row kernels on CPU: token embeddings and cos/sin (`rows.c`), argmax of logits (`argmax.c`), and
`advance_step`, the first launch of a captured decode step (`advance_step.c`)."""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from ....quant.base.build import beside, fields
from ..common.graphs import launch
from .reference import expand_cos_sin


class _EmbeddingCall(ctypes.Structure):
    """`EmbeddingCall` of `rows.c`."""

    _fields_ = fields("table ids out", "rows bytes threads")


class _CosSinCall(ctypes.Structure):
    """`CosSinCall` of `rows.c`."""

    _fields_ = fields("cos sin positions cos_out sin_out", "rows half is_bf16")


native_rows = beside(__file__, "rows.c")
"""The compiled kernels, or the reason why there are none."""


def embedding_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [vocab, width] for ids int64 [rows], as `torch.nn.functional.embedding`."""
    takes = ids.dtype is torch.int64 and ids.dim() == 1 and _on_cpu(table, ids)
    library = native_rows().library if takes else None
    if library is None:
        return functional.embedding(ids, table)
    out = table.new_empty(len(ids), table.shape[1])
    pointers = table.data_ptr(), ids.data_ptr(), out.data_ptr()
    row_bytes = table.shape[1] * table.itemsize
    call = _EmbeddingCall(*pointers, len(ids), row_bytes, torch.get_num_threads())
    launch(library.llmopt_embedding, call)
    return out


def cos_sin_rows(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the float32 tables [positions, width / 2] for positions int64 [tokens], in the layout of
    `apply_rotary_emb`: two of [tokens, 1, width] in `dtype`."""
    known = dtype in (torch.bfloat16, torch.float32)
    library = native_rows().library if known and _on_cpu(cos, sin, positions) else None
    if library is None:
        rows = (table.index_select(0, positions).to(dtype).unsqueeze(1) for table in (cos, sin))
        return expand_cos_sin(*rows)
    half = cos.shape[1]
    cos_out, sin_out = (torch.empty(len(positions), 1, 2 * half, dtype=dtype) for _ in (cos, sin))
    tensors = cos, sin, positions, cos_out, sin_out
    call = _CosSinCall(
        *(each.data_ptr() for each in tensors), len(positions), half, dtype is torch.bfloat16
    )
    launch(library.llmopt_cos_sin, call)
    return cos_out, sin_out


def _on_cpu(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take them."""
    return all(each.device.type == "cpu" and each.is_contiguous() for each in tensors)


class _ArgmaxCall(ctypes.Structure):
    """`ArgmaxCall` of `argmax.c`."""

    _fields_ = fields("logits tokens", "rows vocab threads")


native_argmax = beside(__file__, "argmax.c")
"""The compiled argmax, or the reason why there is none."""


def argmax_rows(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The index of the largest of each row, the first among equals: int64 [rows] of float32 [rows, vocab].

    It can be captured in a CPU graph, which then has the greedy tokens when its replay returns; in `out` they
    outlive the graph's other replays.
    """
    library = native_argmax().library
    if library is None or logits.dtype is not torch.float32 or not logits.is_contiguous():
        return torch.argmax(logits, dim=-1, out=out)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64) if out is None else out
    call = _ArgmaxCall(logits.data_ptr(), tokens.data_ptr(), rows, vocab, torch.get_num_threads())
    launch(library.llmopt_argmax, call)
    return tokens


class AdvanceCall(ctypes.Structure):
    """`AdvanceCall` of `advance_step.c`; `follows` is set before each replay."""

    _fields_ = fields(
        "token_ids positions slots lengths tables sampled", "rows width block_size follows"
    )


native_advance = beside(__file__, "advance_step.c")
"""The compiled kernel, or the reason why there is none."""
