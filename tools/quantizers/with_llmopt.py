"""This package, for tools/quality_table.py and tools/quantizer_speed.py. The task is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.quant.plan.request import QuantizeRequest
from stopwatch import Stopwatch, import_model


def grid(task: dict[str, Any]) -> dict[str, Any]:
    """The options of the request that say the grid."""
    if gguf_type := task.get("gguf_type"):
        return {"gguf_type": gguf_type, "format": "gguf"}
    if "target_bpw" in task:
        return {"target_bpw": task["target_bpw"]}
    if task["method"] in ("trellis", "quip", "squeezellm"):
        return {"bits": task["bits"]}
    if "scheme" in task:
        return {}  # the method is the grid
    grid = {key: task[key] for key in ("bits", "group_size", "symmetric")}
    if "rotations" in task:
        grid["rotations"] = tuple(task["rotations"])
    # Only compressed-tensors holds every width.
    return grid | ({"format": "compressed-tensors"} if task.get("any_width") else {})


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    import_model(task["model"])
    options: dict[str, Any] = {"true_sequential": task["sequential"]}
    if task["method"] == "autoround":
        options["iters"] = task["iters"]
    options |= {key: task[key] for key in ("asymmetric", "solver", "finetune_steps") if key in task}
    request = QuantizeRequest(
        Path(task["model"]),
        Path(task["output"]),
        method=task["method"],
        calibration=task.get("calibration"),
        num_samples=len(task["tokens"]),
        seq_len=len(task["tokens"][0]),
        held_out=0,
        seed=task.get("seed", 0),
        options=MethodOptions(**options),
        **grid(task),
    )
    watch = Stopwatch()
    result = quantize(request)
    seconds = watch.seconds()
    answer = {**seconds, "version": "llmopt", "notes": result.notes}
    if manifest := next(Path(task["output"]).rglob(MANIFEST_NAME), None):
        answer["calibration_sha256"] = json.loads(manifest.read_text())["calibration"]["sha256"]
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
