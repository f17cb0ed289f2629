"""GPTQModel, for tools/quality_table.py and tools/quantizer_speed.py. The task is there."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from stopwatch import Stopwatch, import_model


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    # The file of a method is of its own format; AWQ's is asymmetric, and GPTQ's first version symmetric.
    gptq = "gptq" if task["symmetric"] else "gptq_v2"
    config = QuantizeConfig(
        bits=task["bits"],
        group_size=task["group_size"],
        sym=task["symmetric"],
        method=task["method"],
        format=gptq if task["method"] == "gptq" else "gemm",
        device="cpu",
    )
    import_model(task["model"])
    watch = Stopwatch()
    model = GPTQModel.load(task["model"], config, dtype=torch.bfloat16)
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in task["tokens"]]
    model.quantize(rows, batch_size=1)
    model.save(task["output"])
    seconds = watch.seconds()
    answer = {**seconds, "version": f"gptqmodel {version('gptqmodel')}"}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
