"""vLLM on a CPU. See `protocol`."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import gc

import vllm
from protocol import Answer, Task, serve


def load_and_answer(task: Task) -> Answer:
    model = vllm.LLM(
        task["folder"],
        dtype=task["dtype"],
        max_model_len=256,
        max_num_seqs=len(task["prompts"]),
        enforce_eager=True,
        max_logprobs=task["top"],
    )
    params = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=task["max_tokens"],
        ignore_eos=True,
        prompt_logprobs=task["top"],
    )
    outputs = model.generate([{"prompt_token_ids": ids} for ids in task["prompts"]], params)
    answer = {
        "loader": f"vLLM {vllm.__version__} for CPU, {task['dtype']}",
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        # vLLM has a table for the first token too, which is None.
        "logprobs": [
            [
                {str(token): entry.logprob for token, entry in entries.items()}
                for entries in output.prompt_logprobs[1:]
            ]
            for output in outputs
        ],
    }
    del model
    gc.collect()
    return answer


if __name__ == "__main__":
    serve(load_and_answer)
