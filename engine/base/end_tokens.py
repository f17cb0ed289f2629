"""EOS token ids of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...quant.model.checkpoint import read_json


def end_token_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """EOS token ids: of the generation config, else the model config, and of the tokenizer."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    listed = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(listed) if isinstance(listed, list) else {listed}
    ids.add(tokenizer.eos_token_id)
    return frozenset(token for token in ids if token is not None)
