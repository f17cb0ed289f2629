"""hqq, for tools/quality_table.py. The task is there; it writes dequantized weights."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from plain import linears_of, load, save


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    model = load(task["model"])
    config = BaseQuantizeConfig(nbits=task["bits"], group_size=task["group_size"], axis=1)
    stored, began = 0, time.perf_counter()
    for linear in linears_of(model).values():
        quantized = HQQLinear(
            linear, config, compute_dtype=torch.bfloat16, device="cpu", del_orig=False
        )
        packed = quantized.state_dict()
        parts = [packed["W_q"], packed["scale"], packed["zero"]]
        stored += sum(part.numel() * part.element_size() for part in parts)
        linear.weight.data = quantized.dequantize().to(linear.weight.dtype)
    seconds = time.perf_counter() - began
    save(model, task)
    answer = {
        "seconds": seconds,
        "version": f"hqq {version('hqq')}",
        "wrote": "plain",
        "stored_bytes": stored,
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
