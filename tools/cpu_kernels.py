"""Benchmark linear layers on CPU, beside torch's: `python tools/cpu_kernels.py [--threads 2] [--json FILE]`.

`--only 'trellis|W4'` takes the operations whose name the pattern finds; `--busy` one thread and its own
processor time, for a busy machine: the ceilings, in wall time, then mean nothing.

Weights are cold: each operation goes through copies that together are larger than the last cache. All
operations of a shape are interleaved in every round, and the two roofline ceilings (bytes read and 8-bit
multiply-adds per second) are measured in every round too; the ceiling is the best round so far, since
background load only lowers it.
Printed are the median over the rounds, the lowest and highest round, and the share of the ceiling: the
time that the bytes of the weight, or its multiply-adds, would take at the ceilings, over the time taken.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from llmopt.engine.base.host import cpu_model, usable_cores
from llmopt.engine.kernels.common.cpu_measurements import Roofs
from llmopt.engine.kernels.linear.hadamard_linear import (
    E8pLinear,
    NativeE8pLinear,
    NativeTrellisLinear,
)
from llmopt.engine.kernels.linear.linear import LinearKernel, OneDnnLinear, TorchLinear
from llmopt.engine.kernels.linear.native_linear import native_linear
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    Int4PackLinear,
    Int8PackLinear,
    QuantizedLinearKernelQuery,
    TiledDequantLinear,
    prepare_quantized_linear,
)
from llmopt.engine.kernels.linear.torch_linear import Int8MatmulLinear
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.base.incoherence import whole_width
from llmopt.quant.kinds.e8p.kind import E8pTensor
from llmopt.quant.kinds.e8p.scheme import E8pScheme
from llmopt.quant.kinds.integer.kind import IntTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.kind import LookupTensor
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.trellis.kind import TrellisTensor
from llmopt.quant.kinds.trellis.scheme import TRELLIS_CODEBOOKS, TrellisScheme

SHAPES = {  # the linears of a layer: (out, in)
    "1.1b": ((2560, 2048), (2048, 2048), (11264, 2048), (2048, 5632)),
    "0.13b": ((1280, 768), (768, 768), (4096, 768), (768, 2048)),
}
COLD_BYTES = 64 * 2**20
W8A8 = IntScheme(8, -1, True, Activations("int8"))


@dataclass(frozen=True, slots=True)
class Row:
    """Timing of one operation at one shape, in microseconds."""

    out_features: int
    in_features: int
    rows: int
    operation: str
    microseconds: float
    lowest: float
    highest: float
    gb_per_second: float
    gop_per_second: float
    percent_of_roof: float


def operations(out: int, inputs: int) -> dict[str, tuple[Callable[[], LinearKernel], bool]]:
    """The operations compared: a factory for each, and whether it is an 8-bit integer GEMM."""

    def ours(scheme: IntScheme, bits: int) -> Callable[[], LinearKernel]:
        kernel_query = QuantizedLinearKernelQuery("cpu", torch.bfloat16, out, inputs, scheme, bits)
        chosen = QUANTIZED_LINEAR.select(kernel_query)
        assert chosen.name.startswith("native")
        weight = random_weight(out, inputs, scheme)
        return lambda: chosen.run(weight, torch.bfloat16)

    int4, int8 = IntScheme(4, 128, True), IntScheme(8, -1, True)
    codes4, codes8 = random_weight(out, inputs, int4), random_weight(out, inputs, int8)
    rounded = replace(codes8, scheme=W8A8)
    tables = random_tables(out, inputs)
    plain = torch.randn(out, inputs).to(torch.bfloat16)

    def trellis(bits: int, codebook: str, input_bits: int) -> Callable[[], LinearKernel]:
        weight = random_trellis(out, inputs, TrellisScheme(bits, codebook))
        return lambda: NativeTrellisLinear(weight, input_bits)

    def e8p(bits: int, input_bits: int) -> Callable[[], LinearKernel]:
        weight = random_e8p(out, inputs, E8pScheme(bits))
        return lambda: NativeE8pLinear(weight, input_bits)

    lattice = random_e8p(out, inputs, E8pScheme(2))
    return {
        "ours W4A8 g128": (ours(int4, 8), True),
        "ours W4A8 g32": (ours(IntScheme(4, 32, False), 8), True),
        "ours W8A8": (ours(W8A8, 16), True),
        "ours W4A16 g128": (ours(int4, 16), False),
        "ours W8A16": (ours(int8, 16), False),
        "ours lookup4": (lambda: prepare_quantized_linear(tables, torch.bfloat16), False),
        "torch lookup4 tiled": (lambda: TiledDequantLinear(tables, torch.bfloat16), False),
        **{
            f"trellis{bits} {codebook} A{input_bits}": (
                trellis(bits, codebook, input_bits),
                input_bits < 32,
            )
            for bits in (2, 3, 4)
            for codebook in TRELLIS_CODEBOOKS
            for input_bits in (8, 16, 32)
            if codebook == "mul1" or (bits == 2 and input_bits > 8)
        },
        **{
            f"e8p{bits} A{input_bits}": (e8p(bits, input_bits), input_bits < 32)
            for bits in (2, 3, 4)
            for input_bits in (8, 16, 32)
        },
        "torch e8p2": (lambda: E8pLinear(lattice, torch.bfloat16), False),
        "torch _int_mm W8A8": (lambda: Int8MatmulLinear(rounded, torch.bfloat16), True),
        "torch int4pack g128": (lambda: Int4PackLinear(codes4, torch.bfloat16), False),
        "torch int8pack": (lambda: Int8PackLinear(codes8, torch.bfloat16), False),
        "torch bf16": (lambda: TorchLinear(plain.clone()), False),
        "oneDNN bf16 prepacked": (lambda: OneDnnLinear(plain), False),
    }


def random_trellis(out: int, inputs: int, scheme: TrellisScheme) -> TrellisTensor:
    words = torch.randint(-(2**15), 2**15, (inputs // 16, out // 16, 16 * scheme.bits))
    sides = torch.rand(inputs).to(torch.float16), torch.rand(out).to(torch.float16)
    return TrellisTensor(words.to(torch.int16), *sides, scheme)


def random_e8p(out: int, inputs: int, scheme: E8pScheme) -> E8pTensor:
    def codes(bits: int) -> torch.Tensor:
        numbers = torch.randint(0, 2**bits, (out, inputs // 8))
        return numbers.to(torch.uint8 if bits == 8 else torch.int16)

    sides = torch.rand(inputs).to(torch.float16), torch.rand(out).to(torch.float16)
    residual = {2: None, 3: codes(8), 4: codes(16)}[scheme.bits]
    left, right = (whole_width(width).factor for width in (inputs, out))
    return E8pTensor(codes(16), *sides, torch.tensor(1.0), scheme, residual, left, right)


def random_weight(out: int, inputs: int, scheme: IntScheme) -> IntTensor:
    groups = scheme.num_groups(inputs)
    return IntTensor(
        torch.randint(0, 2**scheme.bits, (out, inputs), dtype=torch.uint8),
        torch.rand(out, groups).to(torch.float16),
        torch.full((out, groups), scheme.middle, dtype=torch.uint8)
        if scheme.symmetric
        else torch.randint(0, 2**scheme.bits, (out, groups), dtype=torch.uint8),
        scheme,
    )


def random_tables(out: int, inputs: int) -> LookupTensor:
    return LookupTensor(
        torch.randint(0, 16, (out, inputs), dtype=torch.uint8),
        torch.randn(out, 16).sort(dim=1).values.to(torch.float16),
        LookupScheme(4),
    )


def measure(
    out: int,
    inputs: int,
    only: re.Pattern[str],
    clock: Callable[[], float],
    counts: list[int],
    rounds: int,
    seconds: float,
    roofs: Roofs,
) -> list[Row]:
    """The operations at one shape whose name is found by `only`, interleaved."""
    made = {}
    for name, (make, is_int8) in operations(out, inputs).items():
        if not only.search(name):
            continue
        first = make()
        copies = max(2, min(64, -(-COLD_BYTES // first.weight_bytes)))
        made[name] = ([first, *(make() for _ in range(copies - 1))], is_int8)
    rows = []
    for count in counts:
        x = torch.randn(count, inputs, dtype=torch.bfloat16)
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(rounds):
            roofs.measure()
            for name, (kernels, _) in made.items():
                times[name].append(_one_call(kernels, x, seconds, clock))
        read, operate = max(roofs.bytes), max(roofs.operations)
        for name, (kernels, is_int8) in made.items():
            middle = statistics.median(times[name])
            num_bytes, num_operations = kernels[0].weight_bytes, 2 * count * out * inputs
            least = max(num_bytes / read, num_operations / (operate if is_int8 else operate / 2))
            rows.append(
                Row(
                    out,
                    inputs,
                    count,
                    name,
                    middle * 1e6,
                    min(times[name]) * 1e6,
                    max(times[name]) * 1e6,
                    num_bytes / middle / 1e9,
                    num_operations / middle / 1e9,
                    100 * least / middle,
                )
            )
            print(
                f"{out:>6} x {inputs:<5} rows {count:<4} {name:<22} {rows[-1].microseconds:>9.0f} us "
                f"({rows[-1].lowest:.0f}-{rows[-1].highest:.0f})  {rows[-1].gb_per_second:>5.1f} GB/s "
                f"{rows[-1].gop_per_second:>6.0f} GOP/s  {rows[-1].percent_of_roof:>4.0f} % of roof",
                flush=True,
            )
    return rows


def _one_call(
    kernels: list[LinearKernel], x: torch.Tensor, seconds: float, clock: Callable[[], float]
) -> float:
    """Seconds of a call, the median of those that fit in the time, each with the next copy."""
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 3 or (time.perf_counter() - begin < seconds and len(taken) < len(kernels)):
        kernel = kernels[len(taken) % len(kernels)]
        start = clock()
        kernel(x)
        taken.append(clock() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="1.1b")
    parser.add_argument("--shapes", type=int, default=4, help="of the layer, the first so many")
    parser.add_argument("--only", type=re.compile, default=re.compile(""))
    parser.add_argument("--rows", default="1,8,16,64,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.03, help="for an operation in a round")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--busy", action="store_true", help="time a single thread's processor time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = time.thread_time if options.busy else time.perf_counter
    if options.busy:
        options.threads = 1
    torch.set_num_threads(options.threads)
    roofs = Roofs(options.threads)
    counts = [int(count) for count in options.rows.split(",")]
    print(f"{cpu_model()}, {options.threads} threads, {native_linear().path}")
    rows: list[Row] = []
    with torch.inference_mode():
        for out, inputs in SHAPES[options.model][: options.shapes]:
            rows += measure(
                *(out, inputs, options.only, clock, counts),
                *(options.rounds, options.seconds, roofs),
            )
    read, operate = (sorted(values) for values in (roofs.bytes, roofs.operations))
    print(
        f"roofs: read {statistics.median(read) / 1e9:.1f} GB/s "
        f"({read[0] / 1e9:.1f}-{read[-1] / 1e9:.1f}), "
        f"8-bit {statistics.median(operate) / 1e9:.0f} GOP/s "
        f"({operate[0] / 1e9:.0f}-{operate[-1] / 1e9:.0f}), bf16 counted as half of it"
    )
    if options.json:
        record = {
            "processor": cpu_model(),
            "path": native_linear().path,
            "threads": options.threads,
            "clock": "processor time" if options.busy else "wall time",
            "torch": torch.__version__,
            "read_bytes_per_second": read,
            "int8_operations_per_second": operate,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
