"""What the tests of this folder share besides fixtures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS
from safetensors.torch import save_file

STORIES = MODELS / "stories3M"
TINY = MODELS / "stories260K"
SAMPLES, LENGTH = 24, 128  # small enough to be quick, large enough that AWQ finds better scales

# For tests that look at files, not at errors: a run through the pipeline as quick as may be.
QUICK: dict[str, Any] = {"num_samples": 2, "seq_len": 32, "held_out": 0}


def llmopt_environment() -> dict[str, str]:
    """One thread, as `quantized` uses, so that bytes can be compared; no network."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


def save_layer(folder: Path) -> Path:
    """The first layer of stories3M, cut to 128 channels, which every format holds."""
    source = Checkpoint(STORIES)
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(source.config | sizes | heads))
    for name, content in source.companions().items():
        (folder / name).write_bytes(content)
    dropped = tuple(f"model.layers.{index}." for index in range(1, 5))
    kept = {name: part for name, part in source.tensors() if not name.startswith(dropped)}
    widths = {256: 128, 512: 256}
    cut = {
        name: part[tuple(slice(widths.get(size)) for size in part.shape)].contiguous()
        for name, part in kept.items()
        if "embed" not in name
    }
    cut["model.embed_tokens.weight"] = kept["model.embed_tokens.weight"][:, :128].contiguous()
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
