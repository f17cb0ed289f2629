"""Row lookup in packed weights on CPU: ctypes bindings of `lookup.c`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from ....quant.native.build import Native, native
from ..common.launch import launch
from .native_pack import PackedWeight


@runtime_checkable
class LooksUpRows(Protocol):
    """A GEMM kernel whose packed weight is an embedding too: a tied LM head is in memory once."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        ...

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the dequantized weight, [ids, in], for ids int64 [ids]."""
        ...


class _LookupCall(ctypes.Structure):
    """`LookupCall` of `lookup.c`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("weight", "ids", "y")],
        *[(name, ctypes.c_int64) for name in ("rows", "is_bf16", "threads")],
    ]


def native_lookup() -> Native:
    """The compiled lookup, or the reason why there is none."""
    return native(Path(__file__).with_name("lookup.c"))


def lookup_rows(weight: PackedWeight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a packed weight (integer codes, or of a table), dequantized to bfloat16 or float32."""
    library = native_lookup().library
    assert library is not None
    y = torch.empty(len(ids), weight.struct.in_features, dtype=dtype)
    call = _LookupCall(
        ctypes.addressof(weight.struct),
        ids.data_ptr(),
        y.data_ptr(),
        len(ids),
        dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    launch(library.llmopt_lookup, call)
    return y
