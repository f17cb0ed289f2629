"""llmopt's own engine. See `protocol`; the folder holds a checkpoint or a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch
from llmopt.base.version import VERSION
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from protocol import Answer, Task, serve, table


def load_and_answer(task: Task) -> Answer:
    folder = Path(task["folder"])
    path = next(folder.glob("*.gguf"), folder)
    engine = Engine(EngineConfig(path, dtype=task["dtype"], device="cpu"))
    tokens, logprobs = [], []
    for prompt in task["prompts"]:
        ids = list(prompt)
        logits = engine.prompt_logits(ids).float()
        logprobs.append(table(logits.log_softmax(-1)[:-1], task["top"]))
        for _ in range(task["max_tokens"]):
            ids.append(int(engine.prompt_logits(ids)[-1].argmax()))
        tokens.append(ids[len(prompt) :])
    return {
        "loader": f"llmopt {VERSION}, torch {torch.__version__}, {task['dtype']}",
        "tokens": tokens,
        "logprobs": logprobs,
    }


if __name__ == "__main__":
    serve(load_and_answer)
