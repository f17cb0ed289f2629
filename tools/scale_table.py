"""Plan GPTQ in workers of large models, for docs/scale.md: `python -m tools.scale_table` prints the table."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from llmopt.quant.pipeline.estimate import estimate_memory, estimate_operations
from llmopt.quant.pipeline.preflight import busiest
from llmopt.quant.plan.plan import make_plan
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.calibration import no_calibration

from .hollow_models import REAL, write

HEAD = "| model | GiB of weights | workers | GiB of a worker | 10^15 operations | hours at 10^14 a second |"


def table() -> str:
    """The plan of the worker that has most, for each model and number of workers."""
    lines = [HEAD, f"| --- |{' --: |' * 5}"]
    words = {"method": "gptq", "format": "compressed-tensors", "bits": 4, "group_size": 128}
    ids, others = (torch.zeros(count, 2048, dtype=torch.int64) for count in (512, 64))
    texts = replace(no_calibration(), token_ids=ids, held_out=others)
    with tempfile.TemporaryDirectory() as parent:
        for name, config in REAL.items():
            folder = Path(parent) / name
            size = write(folder, config, random=False) / 2**30
            plan = make_plan(QuantizeRequest.of(str(folder), folder / "out", seq_len=2048, **words))
            for number in (1, 4, 16, 64):
                tokens, lanes = busiest(texts, number)
                memory = estimate_memory(
                    plan, config.hidden_size, tokens, held_out=True, measured_now=True, lanes=lanes
                )
                done, held = estimate_operations(plan, tokens, number), memory.bytes / 2**30
                cells = f"{held:,.0f} | {done / 1e15:,.0f} | {done / 1e14 / 3600:.2f}"
                lines.append(f"| {name} | {size:,.0f} | {number} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
