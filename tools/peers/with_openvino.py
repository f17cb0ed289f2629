"""OpenVINO GenAI reading a GGUF file, one sequence at a time, for tools/cpu_peers.py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker import Run, serve


def opened(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    pipeline = genai.LLMPipeline(options["model"], "CPU", INFERENCE_NUM_THREADS=options["threads"])

    def run(prompts: list[list[int]], new: int) -> list[list[float]]:
        found = []
        for prompt in prompts:
            times: list[float] = []

            class Stamp(genai.StreamerBase):
                def write(self, token: Any) -> Any:
                    times.append(time.perf_counter())  # noqa: B023 - used within this turn
                    return genai.StreamingStatus.RUNNING

                def end(self) -> None:
                    pass

            tokens = np.array([prompt], dtype=np.int64)
            inputs = genai.TokenizedInputs(ov.Tensor(tokens), ov.Tensor(np.ones_like(tokens)))
            settings = genai.GenerationConfig()
            settings.max_new_tokens, settings.ignore_eos = new, True
            pipeline.generate(inputs, settings, Stamp())
            found.append(times)
        return found

    return run, {"version": ov.__version__}


if __name__ == "__main__":
    serve(opened)
