"""Compile every Triton kernel for every GPU architecture, without a GPU: `python -m tools.gpu_matrix`.

Each variant must fit the shared memory of that architecture's cards, and use its tensor cores where it
multiplies matrices. Decode kernels, which stream memory, must not spill, and have at least two buffers of a
tile that they stream: the next one is on its way while one is multiplied; prompts have a loop without masks,
and do not spill on 8-bit caches and latents (64 rows of these: in the loop). Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from llmopt.engine.kernels.common import devices
from llmopt.engine.kernels.common.devices import GpuLimits

from tests.support.pretended_cuda.tensors import scaled_mm
from tools.triton_code import Compiled, compiling
from tools.triton_launches import LAUNCHES

KIB = 1024
TENSOR_MEMORY = 512
"""Columns of a multiprocessor of capability 10.0 (PTX ISA, 9.7.16); a kernel of more becomes a trap."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the multiprocessor of an architecture holds (CUDA C++ Programming Guide, technical
    specifications per compute capability)."""

    limits: GpuLimits
    shared: int
    threads: int

    def programs(self, kernel: Compiled) -> int:
        """Programs of a kernel that a multiprocessor holds at once (occupancy)."""
        threads = 32 * kernel.warps
        by_registers = 65536 // (-(-kernel.registers // 8) * 8 * threads)
        by_shared = self.shared // (kernel.shared + KIB)
        by_tensor_memory = TENSOR_MEMORY // max(1, kernel.tensor_memory)
        return min(by_registers, by_shared, by_tensor_memory, self.threads // threads)


ARCHITECTURES = {
    80: Architecture(GpuLimits(80, 108, 163 * KIB), 164 * KIB, 2048),
    86: Architecture(GpuLimits(86, 82, 99 * KIB), 100 * KIB, 1536),
    89: Architecture(GpuLimits(89, 128, 99 * KIB), 100 * KIB, 1536),
    90: Architecture(GpuLimits(90, 132, 227 * KIB, True), 228 * KIB, 2048),
    100: Architecture(GpuLimits(100, 148, 227 * KIB, True), 228 * KIB, 2048),
    120: Architecture(GpuLimits(120, 170, 99 * KIB, True), 100 * KIB, 1536),
}
"""By capability: A100, RTX 3090, RTX 4090, H100, B200, RTX 5090."""

FEW_TOKENS = 64
"""Rows of the tiles whose tokens have the same sums in any batch."""
WIDE = 512
"""Elements of a key beyond which it is a latent of MLA."""
FEW_ROWS = 16
"""Rows of the tiles of decode: fewer do not fill a tensor core's instruction."""

SMOKE = (
    "attention, 32 heads of 128 on 8",
    "  int8 cache",
    "attention, 16 heads on a latent of 576",
    "4-bit weights, symmetric",
    "  and its inputs",
    "experts",
    "sampling",
    "recurrent steps",
    "between the linears",
    "search of 2 bits",
)
"""Launches that CI compiles: attention of decode and prefill, on 8 bits and latents too, GEMMs of 4 bits,
e4m3 and experts, sampling, recurrent steps, what lies between linears, a search of trellis codes."""


GEMMS = ("_gemm", "_code_gemm")
"""Kernels that multiply with a weight which they decode."""


def is_float32(kernel: Compiled) -> bool:
    """Whether a kernel multiplies in float32, which no tensor core does."""
    return kernel.variant.get("PRECISION") == "ieee"


def is_decode(kernel: Compiled) -> bool:
    """Whether a kernel streams weights or a cache for few tokens."""
    if kernel.name == "attend":
        return bool(kernel.variant.get("IN_PARTS"))
    return kernel.name in GEMMS and kernel.variant["ROWS"] <= FEW_ROWS


def is_full(kernel: Compiled) -> bool:
    """Whether sums of 64 rows of latents fill the registers: what waits for the loop then lies in memory."""
    variant = kernel.variant
    return kernel.name == "attend" and variant["KEY_DIM"] > WIDE and variant["ROWS"] > FEW_ROWS


def may_spill(kernel: Compiled) -> bool:
    """Whether registers may overflow: not in decode, on an 8-bit cache, with latents, or in a search."""
    if kernel.name == "attend":
        variant = kernel.variant
        is_careful = variant["HAS_SCALES"] or variant["KEY_DIM"] > WIDE
        return not (is_decode(kernel) or is_careful)
    return not is_decode(kernel) and kernel.name != "_nearest_states"


def faults(kernel: Compiled, architecture: Architecture) -> Iterator[str]:
    """What a kernel must not do on an architecture, and does."""
    if kernel.error:
        yield kernel.error
        return
    if kernel.shared > (limit := architecture.limits.shared_bytes):
        yield f"{kernel.shared} bytes of shared memory, of {limit}"
    if kernel.tensor_memory > TENSOR_MEMORY:
        yield f"{kernel.tensor_memory} columns of tensor memory, of {TENSOR_MEMORY}"
    if (
        kernel.name in ("attend", "_transform", *GEMMS)
        and not kernel.matrix
        and not is_float32(kernel)
    ):
        yield "no tensor-core instruction"
    if not may_spill(kernel) and (kernel.loop_spills if is_full(kernel) else kernel.stack):
        yield f"{kernel.stack} bytes spilled"
    if is_decode(kernel):
        if kernel.pipeline.depth < 2:
            yield f"{kernel.pipeline.depth} buffers of a tile"
        elif 0 in kernel.pipeline.waits:
            yield "a wait for every copy"


def invariance(kernels: Sequence[Compiled]) -> dict[int, str]:
    """Faults of a launch's decode-sized GEMMs, by place: a token's sums follow the matrix instruction, and
    must not depend on the rows that share its tile."""
    first: dict[str, tuple[str, ...]] = {}
    found: dict[int, str] = {}
    for place, kernel in enumerate(kernels):
        if kernel.name in GEMMS and not kernel.error and kernel.variant["ROWS"] <= FEW_TOKENS:
            kind = str((kernel.name, {**kernel.variant, "ROWS": 0}))
            if first.setdefault(kind, kernel.matrix) != kernel.matrix:
                found[place] = f"other matrix instructions than {first[kind]} of fewer rows"
    return found


def rows(
    capability: int, only: str = "", keep: Path | None = None, names: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Compile the launches for a capability, or those of `names`: a row for each kernel."""
    architecture = ARCHITECTURES[capability]
    for name, launch in LAUNCHES.items():
        if only not in name or (names and name not in names):
            continue
        folder = None if keep is None else keep / str(capability) / name.strip().replace(" ", "-")
        pretended = patch.object(devices, "PRETENDED", architecture.limits)
        # Torch 2.11 has this product on a GPU alone.
        product = patch.object(torch.ops.aten, "_scaled_mm", scaled_mm)
        with pretended, product, compiling(capability, folder) as kernels:
            launch()
        differing = invariance(kernels)
        for place, kernel in enumerate(kernels):
            occupancy = 0 if kernel.error else architecture.programs(kernel)
            said = [*faults(kernel, architecture), *filter(None, [differing.get(place)])]
            yield {
                "launch": name.strip(),
                "capability": capability,
                **asdict(kernel),
                "pipeline": {**asdict(kernel.pipeline), "depth": kernel.pipeline.depth},
                "programs": occupancy,
                "faults": said,
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="*", choices=list(ARCHITECTURES))
    parser.add_argument("--only", default="", help="launches whose names contain this")
    parser.add_argument("--smoke", action="store_true", help="the few launches that CI compiles")
    parser.add_argument("--out", type=Path, help="JSON file for all that was read")
    parser.add_argument("--keep", type=Path, help="folder for the kernels' TTGIR")
    given = parser.parse_args()
    header = ("kernel", "registers", "spilled", "shared", "an SM", "buffers", "trips", "waited")
    print(f"{'':4}{'':38}" + "".join(f"{word:>10}" for word in header))
    table: list[dict[str, Any]] = []
    for capability in given.capability or ARCHITECTURES:
        for row in rows(capability, given.only, given.keep, SMOKE if given.smoke else ()):
            table.append(row)
            print(_line(row), flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(compact(table))
    wrong = [row for row in table if row["faults"]]
    print(f"{len(table)} kernels, {len(wrong)} with faults")
    return 1 if wrong else 0


def compact(table: Sequence[dict[str, Any]]) -> str:
    """JSON of rows by their columns, whose names stand once."""
    columns = list(table[0]) if table else []
    head = json.dumps(columns, separators=(",", ":"))
    lines = (
        json.dumps([_without_zeros(value) for value in row.values()], separators=(",", ":"))
        for row in table
    )
    return f'{{"columns": {head},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def _without_zeros(value: Any) -> Any:
    return {} if isinstance(value, dict) and not any(value.values()) else value


def _line(row: dict[str, Any]) -> str:
    pipeline = row["pipeline"]
    numbers = (
        row["registers"],
        row["stack"],
        row["shared"],
        row["programs"],
        pipeline["depth"],
        pipeline["round_trips"],
        pipeline["exposed_loads"],
    )
    line = f"{row['capability']:<4}{row['launch'][:37]:38}{row['name'][:14]:>10}"
    line += "".join(f"{number:10}" for number in numbers) + "  " + ",".join(row["matrix"])
    return line + "".join(f"  ! {fault}" for fault in row["faults"])


if __name__ == "__main__":
    sys.exit(main())
