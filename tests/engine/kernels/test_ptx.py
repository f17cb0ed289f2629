"""PTX of packed codes, run in Python: Triton's interpreter has no assembler, and CI no GPU."""

from __future__ import annotations

import random
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux alone")

from llmopt.engine.kernels.linear.triton_dequantize import LOOKUP_REGISTERS, lookup_ptx, nibble_ptx
from llmopt.quant.kinds.codebook.kind import codebook
from llmopt.quant.kinds.ggml.small_blocks import MXFP4_VALUES

WORD = 0xFFFFFFFF


def prmt(low: int, high: int, selector: int) -> int:
    """PRMT in its default mode (PTX ISA, 9.7.9.7): a selector's bit 3 would replicate a sign."""
    pool = (low | high << 32).to_bytes(8, "little")
    taken = [selector >> 4 * place & 15 for place in range(4)]
    assert max(taken) < 8
    return int.from_bytes(bytes(pool[at] for at in taken), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    """LOP3 (PTX ISA, 9.7.7.6): bit by bit, the place in `table` that the three bits name."""
    bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32))
    return sum((table >> bit & 1) << i for i, bit in enumerate(bits))


OPERATIONS = {
    "prmt": prmt,
    "lop3": lop3,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b & WORD,
    "and": lambda a, b: a & b,
}


def run(text: str, registers: dict[str, int]) -> dict[str, int]:
    """The registers after a PTX text of these operations."""
    known = dict(registers)
    for line in text.strip("{} ").split(";"):
        if not (line := line.strip()) or line.startswith(".reg"):
            continue
        operation, operands = line.split(" ", 1)
        to, *given = (word.strip() for word in operands.split(","))
        values = [known[word] if word in known else int(word, 0) for word in given]
        known[to] = OPERATIONS[re.split(r"\.", operation)[0]](*values)
    return known


def words(seed: int) -> list[int]:
    """Words of eight codes, all codes at every place of both."""
    codes = random.Random(seed)
    return [0x01234567, 0x89ABCDEF, 0, WORD, *(codes.getrandbits(32) for _ in range(16))]


@pytest.mark.parametrize("magic", [0x43004300, 0x64006400])
def test_nibbles_lie_in_the_mantissas_of_magic(magic: int) -> None:
    for word in words(0):
        for piece in range(4):
            text = str(nibble_ptx(piece, magic))
            taken = run(text, {"$1": word})["$0"]
            codes = (word >> 4 * piece & 15) | (word >> 4 * piece + 16 & 15) << 16
            assert taken == codes | magic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [codebook("nf4"), codebook("fp4"), torch.tensor(MXFP4_VALUES)])
def test_table_lookups_are_the_entries_of_all_codes(
    values: torch.Tensor, dtype: torch.dtype
) -> None:
    """Of NF4, whose halves differ in all bytes, and of tables whose negative half shares the low ones."""
    entries = tuple(bits & 0xFFFF for bits in values.to(dtype).view(torch.int16).tolist())
    text = lookup_ptx(entries)
    assert LOOKUP_REGISTERS.count("r") == len(set(re.findall(r"\$\d+", text))) == 10
    pairs = list(zip(words(1), reversed(words(1)), strict=True))
    for first, second in pairs:
        after = run(text, {"$8": first, "$9": second})
        for place in range(8):
            low, high = (entries[word >> 4 * place & 15] for word in (first, second))
            assert after[f"${place}"] == low | high << 16, f"code {place}"
