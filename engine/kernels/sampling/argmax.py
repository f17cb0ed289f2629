"""Argmax of logits on CPU: ctypes bindings of `argmax.c`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ....quant.native.build import Native, native
from ..common.launch import launch


class _ArgmaxCall(ctypes.Structure):
    """`ArgmaxCall` of `argmax.c`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("logits", "tokens")],
        *[(name, ctypes.c_int64) for name in ("rows", "vocab", "threads")],
    ]


def native_argmax() -> Native:
    """The compiled argmax, or the reason why there is none."""
    return native(Path(__file__).with_name("argmax.c"))


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
