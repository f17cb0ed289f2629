"""Write `data/bitsandbytes.json`: what bitsandbytes itself makes of fixed weights, on a CPU.

Made with bitsandbytes 0.49.2 and torch 2.13 in an environment of its own:

    pip install bitsandbytes==0.49.2 torch
    OMP_NUM_THREADS=1 python tools/make_bitsandbytes_golden.py
"""

from __future__ import annotations

import base64
import importlib
import json
from pathlib import Path
from typing import Any

import torch

GOLDEN = (
    Path(__file__).resolve().parents[1]
    / "tests"
    / "quant"
    / "formats"
    / "data"
    / "bitsandbytes.json"
)
SHAPES = ((96, 192), (7, 30))


def golden_weight(rows: int, columns: int) -> torch.Tensor:
    """Float32 weights `[rows, columns]` by a formula: a heavy tail, both signs, a row of zeros."""
    index = torch.arange(rows * columns, dtype=torch.int64)
    uniform = ((index * 2654435761 + 12345) % 2**32).to(torch.float64) / 2**32 - 0.5
    weight = (uniform**3 + 0.02 * uniform).to(torch.float32).view(rows, columns)
    weight *= 1 + torch.arange(rows, dtype=torch.float32).unsqueeze(1) % 5
    weight[3] = 0
    return weight


def _text(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    return base64.b64encode(bytes(data.tolist())).decode()


def main() -> None:
    functional = importlib.import_module("bitsandbytes.functional")
    version = importlib.import_module("bitsandbytes").__version__
    cases: list[dict[str, Any]] = []
    for rows, columns in SHAPES:
        weight = golden_weight(rows, columns)
        case: dict[str, Any] = {"shape": [rows, columns]}
        for kind in ("nf4", "fp4"):
            packed, plain = functional.quantize_4bit(weight, quant_type=kind)
            _, double = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=True)
            case[kind] = {
                "weight": _text(packed),
                "absmax": _text(plain.absmax),
                "double_absmax": _text(double.absmax),
                "nested_absmax": _text(double.state2.absmax),
                "nested_map": _text(double.state2.code),
                "nested_offset": _text(double.offset.view(1)),
                "dequantized": _text(functional.dequantize_4bit(packed, plain)[:2]),
            }
        codes, absmax, _ = functional.int8_vectorwise_quant(weight[:24].to(torch.float16))
        case["int8"] = {"weight": _text(codes), "absmax": _text(absmax)}
        cases.append(case)
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps({"bitsandbytes": version, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
