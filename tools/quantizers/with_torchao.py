"""torchao's integer weights, for tools/quality_table.py. The task is there; it writes dequantized weights."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from plain import linears_of, load, save
from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    model = load(task["model"])
    linears = linears_of(model)
    names = {id(linear) for linear in linears.values()}
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{task['bits']}"),
        granularity=PerGroup(task["group_size"]),
        mapping_type=MappingType.SYMMETRIC if task["symmetric"] else MappingType.ASYMMETRIC,
    )
    began = time.perf_counter()
    quantize_(model, config, filter_fn=lambda module, _: id(module) in names)
    seconds = time.perf_counter() - began
    stored = 0
    for linear in linears.values():
        weight = linear.weight
        # What it saves are these tensors: codes below 8 bits lie in bytes.
        names = [*weight.tensor_data_names, *getattr(weight, "optional_tensor_data_names", ())]
        parts = [getattr(weight, name) for name in names]
        stored += sum(part.numel() * part.element_size() for part in parts if part is not None)
        linear.weight = torch.nn.Parameter(weight.dequantize().float(), requires_grad=False)
    save(model, task)
    answer = {
        "seconds": seconds,
        "version": f"torchao {version('torchao')}",
        "wrote": "plain",
        "stored_bytes": stored,
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
