"""llm-compressor, for tools/quality_table.py and tools/quantizer_speed.py. The task is there."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from stopwatch import Stopwatch, import_model
from transformers import AutoModelForCausalLM


def grid_of(task: dict[str, Any]) -> dict[str, Any]:
    """A preset scheme by name, or integer codes in groups."""
    if "scheme" in task:
        return {"targets": "Linear", "scheme": task["scheme"]}
    weights = QuantizationArgs(
        num_bits=task["bits"],
        type=QuantizationType.INT,
        strategy=QuantizationStrategy.GROUP,
        group_size=task["group_size"],
        symmetric=task["symmetric"],
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return {"config_groups": {"group_0": scheme}}


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in task["tokens"]]
    grid = grid_of(task)
    modifiers = {
        "rtn": lambda: [QuantizationModifier(**grid, ignore=["lm_head"])],
        "gptq": lambda: [GPTQModifier(**grid, ignore=["lm_head"])],
        "awq": lambda: [
            AWQModifier(),
            QuantizationModifier(**grid, ignore=["lm_head"]),
        ],
    }
    import_model(task["model"])
    watch = Stopwatch()
    model = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.bfloat16, trust_remote_code=False
    )
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=modifiers[task["method"]](),
        max_seq_length=len(task["tokens"][0]),
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(task["output"], save_compressed=True)
    seconds = watch.seconds()
    answer = {**seconds, "version": f"llmcompressor {version('llmcompressor')}"}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
