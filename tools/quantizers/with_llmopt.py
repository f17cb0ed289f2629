"""This package, for tools/quantizer_speed.py. The task is there."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from llmopt.quant.methods.base import MethodOptions
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.request.request import QuantizeRequest


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    # What it imports on first use counts for none of the packages.
    assert transformers.AutoModelForCausalLM and transformers.AutoTokenizer
    request = QuantizeRequest(
        Path(task["model"]),
        Path(task["output"]),
        method=task["method"],
        bits=4,
        group_size=128,
        num_samples=len(task["tokens"]),
        seq_len=len(task["tokens"][0]),
        held_out=0,
        options=MethodOptions(true_sequential=task["sequential"]),
    )
    began = time.perf_counter()
    quantize(request)
    seconds = time.perf_counter() - began
    Path(sys.argv[2]).write_text(json.dumps({"seconds": seconds, "version": "llmopt"}))


if __name__ == "__main__":
    main()
