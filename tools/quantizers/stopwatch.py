"""Wall-clock and processor seconds of a worker's quantization, for its answer."""

from __future__ import annotations

import time


def import_model(folder: str) -> None:
    """Import the class of a checkpoint's model and its tokenizer's: no package's time has these imports."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _ = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


class Stopwatch:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        """`seconds` by the clock, `cpu_seconds` of all threads, which other processes do not lengthen."""
        return {
            "seconds": time.perf_counter() - self._wall,
            "cpu_seconds": time.process_time() - self._cpu,
        }
