"""AutoAWQ's own loader. See `protocol`.

On a CPU it asks for intel_extension_for_pytorch, which no current torch has; its layers also have a plain
path, in float16, and that is what runs here.
"""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.metadata

import awq.models.base
import awq.modules.linear.gemm
import torch
from awq import AutoAWQForCausalLM
from protocol import Answer, Task, answer_of, serve


def load_and_answer(task: Task) -> Answer:
    awq.models.base.get_best_device = lambda: "a device that needs no extension"
    awq.modules.linear.gemm.TRITON_AVAILABLE = False
    model = AutoAWQForCausalLM.from_quantized(
        task["folder"],
        fuse_layers=False,
        torch_dtype=torch.float16,
        device_map={"": "cpu"},
        safetensors=True,
    )
    version = importlib.metadata.version("autoawq")
    return answer_of(model.model.eval(), task) | {
        "loader": f"autoawq {version}, its plain path, float16"
    }


if __name__ == "__main__":
    serve(load_and_answer)
