"""auto-round, for tools/quality_table.py and tools/quantizer_speed.py. The task is there."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from auto_round import AutoRound
from stopwatch import Stopwatch, import_model
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    tokens = torch.tensor(task["tokens"])
    import_model(task["model"])
    watch = Stopwatch()
    model = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.bfloat16, trust_remote_code=False
    )
    quantizer = AutoRound(
        model,
        AutoTokenizer.from_pretrained(task["model"], trust_remote_code=False),
        bits=task["bits"],
        group_size=task["group_size"],
        sym=task["symmetric"],
        iters=task["iters"],
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        batch_size=8,
        # Rows of equal length: it takes the first so many.
        dataset=[row[None] for row in tokens],
        device_map="cpu",
    )
    quantizer.quantize_and_save(output_dir=task["output"], format="auto_gptq")
    answer = {
        **watch.seconds(),
        "version": f"auto-round {version('auto-round')}",
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
