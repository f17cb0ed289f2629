"""PTX for packed 4-bit codes: two 16-bit values of a register at once, which Triton has no operation for.

The texts are for `tl.inline_asm_elementwise` with two elements a call (`pack=2`). Triton's interpreter has no
assembler: there the same values come from plain operations, and a test runs these texts in Python instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
from triton import knobs

HAS_PTX = not knobs.runtime.interpret and torch.version.hip is None
"""Whether kernels are compiled, for a GPU that takes PTX, and not interpreted."""

LOOKUP_REGISTERS = ",".join(["=r"] * 8 + ["r"] * 2)
"""Constraints of `lookup_ptx`."""


@triton.constexpr_function
def nibble_ptx(piece: int, magic: int) -> str:
    """`$0`: the 4-bit codes at bit `4 * piece` of either half of `$1`, or'ed into `magic`."""
    taken = f"lop3.b32 $0, t, 0x000F000F, {magic:#010x}, 0xEA;"  # (t & mask) | magic
    return f"{{ .reg .b32 t; shr.u32 t, $1, {4 * piece}; {taken} }}"


@cache
def lookup_ptx(entries: Sequence[int]) -> str:
    """Table lookup in registers by byte permutes (PRMT): `$8` and `$9` are words of eight 4-bit codes each.

    `$0` to `$3` are the entries of the codes at bits 0, 4, 8 and 12 of both words, `$4` to `$7` of those
    at bits 16 to 28: the first word's in the lower half. A permute's selector is four codes as they lie, and
    it selects among eight bytes; so low and high bytes come from four registers each, and a third permute
    takes those of the half of the table that a code's highest bit names.

    Args:
        entries: the bits of the 16 entries, 16 each.
    """
    lows, highs = _pools([entry & 255 for entry in entries]), _pools([e >> 8 for e in entries])
    lines = [
        ".reg .b32 t, e, o, s, m, l, h, u;",
        # Codes of both words side by side: those at even places in e, at odd ones in o.
        "shl.b32 t, $9, 4;",
        "lop3.b32 e, $8, t, 0x0F0F0F0F, 0xE4;",  # where the mask is set the first, else the second
        "shr.u32 t, $8, 4;",
        "lop3.b32 o, t, $9, 0x0F0F0F0F, 0xE4;",
    ]
    for first, codes in enumerate("eo"):
        lines += [
            f"and.b32 s, {codes}, 0x77777777;",
            f"shr.u32 t, {codes}, 1;",
            "lop3.b32 m, t, 0x44444444, 0x32103210, 0xEA;",
        ]
        for out in (first, first + 4):
            lines += [*_bytes("l", lows), *_bytes("h", highs)]
            lines += [f"prmt.b32 ${out}, l, h, 0x5140;", f"prmt.b32 ${out + 2}, l, h, 0x7362;"]
            if out < 4:
                lines += ["shr.u32 s, s, 16;", "shr.u32 m, m, 16;"]
    return "{ " + " ".join(lines) + " }"


def _pools(values: Sequence[int]) -> list[str]:
    """Sixteen bytes as four registers."""
    words = (values[at : at + 4] for at in range(0, 16, 4))
    return [f"{int.from_bytes(bytes(word), 'little'):#010x}" for word in words]


def _bytes(name: str, pools: Sequence[str]) -> list[str]:
    """Four bytes by the selectors s, of the half of the table by m."""
    lines = [f"prmt.b32 {name}, {pools[0]}, {pools[1]}, s;"]
    if pools[2:] != pools[:2]:
        lines.append(f"prmt.b32 u, {pools[2]}, {pools[3]}, s;")
        lines.append(f"prmt.b32 {name}, {name}, u, m;")
    return lines
