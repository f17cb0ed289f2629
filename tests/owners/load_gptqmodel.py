"""GPTQModel's own loader. See `protocol`."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import gptqmodel
import torch
from gptqmodel import GPTQModel
from protocol import Answer, Task, answer_of, serve


def load_and_answer(task: Task) -> Answer:
    loaded = GPTQModel.load(task["folder"], device="cpu", dtype=getattr(torch, task["dtype"]))
    model = loaded.model.eval()
    kernels = sorted({type(m).__name__ for m in model.modules() if hasattr(m, "qweight")})
    loader = f"gptqmodel {gptqmodel.__version__} ({', '.join(kernels)}), {task['dtype']}"
    return answer_of(model, task) | {"loader": loader}


if __name__ == "__main__":
    serve(load_and_answer)
