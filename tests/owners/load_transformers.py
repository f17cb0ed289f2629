"""transformers with whatever reader a format needs. See `protocol`; options: `dequantize`, `gguf_file`."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from protocol import Answer, Task, answer_of, serve

READERS = ("compressed-tensors", "bitsandbytes", "accelerate")


def load_and_answer(task: Task) -> Answer:
    options: dict[str, Any] = {"dtype": getattr(torch, task["dtype"]), "device_map": "cpu"}
    if task.get("dequantize"):
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    if gguf_file := task.get("gguf_file"):
        options["gguf_file"] = gguf_file
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        task["folder"], output_loading_info=True, **options
    )
    model, info = loaded
    found = [f"transformers {transformers.__version__}"]
    installed = [name for name in READERS if find_spec(name.replace("-", "_"))]
    found += [f"{name} {importlib.metadata.version(name)}" for name in installed]
    # Parameters that no file has: they were initialised at random.
    missing = sorted(info["missing_keys"])
    loader = f"{', '.join(found)}, {task['dtype']}"
    return answer_of(model.eval(), task) | {"loader": loader, "missing": missing}


if __name__ == "__main__":
    serve(load_and_answer)
