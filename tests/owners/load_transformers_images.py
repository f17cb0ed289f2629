"""transformers with compressed-tensors, prompts with images as the processor made them. See `protocol`.

A task has `inputs`: for each prompt a safetensors file with the arguments of the model's forward.
"""

from __future__ import annotations

import importlib.metadata

import torch
import transformers
from protocol import Answer, Task, serve, table
from safetensors.torch import load_file


@torch.no_grad()
def load_and_answer(task: Task) -> Answer:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        task["folder"], dtype=getattr(torch, task["dtype"])
    ).eval()
    logprobs = []
    for path in task["inputs"]:
        logits = model(**load_file(path)).logits[0, -1:].float()
        logprobs.append(table(logits.log_softmax(-1), task["top"]))
    reader = importlib.metadata.version("compressed-tensors")
    loader = (
        f"transformers {transformers.__version__}, compressed-tensors {reader}, {task['dtype']}"
    )
    return {"loader": loader, "tokens": [], "logprobs": logprobs}


if __name__ == "__main__":
    serve(load_and_answer)
