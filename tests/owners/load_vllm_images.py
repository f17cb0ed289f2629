"""vLLM on a CPU, prompts with images. See `protocol`; a task has `texts` and `images` (paths of each)."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import gc

import vllm
from PIL import Image
from protocol import Answer, Task, serve


def load_and_answer(task: Task) -> Answer:
    model = vllm.LLM(
        task["folder"],
        dtype=task["dtype"],
        max_model_len=512,
        max_num_seqs=len(task["texts"]),
        enforce_eager=True,
        max_logprobs=task["top"],
        limit_mm_per_prompt={"image": 2, "video": 0},
    )
    params = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=task["max_tokens"],
        ignore_eos=True,
        logprobs=task["top"],
    )
    prompts = [
        {
            "prompt": text,
            "multi_modal_data": {"image": [Image.open(path).convert("RGB") for path in paths]},
        }
        for text, paths in zip(task["texts"], task["images"], strict=True)
    ]
    outputs = [output.outputs[0] for output in model.generate(prompts, params)]
    answer = {
        "loader": f"vLLM {vllm.__version__} for CPU, {task['dtype']}",
        "tokens": [list(output.token_ids) for output in outputs],
        # Of the first generated token: those behind another token would have another context.
        "logprobs": [
            [{str(token): entry.logprob for token, entry in output.logprobs[0].items()}]
            for output in outputs
        ],
    }
    del model
    gc.collect()
    return answer


if __name__ == "__main__":
    serve(load_and_answer)
