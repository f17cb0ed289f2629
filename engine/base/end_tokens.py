"""Which tokens end a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...quant.model.checkpoint import read_json


def end_token_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every id that ends a sequence: the generation config's, else the model's, and the tokenizer's."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    listed = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(listed) if isinstance(listed, list) else {listed}
    ids.add(tokenizer.eos_token_id)
    return frozenset(token for token in ids if token is not None)
