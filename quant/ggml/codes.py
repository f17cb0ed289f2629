"""Codes of ggml's blocks as bytes: one pass in C where there is a compiler, torch elsewhere."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ..kinds.ggml.scheme import GGUF_BLOCKS
from ..native.build import Native, native
from .k_blocks import affine_fields, signed_fields
from .k_small_blocks import q2_fields, q3_fields
from .simple_blocks import simple_codes
from .table_blocks import table_codes

RUN = 32
LAYOUTS: dict[str, tuple[int, int]] = {
    "Q4_0": (0, 2),
    "Q4_1": (0, 4),
    "IQ4_NL": (0, 2),
    "IQ4_XS": (0, 8),
    "MXFP4": (0, 1),
    "Q5_0": (1, 6),
    "Q5_1": (1, 8),
    "Q8_0": (2, 2),
    "Q4_K": (3, 16),
    "Q5_K": (4, 48),
    "Q6_K": (5, 0),
    "Q2_K": (6, 16),
    "Q3_K": (7, 32),
}
"""The layout in `codes.h`, and the byte of a block where the low bits of its codes begin."""


class Blocks(ctypes.Structure):
    """`Blocks` of `codes.h`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("size", "runs", "layout", "at")]


class _CodesCall(ctypes.Structure):
    """`CodesCall` of `codes.c`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("data", "codes")],
        ("blocks", Blocks),
        *[(name, ctypes.c_int64) for name in ("count", "threads")],
        ("next", ctypes.c_long),
    ]


def blocks_of(kind: str) -> Blocks:
    """How the C kernels read the codes of a type's blocks."""
    width, size = GGUF_BLOCKS[kind]
    return Blocks(size, width // RUN, *LAYOUTS[kind])


def native_codes() -> Native:
    """The compiled unpacking, or the reason why there is none."""
    return native(Path(__file__).with_suffix(".c"))


def block_codes(data: torch.Tensor, kind: str) -> torch.Tensor:
    """The codes of blocks `[n, bytes]` of a type, uint8 `[n, width]`; signed ones (Q8_0) plus 128."""
    library = native_codes().library if data.device.type == "cpu" else None
    if library is None:
        return block_codes_torch(data, kind)
    data = data.contiguous()
    blocks, count = blocks_of(kind), len(data)
    codes = torch.empty(count, blocks.runs * RUN, dtype=torch.uint8)
    pointers = data.data_ptr(), codes.data_ptr()
    call = _CodesCall(*pointers, blocks, count, torch.get_num_threads())
    library.llmopt_codes(ctypes.byref(call))
    return codes


def block_codes_torch(data: torch.Tensor, kind: str) -> torch.Tensor:
    """The same in torch, on any device."""
    if kind == "Q8_0":
        return data[:, 2:] ^ 128
    if kind in ("IQ4_NL", "IQ4_XS", "MXFP4"):
        return table_codes(data, LAYOUTS[kind][1])
    if not kind.endswith("_K"):
        return simple_codes(data, kind)
    fields = {"Q2_K": q2_fields, "Q3_K": q3_fields, "Q6_K": signed_fields}
    codes = fields[kind](data)[0] if kind in fields else affine_fields(data, int(kind[1]))[0]
    return codes.flatten(1)
